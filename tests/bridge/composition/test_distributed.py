"""Dispatched blocks inside DDP and FSDP2, two processes (gloo): parameters after six steps are the eager run's."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.bridge.distributed_whole import WHOLE
from tests.bridge.distributed_worker import SCENARIOS, STEPS, WORLD
from tests.sampling import sampled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo"),
]

TOLERANCE = 1e-10  # float64, six steps
CALLS = 2 * STEPS
FLOAT32 = [name for name in SCENARIOS if "float32" in name]
OTHERS = {
    *FLOAT32,
    "ddp unused",
    "ddp join",
    "ddp hook",
    "ddp checkpoint",
    "fsdp mixed",
    "fsdp mixed compiled",
    "refusals",
    "fsdp flat",
    "ddp compiled",
    "fsdp compiled",
}
DISPATCHED = [name for name in SCENARIOS if name not in OTHERS]
SWEPT = {
    *("ddp static_graph", "ddp bucket_view", "fsdp not resharded", "fsdp clip", "ddp float32", "fsdp float32 adamw"),
    *("fsdp accumulate", "fsdp mixed compiled", "whole ddp no_sync", "whole ddp bucket_view"),
    *("whole ddp static_graph", "whole fsdp accumulate"),
}
"""Whose options another scenario has with dispatched blocks, or with a model that is dispatched as a whole."""


@pytest.fixture(scope="module")
def reports(request, tmp_path_factory):
    """The reports of the two processes, one per rank, by scenario that a test asks for."""
    asked = {item.callspec.params.get("scenario") for item in request.session.items if hasattr(item, "callspec")}
    chosen = [name for name in SCENARIOS | WHOLE if name in asked or name not in SWEPT]
    folder = tmp_path_factory.mktemp("distributed")
    command = [sys.executable, "-m", "tests.bridge.distributed_worker", str(folder), *chosen]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=400, check=False)
    assert not done.returncode, done.stderr
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]
    return {name: [rank[name] for rank in ranks] for name in chosen}


@pytest.mark.composes(
    "FSDP2 per layer, accumulation, clipping",
    "works; dispatch before `fully_shard`",
    section="Distributed",
)
@pytest.mark.composes(
    "DDP: buckets, `no_sync`, `static_graph`, `ZeroRedundancyOptimizer`",
    "works",
    section="Distributed",
)
@pytest.mark.parametrize("scenario", sampled(DISPATCHED, lambda name: name not in SWEPT))
def test_parameters_are_the_eager_runs(reports, scenario):
    for seen in reports[scenario]:
        assert seen["difference"] < TOLERANCE and seen["moved"] > 0.01
        assert seen["hits"] == [CALLS, CALLS] and seen["misses"] == [{}, {}]


@pytest.mark.composes(
    "DDP: `find_unused_parameters`, `join`, communication hooks, checkpoints",
    "works",
    section="Distributed",
)
def test_unused_parameters_are_found(reports):
    skipped = 2 * len(range(0, STEPS, 3))
    for seen in reports["ddp unused"]:
        assert seen["difference"] < TOLERANCE and seen["moved"] > 0.01
        assert seen["hits"] == [CALLS, CALLS - skipped] and seen["misses"] == [{}, {}]


@pytest.mark.composes("FSDP2 mixed precision")
def test_mixed_precision_shards_run_eager_with_a_reason(reports):
    """FSDP2 then hands the block tensors of another element type than it was compiled for."""
    for seen in reports["fsdp mixed"]:
        assert seen["difference"] == 0 and seen["moved"] > 0.01 and seen["hits"] == [0, 0]
        called, _ = seen["misses"]
        assert sum(called.values()) == CALLS and all("dtype" in reason for reason in called)


@pytest.mark.composes(
    "FSDP2 mixed precision",
    'works with `on_miss="compile"`, or added in that dtype; otherwise eager, with a reason',
    section="Distributed",
)
@pytest.mark.parametrize("scenario", sampled(["fsdp mixed compiled"], []))
def test_mixed_precision_shards_are_dispatched_with_entries_of_their_own(reports, scenario):
    for seen in reports[scenario]:
        assert seen["hits"] == CALLS and seen["ours"] < 3 * seen["eager"]


@pytest.mark.composes("FSDP2 per layer, accumulation, clipping")
@pytest.mark.parametrize("scenario", sampled(FLOAT32, lambda name: name not in SWEPT))
def test_float32_and_adamw(reports, scenario):
    for seen in reports[scenario]:
        assert seen["difference"] < 1e-6 and seen["moved"] > 0.005
        assert seen["hits"] == [CALLS, CALLS] and seen["misses"] == [{}, {}]


@pytest.mark.composes("DDP: `find_unused_parameters`, `join`, communication hooks, checkpoints")
def test_uneven_inputs_are_joined(reports):
    for rank, seen in enumerate(reports["ddp join"]):
        assert seen["difference"] < TOLERANCE and seen["moved"] > 0.01
        assert seen["hits"] == [CALLS - 6 * rank] * 2 and seen["misses"] == [{}, {}]


@pytest.mark.composes("DDP: `find_unused_parameters`, `join`, communication hooks, checkpoints")
def test_a_communication_hook_gets_eagers_gradients(reports):
    """It rounds them to float16, so that a difference at rounding level may become one of float16."""
    for seen in reports["ddp hook"]:
        assert seen["difference"] < 1e-3 and seen["moved"] > 0.01 and seen["hits"] == [CALLS, CALLS]


@pytest.mark.composes("DDP: `find_unused_parameters`, `join`, communication hooks, checkpoints")
def test_checkpoints_run_the_forward_again(reports):
    for seen in reports["ddp checkpoint"]:
        assert seen["difference"] < TOLERANCE and seen["moved"] > 0.01
        assert seen["hits"] == [2 * CALLS, CALLS] and seen["misses"] == [{}, {}]


@pytest.mark.composes(
    "shards and wrappers (DDP, FSDP1, DataParallel) dispatched themselves",
    "refused: dispatch the wrapped module",
    section="Distributed",
)
def test_shards_and_wrappers_are_refused_by_name(reports):
    words = {
        "sharded": "call add_tvm_dispatch before fully_shard",
        "flat": "or use fully_shard",
        "wrapped": "add_tvm_dispatch(model.module, ...)",
    }
    for seen in reports["refusals"]:
        assert {name: words[name] for name in seen if words[name] in seen[name]} == words


@pytest.mark.parametrize(("scenario", "graphs"), [("ddp compiled", 1), ("fsdp compiled", 2)])
def test_compiled_with_the_backend(reports, scenario, graphs):
    """The model inside DDP is one graph for its one bucket; of the sharded model, each block is one."""
    for seen in reports[scenario]:
        assert seen["difference"] < TOLERANCE and seen["moved"] > 0.01
        assert seen["hits"] == graphs * CALLS and seen["misses"] == []


@pytest.mark.composes("FSDP1", "not yet: eager, with a reason", section="Distributed")
def test_flat_shards_run_eager_with_a_reason(reports):
    for seen in reports["fsdp flat"]:
        assert seen["difference"] == 0 and seen["hits"] == [0, 0] and seen["misses"] == [CALLS, CALLS]


@pytest.mark.composes(
    "a whole model dispatched, in DDP (`no_sync`, bucket views, `static_graph`, unused parameters) or one FSDP2 unit",
    "works; a large one's backward has several autograd nodes, so that all-reduces start while it runs",
    section="Distributed",
)
@pytest.mark.parametrize(
    "scenario",
    sampled(
        [name for name in WHOLE if name.startswith("whole") and "mixed" not in name], lambda name: name not in SWEPT
    ),
)
def test_a_whole_model_in_several_nodes(reports, scenario):
    for seen in reports[scenario]:
        assert seen["difference"] < TOLERANCE and seen["moved"] > 0.005
        assert seen["hits"] == CALLS and not seen["misses"] and seen["nodes"] > 1


def test_all_reduces_start_before_the_backward_ends(reports):
    for seen in reports["whole ddp"]:
        events = seen["events"]
        assert events.count("segment") == seen["nodes"] and events.count("bucket") > 1
        assert "segment" in events[events.index("bucket") :]


@pytest.mark.composes("FSDP2 mixed precision")
def test_a_whole_model_with_parameters_in_half_precision(reports):
    for seen in reports["whole fsdp mixed"]:
        assert seen["hits"] == CALLS and seen["ours"] < 3 * seen["eager"]


@pytest.mark.composes(
    "layers sharded (`fully_shard`) or parallelized (`parallelize_module`) inside a module after it was dispatched",
    "eager, with a reason: dispatch each of these layers, or after `parallelize_module`",
    section="Distributed",
)
@pytest.mark.parametrize("scenario", ["fsdp inside", "tensor parallel"])
def test_layers_that_are_changed_inside_run_eager_with_a_reason(reports, scenario):
    for seen in reports[scenario]:
        assert seen["difference"] < TOLERANCE
        hits, misses = (
            (seen["hits"], seen["misses"]) if scenario == "fsdp inside" else (seen["hits"][0], seen["misses"][0])
        )
        assert hits == 0 and all("hook on submodule" in reason for reason in misses) and misses


@pytest.mark.composes(
    "a dispatched module that gets a plan of its own afterwards, or DTensors as its parameters or arguments",
    "eager, with a reason",
    section="Distributed",
)
@pytest.mark.parametrize("scenario", ["parallel plans", "distributed parameters"])
def test_shards_are_never_taken_for_tensors(reports, scenario):
    for seen in reports[scenario]:
        for name, told in seen.items():
            same = told["difference"] < TOLERANCE if scenario == "parallel plans" else told["same"]
            assert same and told["hits"] == 0 and told["misses"], (name, told)
