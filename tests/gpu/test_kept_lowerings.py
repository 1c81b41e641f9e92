"""Lowerings on disk, on a GPU: a lowering that is read has the bits and draws of a fresh one."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

import bridge
from bridge.base.session import SESSION
from bridge.capture import RecordedCall
from bridge.compile import pipeline
from bridge.compile.cuda import build
from tests.bridge.compare import as_call
from tests.device import DEVICE, generators, moved
from tests.gpu.cases import CASES, LAYERS
from tests.gpu.marks import ON_A_GPU
from tests.gpu.precision import float32_products

pytestmark = ON_A_GPU

EVERYTHING = {**LAYERS, **CASES}
KEPT = (
    "BertLayer eager p=0.1 (3, 17)",
    "BertLayer sdpa p=0.1 (3, 17)",
    "MLP",
    "BertForMaskedLM",
    "BertForMaskedLM sdpa",
    "TransformerEncoder",
    "LLaMA",
    "ResNet",
    "nn.LSTM",
    "rand, randn, bernoulli, dropout",
)


@pytest.fixture(autouse=True)
def used_cache(tmp_path, monkeypatch):
    SESSION.reset("complaints")
    monkeypatch.setenv("BRIDGE_CACHE", "1")
    monkeypatch.setenv("BRIDGE_CACHE_DIR", str(tmp_path / "used"))
    yield
    SESSION.reset("complaints")


def two_steps(case, precision):
    """Bits of two steps and the generators after each, of a module that is added as a new process adds it."""
    SESSION.reset("lowerings", "programs")
    torch.manual_seed(0)
    module, call = case[0]().to(DEVICE).train(), as_call(case[1]())
    args, kwargs = moved((call.args, call.kwargs))
    found = []
    cudnn = torch.backends.cudnn.flags(enabled=True, deterministic=True)
    with cudnn, torch.autocast(DEVICE.type, torch.bfloat16, enabled=precision == "autocast"):
        bridge.add_tvm_dispatch(module, *args, sample_kwargs=kwargs)
        for step in range(2):
            torch.manual_seed(step)
            result = module(*args, **kwargs)
            tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            sum(leaf.float().square().mean() for leaf in tensors if leaf.requires_grad).backward()
            found += [*(leaf.detach().clone() for leaf in tensors), generators()]
    assert bridge.stats(module).hits == 2 and not bridge.stats(module).misses
    return found + [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def counted(monkeypatch):
    """Captures, translations and builds from now on."""
    done = []
    for owner, attribute, what in (
        (RecordedCall, "captured", "capture"),
        (pipeline, "_Graphs", "graphs"),
        (build, "build_library", "library"),
    ):
        make = getattr(owner, attribute)
        monkeypatch.setattr(
            owner, attribute, lambda *args, make=make, what=what, **rest: done.append(what) or make(*args, **rest)
        )
    return done


@pytest.mark.parametrize(
    ("name", "precision"),
    [(name, how) for name in KEPT for how in ("float32", "autocast") if (name, how) != ("nn.LSTM", "autocast")],
)
def test_a_lowering_that_is_read_computes_the_same_bits(name, precision, monkeypatch):
    work = counted(monkeypatch)
    fresh = two_steps(EVERYTHING[name], precision)
    first = list(work)
    kept = two_steps(EVERYTHING[name], precision)
    assert first.count("capture") == 1 and set(first) == {"capture", "graphs", "library"}
    assert work == first, "something is made anew"
    assert len(fresh) == len(kept) and all(map(torch.equal, fresh, kept))


def test_a_setting_is_part_of_the_key(monkeypatch):
    captured = []
    capture = RecordedCall.captured
    monkeypatch.setattr(RecordedCall, "captured", lambda call: captured.append(1) or capture(call))
    two_steps(CASES["MLP"], "float32")
    with float32_products("highest" if torch.get_float32_matmul_precision() == "high" else "high"):
        two_steps(CASES["MLP"], "float32")
    assert len(captured) == 2
