"""Forward, backward, buffers and generator state on a GPU beside eager's, then fifty steps of training."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils import _pytree as pytree

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from tests.bridge.compare import as_call, check_module, clone_tree
from tests.device import DEVICE, generators, moved
from tests.gpu.cases import CASES, LAYERS
from tests.sweep.check import check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: TEST_DEVICE=cuda, or make test-gpu"),
]

EVERYTHING = {**LAYERS, **CASES}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_in_every_type(name, dtype):
    make, sample = LAYERS[name]
    same_masks = dtype == torch.float64 or "p=0.0" in name
    if not same_masks:
        pytest.skip("a GPU's dropout draws other masks in other types: test_masks_are_eagers compares those")
    check_module(make, sample, dtype=dtype)


@pytest.mark.filterwarnings("ignore:RNN module weights")  # a copy's weights lie apart, also in eager
@pytest.mark.parametrize("name", CASES)
def test_a_module(name):
    make, sample = CASES[name]
    torch.manual_seed(0)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):  # or eager differs from call to call
        verdict = check(make().double(), as_call(clone_tree(sample(), torch.float64)), rtol=1e-10)
    assert verdict.status == "pass", verdict


@pytest.mark.filterwarnings("ignore:RNN module weights")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in EVERYTHING),
        *((name, torch.bfloat16) for name in LAYERS),
    ],
)
def test_fifty_steps_of_training(name, dtype):
    """Losses stay beside eager's, the generator's state is eager's after every step."""
    make, sample = EVERYTHING[name]
    torch.manual_seed(0)
    eager = make().to(DEVICE, dtype).train()
    ours = copy.deepcopy(eager)
    call = as_call(sample())
    call = type(call)(*moved(clone_tree((call.args, call.kwargs), dtype)))
    add_tvm_dispatch(ours, call.args, sample_kwargs=call.kwargs or None)
    losses, states = [], []
    for module in (eager, ours):
        optimizer = torch.optim.SGD(module.parameters(), 0.01)
        torch.manual_seed(1)
        curve, drawn = [], []
        for _ in range(50):
            optimizer.zero_grad()
            out = call(module)
            leaves = [x for x in pytree.tree_leaves(getattr(out, "loss", out)) if isinstance(x, torch.Tensor)]
            loss = sum(x.float().square().mean() for x in leaves if x.is_floating_point())
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
            drawn.append(generators())
        losses.append(torch.tensor(curve))
        states.append(torch.stack(drawn))
    assert torch.equal(*states)
    tolerance = 2e-3 if dtype == torch.float32 else 6e-2
    torch.testing.assert_close(losses[1], losses[0], rtol=tolerance, atol=tolerance * losses[0].abs().max().item())
    assert stats(ours).hits == 50, stats(ours)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "BertLayer eager p=0.1 (3, 17)",
        "BertLayer sdpa p=0.1 (3, 17)",
        "BertForMaskedLM",
        "GPT-2",
        "ResNet",
        "RMSNorm",
        "LSTMCell",
    ],
)
def test_autocast(name, dtype):
    """Under ``torch.autocast("cuda")`` outputs and gradients are no further from eager's than its types allow."""
    make, sample = EVERYTHING[name]
    torch.manual_seed(0)
    eager = make().to(DEVICE).train()
    ours = copy.deepcopy(eager)
    call = as_call(sample())
    call = type(call)(*moved((call.args, call.kwargs)))
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    with torch.autocast("cuda", dtype=dtype):
        add_tvm_dispatch(ours, call.args, sample_kwargs=call.kwargs or None)
    results = []
    for module in (eager, ours):
        torch.manual_seed(1)
        with torch.autocast("cuda", dtype=dtype):
            out = call(module)
            leaves = [x for x in pytree.tree_leaves(getattr(out, "loss", out)) if isinstance(x, torch.Tensor)]
            loss = sum(x.float().square().mean() for x in leaves if x.is_floating_point())
        scaler.scale(loss).backward()
        results.append([loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None)])
    assert stats(ours).hits == 1, stats(ours)
    largest = max(want.abs().max().item() for want in results[0][1:])
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype
        scale = max(want.abs().max().item(), 1e-2 * largest)  # a key's bias has a gradient of zero and roundings
        torch.testing.assert_close(got, want, rtol=5e-2, atol=5e-2 * scale)


def test_a_module_in_two_places_is_refused_by_name():
    module = torch.nn.Sequential(torch.nn.Linear(4, 4).to(DEVICE), torch.nn.Linear(4, 4))
    with pytest.raises(UnsupportedModule, match="tensors on cuda:0 and cpu"):
        add_tvm_dispatch(module, torch.ones(2, 4, device=DEVICE))


def test_a_module_that_is_moved_misses_with_a_reason_and_is_compiled_there():
    module = torch.nn.Linear(4, 4)
    add_tvm_dispatch(module, torch.ones(2, 4), on_miss="compile")
    module(torch.ones(2, 4))
    module.to(DEVICE)
    x = torch.ones(2, 4, device=DEVICE)
    torch.testing.assert_close(module(x), module.forward(x))
    module(x)
    assert stats(module).hits == 3
    assert {entry.options.backend.device.type for entry in stats(module).entries} == {"cpu", "cuda"}
