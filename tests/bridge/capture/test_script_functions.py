"""TorchScript functions in forward: recorded operator by operator, without the kernels that TorchScript has fused."""

from functools import partial

import pytest
import torch

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from bridge.base.torch_recording import ScriptFunction, run_unfused
from tests.bridge.models import Applied


@torch.jit.script
def scaled(x, times: int = 3, slope: float = 2.0):
    for _ in range(times):
        x = torch.where(x > 0.5, (x.abs() + 1).log(), x * slope)
    return x


@torch.jit.script
def of_numbers(x, factor: int):
    """Tensors that no operator makes; transformers' DeBERTa scales by one."""
    root = torch.sqrt(torch.tensor(x.size(-1), dtype=torch.float) * factor)
    return x / root.to(dtype=x.dtype)


@torch.jit.script
def number_alone(x, factor: int):
    return torch.tensor(x.size(-1) * factor)


LOADED = torch.jit.CompilationUnit("def shifted(x, by: float = 1.0):\n    return (x + by).tanh() * 2\n")


def with_constants(x):
    return (x * 2.5 - 3).tanh() / 3 + x.pow(2).clamp(min=0.5)


MADE = {
    "tensors of numbers": partial(Applied, of_numbers, factor=3),
    "a number alone": lambda: Applied(lambda x: x * number_alone(x, 3)),
    "scripted": partial(Applied, scaled, slope=1.5),
    "loaded": partial(Applied, LOADED.shifted, by=0.5),
    "traced": lambda: Applied(torch.jit.trace(lambda x: (x * 2).tanh(), torch.randn(3, 4, dtype=torch.float64))),
    "with constants": lambda: Applied(torch.jit.trace(with_constants, torch.randn(3, 4, dtype=torch.float64))),
}


@pytest.fixture
def fused():
    """As on a GPU: after two calls, TorchScript runs kernels of its own, on addresses. (Here it interprets them.)"""
    internals = torch._C
    before = internals._jit_can_fuse_on_cpu(), internals._jit_get_te_must_use_llvm_cpu()
    internals._jit_override_can_fuse_on_cpu(True)
    internals._jit_set_te_must_use_llvm_cpu(False)
    yield
    internals._jit_override_can_fuse_on_cpu(before[0])
    internals._jit_set_te_must_use_llvm_cpu(before[1])


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_a_function_that_was_fused_before_is_recorded(make, fused):
    module = make().double()
    eager, x = make().double(), torch.randn(3, 4, dtype=torch.float64)
    eager.load_state_dict(module.state_dict())
    for _ in range(4):
        eager(x).sum().backward()
    eager.zero_grad()
    call = ScriptFunction.__call__
    add_tvm_dispatch(module, x)
    assert ScriptFunction.__call__ is call
    for each in (module, eager):
        each(x).sum().backward()
    assert stats(module).hits == 1
    torch.testing.assert_close(module(x), eager(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(module.linear.weight.grad, eager.linear.weight.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((2,), {}), ((2, 3.0), {}), ((), {"slope": 0.5}), ((1,), {"slope": 0.5})]
)
def test_arguments_are_those_of_the_function(args, kwargs):
    x = torch.randn(5)
    assert torch.equal(run_unfused(scaled, x, *args, fakes=True, **kwargs), scaled(x, *args, **kwargs))


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1, 2, 3.0, 4), {}), ((torch.ones(1),), {"size": 3})])
def test_wrong_ones_are_torchs_error(args, kwargs):
    with pytest.raises((RuntimeError, TypeError)):
        run_unfused(scaled, *args, fakes=True, **kwargs)


def test_tensors_in_a_graph_that_a_call_has_folded_are_refused(fused):
    x = torch.randn(3, 4)
    module = Applied(torch.jit.trace(lambda x: x * 2 + torch.arange(4.0), x))
    for _ in range(4):
        module(x)
    with pytest.raises(UnsupportedModule, match=r"on fake tensors, it is aten.arange.default[\s\S]*models\.py"):
        add_tvm_dispatch(module, x)
