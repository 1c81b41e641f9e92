"""The fuzzer's modes see the operators inside of torch's control-flow operators, which run as in eager."""

import pytest
import torch

from tests.fuzz.noise import Noise
from tests.fuzz.parts import PartByPart
from tests.fuzz.races import Races
from tests.fuzz.reordered import Reordered
from tests.fuzz.unreached import Unreached
from tests.fuzz.unused import Unraised
from tests.fuzz.written_out import written_out
from tests.host_kernels import HostKernels

OPERATORS = torch._higher_order_ops
MODES = {
    **{"noise": lambda: Noise(0), "noise of values": lambda: Noise(0, of_values=True), "parts": PartByPart},
    **{"races": lambda: Races(0), "reordered": lambda: Reordered(0), "unreached": Unreached},
    **{"unraised": lambda: Unraised(2), "host": HostKernels, "written out": written_out},
}
CALLS = {
    "cond": lambda x: torch.cond(x.isnan().any(), lambda t: t * 2, lambda t: t.sin() * t.sum(), (x,)),
    "map": lambda x: OPERATORS.map(lambda t, u: t.sin() * u.mean(), x, x * 2),
    "scan": lambda x: OPERATORS.scan(lambda h, t: (h + t.sum(), h * t), torch.zeros_like(x[0]), x)[1],
    "associative_scan": lambda x: OPERATORS.associative_scan(lambda s, t: s * t.cos(), x, 0, combine_mode="generic"),
    "while_loop": lambda x: OPERATORS.while_loop(
        lambda i, t: i < 3, lambda i, t: (i + 1, t.sin() + t.mean()), (torch.tensor(0), x)
    )[1],
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mode", MODES)
def test_control_flow_under_a_mode(mode, call):
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def run():
        made = CALLS[call](x)
        return made.detach(), torch.autograd.grad(made.sum(), x)[0]

    wanted = run()
    with MODES[mode]():
        found = run()
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
    assert (mode.startswith("noise")) == (not torch.equal(found[0], wanted[0])) or mode == "reordered"
