"""Tensor and sequence parallel layers, dispatched as one module, two or four processes (gloo)."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from tests.bridge.distributed_layers import GROUPS, ODD, PLANS, STEPS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo"),
]

TOLERANCE = 1e-10


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The results of all groups of processes; ranks share a cache of compiled code."""
    folder = tmp_path_factory.mktemp("layers")
    command = [sys.executable, "-m", "tests.bridge.distributed_layers", str(folder)]
    environment = (
        os.environ | {"OMP_NUM_THREADS": "1"} | {"BRIDGE_CACHE": "1", "BRIDGE_CACHE_DIR": str(folder / "cache")}
    )
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=400, check=False)
    assert not done.returncode, done.stderr
    (folder / "stderr").write_text(done.stderr)
    return folder


def reports_of(folder, group):
    assert not json.loads((folder / "failed.json").read_text())[group], (folder / "stderr").read_text()
    ranks = [json.loads((folder / group / f"{rank}.json").read_text()) for rank in range(GROUPS[group])]
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@pytest.fixture(scope="module")
def reports(folder):
    return reports_of(folder, "layers")


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
def test_fully_shard_around_parallel_layers(folder):
    for plans in reports_of(folder, "sharded")["sharded"]:
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
def test_a_rank_that_is_gone(folder, fault, words):
    """The collective's error is raised; eager does not wait a second time."""
    seen = json.loads((folder / fault / "error.json").read_text())
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
        assert "collectives, which name process groups: cannot be saved" in seen["saved"]
