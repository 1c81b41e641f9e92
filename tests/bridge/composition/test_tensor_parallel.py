"""Tensor and sequence parallel layers, dispatched as one module, two or four processes (gloo)."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from tests.bridge.distributed_layers import LAYERS, ODD, PLANS, STEPS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo"),
]

TOLERANCE = 1e-10


def reports_of(folder, processes, *chosen):
    command = [sys.executable, "-m", "tests.bridge.distributed_worker", str(folder), *chosen]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WORLD": str(processes)}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert not done.returncode, done.stderr
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]
    return {name: [rank[name] for rank in ranks] for name in chosen}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return reports_of(tmp_path_factory.mktemp("layers"), 2, *(name for name in LAYERS if name != "sharded"))


def same_as_eager(seen):
    assert seen["difference"] < TOLERANCE and seen["moved"] > 0.01
    eager, ours = seen["placements"]
    assert ours == eager


@pytest.mark.composes(
    "tensor and sequence parallel layers (`parallelize_module`) inside a dispatched module",
    "works; gradients have eager's placements; dispatch after `parallelize_module`",
    section="Distributed",
)
@pytest.mark.parametrize("plan", PLANS)
def test_parallel_layers_train_as_in_eager(reports, plan):
    for seen in reports[plan]:
        same_as_eager(seen)
        assert seen["hits"] == STEPS + 2 and seen["misses"] == {}


@pytest.mark.composes(
    "FSDP2 around tensor and sequence parallel layers",
    "works; `parallelize_module`, then dispatch, then `fully_shard`",
    section="Distributed",
)
def test_fully_shard_around_parallel_layers(tmp_path):
    for plans in reports_of(tmp_path, 4, "sharded")["sharded"]:
        for seen in plans.values():
            same_as_eager(seen)
            assert seen["hits"] == STEPS + 2 and seen["misses"] == {}


@pytest.mark.composes(
    "a rank that misses, that raises or is killed",
    "all ranks run eager where one misses; a rank that is gone is an error, at the latest after the group's time-out",
    section="Distributed",
)
def test_a_rank_that_misses(reports):
    one, other = reports["one misses"]
    for seen in (one, other):
        same_as_eager(seen)
        assert seen["hits"] == 1 and list(seen["misses"].values()) == [STEPS + 1]
    assert "another process" in next(iter(one["misses"])) and "training flag" in next(iter(other["misses"]))


@pytest.mark.composes("a rank that misses, that raises or is killed")
@pytest.mark.parametrize(("fault", "words"), [("raises", "Timed out"), ("killed", "reset by peer|closed by peer")])
def test_a_rank_that_is_gone(tmp_path, fault, words):
    """The collective's error is raised; eager does not wait a second time."""
    command = [sys.executable, "-m", "tests.bridge.distributed_layers", str(tmp_path), fault]
    subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=200, check=True)
    seen = json.loads((tmp_path / "error.json").read_text())
    assert re.search(words, seen["error"]) and seen["misses"] == {}


REFUSALS = {
    "uneven": "5 elements of axis 0 are split over 2 ranks unevenly",
    "dropout": "native_dropout.default: torch draws",
    "result": "a result that is a DTensor",
    "inside": "reads a DTensor's part past its methods",
    "numbers": "each process would decide alone",
    "own plan": "dispatch the module around it",
}


@pytest.mark.parametrize("odd", ODD)
def test_what_cannot_be_is_refused_by_name(reports, odd):
    for seen in reports["refused"]:
        assert REFUSALS[odd] in seen[odd]


def test_other_uses(reports):
    for seen in reports["other uses"]:
        assert seen["second"] < TOLERANCE and seen["frozen"] < TOLERANCE and seen["hits"] == 1
        assert "collectives: name process groups" in seen["saved"]
