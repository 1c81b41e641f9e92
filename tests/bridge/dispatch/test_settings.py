"""torch's settings for CUDA are conditions of entries on a GPU alone; they are part of programs' keys."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn

from bridge.base.errors import GuardFailure
from bridge.base.torch_cuda import SETTINGS
from bridge.capture import capture
from bridge.compile import CompileOptions, backend_for
from bridge.dispatch.guards import EntryGuard
from bridge.state import SampleCall

GPU = backend_for({"kind": "cuda", "arch": "sm_90"})


@contextmanager
def put(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def cudnn(**flags):
    """By torch's context: its test suites forbid to set the flags themselves."""
    return torch.backends.cudnn.flags(**{"enabled": True, **flags})


@contextmanager
def switched(name, value):
    """One of ``torch.backends.cuda.enable_…_sdp``."""
    before = getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
    getattr(torch.backends.cuda, f"enable_{name}_sdp")(value)
    try:
        yield
    finally:
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(before)


@contextmanager
def order_of_attention():
    backends = torch.nn.attention.SDPBackend
    every = [backends.MATH, backends.CUDNN_ATTENTION, backends.EFFICIENT_ATTENTION, backends.FLASH_ATTENTION]
    with torch.nn.attention.sdpa_kernel(every, set_priority=True):
        yield


MATMUL, CUDNN = torch.backends.cuda.matmul, torch.backends.cudnn
CHANGES = {
    "float32 precision of CUDA products": lambda: put(MATMUL, "allow_tf32", True),
    "float32 precision of cuDNN's convolutions": lambda: put(CUDNN.conv, "fp32_precision", "ieee"),
    "float32 precision of cuDNN's recurrent layers": lambda: put(CUDNN.rnn, "fp32_precision", "ieee"),
    "reduced precision of float16 sums": lambda: put(MATMUL, "allow_fp16_reduced_precision_reduction", False),
    "reduced precision of bfloat16 sums": lambda: put(MATMUL, "allow_bf16_reduced_precision_reduction", False),
    "float16 accumulation": lambda: put(MATMUL, "allow_fp16_accumulation", True),
    "cuDNN": lambda: cudnn(enabled=False),
    "cuDNN's benchmark": lambda: cudnn(benchmark=True),
    "cuDNN's deterministic algorithms": lambda: cudnn(deterministic=True),
    "flash attention": lambda: switched("flash", False),
    "efficient attention": lambda: switched("mem_efficient", False),
    "cuDNN's attention": lambda: switched("cudnn", False),
    "attention by formula": lambda: switched("math", False),
    "order of attention kernels": order_of_attention,
}


@pytest.fixture(scope="module")
def guards():
    """Guards of a module, as on the host and as on a GPU."""
    module, x = nn.Linear(3, 3), torch.ones(2, 3)
    captured = capture(SampleCall(module, (x,), {}))
    placed = [replace(captured, device=torch.device(device)) for device in ("cpu", "cuda:0")]
    return module, x, *(EntryGuard(module, each, [x]) for each in placed)


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_is_a_condition_on_a_gpu_and_in_the_key(name, guards):
    module, x, on_host, on_gpu = guards
    keys = {CompileOptions.current(backend).key for backend in (GPU, backend_for(None))}
    assert on_gpu.match(SampleCall(module, (x,), {}))
    with CHANGES[name]():
        assert on_gpu.check(module, (x,), {}) is None
        with pytest.raises(GuardFailure, match=name):
            on_gpu.match(SampleCall(module, (x,), {}))
        assert on_host.match(SampleCall(module, (x,), {}))
        keys |= {CompileOptions.current(backend).key for backend in (GPU, backend_for(None))}
    assert len(keys) == 3
    assert on_gpu.match(SampleCall(module, (x,), {}))


def test_every_setting_is_changed_here():
    assert set(SETTINGS) - set(CHANGES) == {"reduced precision of attention by formula"}  # a private setter


def test_values_that_mean_the_same_are_one(guards):
    """The state after ``allow_tf32 = False`` equals the initial one."""
    module, x, _, on_gpu = guards
    with put(MATMUL, "allow_tf32", True), put(MATMUL, "allow_tf32", False):
        assert SETTINGS["float32 precision of CUDA products"]() == "ieee"
        assert on_gpu.match(SampleCall(module, (x,), {}))
