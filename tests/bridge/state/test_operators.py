"""Operators and kernels that a module holds: guards do not look at their internal state."""

import pytest
import torch

from bridge import add_tvm_dispatch, stats
from bridge.base.torch_fakes import fake_mode
from bridge.guards import Reads
from tests.bridge.models import Applied


@torch.library.custom_op("bridge_tests::tripled", mutates_args=())
def tripled(x: torch.Tensor) -> torch.Tensor:
    return 3 * x


tripled.register_fake(torch.empty_like)
tripled.register_autograd(lambda ctx, grad: 3 * grad)


HELD = {
    "definition": lambda: tripled,
    "packet": lambda: torch.ops.bridge_tests.tripled,
    "overload": lambda: torch.ops.bridge_tests.tripled.default,
}


def used_elsewhere():
    """Clears the operator's dispatch cache, as torch does when kernels are registered."""
    torch.ops.bridge_tests.tripled.default._dispatch_cache.clear()


@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
def test_an_operator_that_a_module_holds(held):
    module, x = Applied(held()), torch.randn(2, 4)
    module(x)
    with fake_mode(allow_non_fake_inputs=True) as mode:
        held()(mode.from_tensor(x))
    reads = Reads({}, module.named_modules())
    with reads.recorded():
        module(x)
    used_elsewhere()
    assert reads.changes() == []
    add_tvm_dispatch(module, x)
    for _ in range(2):
        module(x)
        used_elsewhere()
    assert stats(module).hits == 2
