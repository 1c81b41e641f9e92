"""Executor on a GPU: streams, captures, alignment, memory that ran out; here with the host in the GPU's place."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from tvm.relax import op as R

from autodiff.library import GENERATOR_STATE
from bridge.base.torch_internals import empty_strided
from bridge.compile import DrawnMask, compile_function
from bridge.compile.cuda import executor as module
from bridge.compile.cuda.copies import bring
from bridge.compile.cuda.executor import CudaExecutor, StreamPools
from bridge.compile.runtime import layout as pools
from bridge.compile.runtime.layout import PoolBlock
from tests import philox
from tests.bridge.compile.test_piecewise import SHAPE, dropping
from tests.bridge.compile_helpers import function, program

HOST = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch):
    """Torch's answers about the GPU, to be set."""
    says = SimpleNamespace(device=None, stream=7, capturing=False, entered=[])

    def entered(index):
        says.entered.append(index)
        says.device = index
        return torch.no_grad()

    monkeypatch.setattr(module, "current_device", lambda: says.device)
    monkeypatch.setattr(module, "current_stream", lambda index: says.stream)
    monkeypatch.setattr(module, "empty_strided", empty_strided)
    monkeypatch.setattr(module, "POOLS", StreamPools())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: says.capturing)
    monkeypatch.setattr(torch.cuda, "device", entered)
    return says


@pytest.fixture
def execute(gpu):
    def body(emit, x, w):
        y = emit(R.nn.softmax(emit(R.matmul(emit(R.matmul(x, w)), w))))
        return [emit(R.matmul(y, w)), emit(R.sum(y, axis=0)), x]

    return CudaExecutor(program([((24, 32), "float32"), ((32, 32), "float32")], body), HOST)


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(24, 32, generator=generator), torch.randn(32, 32, generator=generator)]


def expected(x, w):
    y = torch.softmax(x @ w @ w, -1)
    return [y @ w, y.sum(0), x]


def check(results, tensors):
    for ours, theirs in zip(results, expected(*tensors), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_each_stream_has_blocks_of_its_own(gpu, execute, tensors):
    check(execute(tensors), tensors)
    (first,) = module.POOLS._pools
    gpu.stream = 8
    check(execute(tensors), tensors)
    one, other = (pool for pool in module.POOLS._pools.values())
    assert one.free_bytes == other.free_bytes > 0 and first == (HOST, 7)
    assert not {id(block) for block in one._free} & {id(block) for block in other._free}
    held = module.POOLS.held_bytes
    gpu.stream = 7
    check(execute(tensors), tensors)
    assert module.POOLS.held_bytes == held
    module.POOLS.clear()
    assert module.POOLS.held_bytes == 0


def test_streams_that_are_not_used_any_more_hold_nothing(gpu, execute, tensors):
    for stream in range(30):
        gpu.stream = stream
        execute(tensors)
    gc.collect()
    assert sum(pool.held_bytes > 0 for pool in module.POOLS._pools.values()) <= 8


def test_a_captured_call_keeps_no_memory_and_takes_none_from_a_pool(gpu, execute, tensors):
    gpu.capturing = True
    check(execute(tensors), tensors)
    assert not module.POOLS._pools


def test_the_programs_device_is_current_while_it_runs_and_only_entered_if_it_is_not(gpu, execute, tensors):
    execute(tensors)
    assert gpu.entered == []
    gpu.device = 1
    check(execute(tensors), tensors)
    assert gpu.entered == [None]


def test_an_input_off_16_bytes_is_copied_and_handed_on_as_it_is(gpu, execute, tensors):
    x, w = tensors
    apart = torch.empty(24 * 32 + 1)[1:].view(24, 32).copy_(x)
    assert apart.data_ptr() % 16
    results = execute([apart, w])
    check(results, tensors)
    assert results[2] is apart
    (block,) = module.POOLS.of(HOST, 7)._free
    ((registers, _),) = block.bound.values()
    assert not any(isinstance(each, torch.Tensor) and each.data_ptr() == apart.data_ptr() for each in registers)


@pytest.mark.parametrize("fails", ["block", "result"])
def test_memory_that_ran_out_leaks_nothing_and_the_next_call_is_fine(gpu, execute, tensors, monkeypatch, fails):
    def out_of_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("tried to allocate")

    with monkeypatch.context() as patch:
        if fails == "block":
            patch.setattr(pools, "PoolBlock", out_of_memory)
        else:
            patch.setattr(execute, "_empty", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            execute(tensors)
        assert module.POOLS.held_bytes == sum(pool.free_bytes for pool in module.POOLS._pools.values())
    check(execute(tensors), tensors)


@pytest.mark.parametrize("state", [(7, 0), (2**64 - 1, 2**40 + 8)])
def test_states_of_generators_are_brought_to_kernels_and_to_nobody_else(gpu, monkeypatch, state):
    """Generator states are on the host: kernels read a copy, library calls and results use the call's tensor."""

    def body(emit, x, mask, other):
        y = emit(R.where(mask, x, emit(R.negative(x))))
        attended, _ = dropping(emit, y, y, y, other)
        return [y, attended, other]

    brought = []
    made = function([(SHAPE, "float32"), (SHAPE, "bool"), GENERATOR_STATE], body)
    compiled = compile_function(made, name="masked", drawn={1: DrawnMask(0.1, 4, 256)})
    monkeypatch.setattr(module, "bring", lambda pairs: brought.extend(pairs) or bring(pairs))
    x, mask, other = torch.randn(SHAPE), *(torch.tensor(each, dtype=torch.uint64) for each in (state, (5, 8)))
    results = CudaExecutor(compiled, HOST)([x, mask, other])
    kept = torch.from_numpy(philox.mask(x.numel(), 0.1, 4, 256, *state)).view(SHAPE)
    assert torch.equal(results[0], x.where(kept, -x)) and results[2] is other
    ((target, source),) = brought
    assert source is mask and target is not mask and torch.equal(target, mask)


def test_blocks_are_on_the_pools_device():
    assert PoolBlock(10, torch.device("meta")).memory.device.type == "meta"
