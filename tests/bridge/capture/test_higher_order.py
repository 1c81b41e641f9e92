"""Higher-order operators (``torch.cond``, ``while_loop``, ``scan``, ``map``), beside eager, where Dynamo runs them."""

import copy

import pytest
import torch
from torch import nn
from torch._higher_order_ops import map as mapped
from torch._higher_order_ops import scan, while_loop

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from tests.device import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated")
ONES, ROWS = torch.ones(3), torch.arange(12.0).reshape(4, 3).sin()


class Calls(nn.Module):
    """Calls a function of itself and the arguments, which may read two weights, a layer, a buffer and a number."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.factor = function, 2.0
        self.w, self.v, self.layer = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3)), nn.Linear(3, 3)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, *args):
        return self.function(self, *args)


def leaves_of(tree):
    return [each for each in torch.utils._pytree.tree_leaves(tree) if isinstance(each, torch.Tensor)]


def step(module, args):
    """A call's results, and the gradients of parameters and arguments."""
    args = [each.detach().double().requires_grad_() for each in args]
    module.zero_grad()
    made = leaves_of(module(*args))
    followed = [each for each in made if each.requires_grad]
    if followed:
        sum((each * torch.arange(each.numel()).reshape(each.shape).cos()).sum() for each in followed).backward()
    return made, [each.grad for each in [*module.parameters(), *args]]


def compare(module, reference, args):
    """One call of a dispatched module beside eager's."""
    (made, grads), (wanted, wanted_grads) = step(module, args), step(reference, args)
    assert [each.requires_grad for each in made] == [each.requires_grad for each in wanted]
    assert [each.stride() for each in made] == [each.stride() for each in wanted]
    assert [each is None for each in grads] == [each is None for each in wanted_grads]
    options = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close([*made, *leaves_of(grads)], [*wanted, *leaves_of(wanted_grads)], **options)


def dispatched(function, *args, **options):
    """A module that calls a function, dispatched, and its eager twin."""
    module = Calls(function).double()
    reference = copy.deepcopy(module)
    args = tuple(each.detach().double().requires_grad_() for each in args)
    return add_tvm_dispatch(module, args, **options), reference


def check(function, *args):
    module, reference = dispatched(function, *args)
    for _ in range(2):
        compare(module, reference, args)
    assert stats(module).hits == 2 and not stats(module).misses


def positive(x):
    return x.sum() > -100


def without_grad(function, *args):
    with torch.no_grad():
        return function(*args)


def add(m, x):
    return torch.cond(positive(x), lambda x: x + m.shift, lambda x: x - m.shift, (x,))


CONDS = {
    "weights of either": lambda m, x: torch.cond(positive(x), lambda x: x * m.w, lambda x: x * m.v, (x,)),
    "the other way": lambda m, x: torch.cond(x.sum() > 100, lambda x: x * m.w, lambda x: x * m.v, (x,)),
    "an operand of either": lambda m, x: torch.cond(
        positive(x), lambda a, b: a.sin(), lambda a, b: b.cos(), (x, x * m.w)
    ),
    "an operand of none": lambda m, x: torch.cond(positive(x), lambda a, b: a * 2, lambda a, b: a * 3, (x, m.w)),
    "a constant": lambda m, x: torch.cond(positive(x), lambda x: torch.zeros(3).double(), lambda x: x * m.v, (x,)),
    "detached": lambda m, x: torch.cond(positive(x), lambda x: (x * m.w).detach(), lambda x: x * m.v, (x,)),
    "a layer": lambda m, x: torch.cond(positive(x), m.layer, lambda x: x * m.v, (x,)),
    "a buffer": add,
    "an attribute": lambda m, x: torch.cond(positive(x), lambda x: x * m.factor, lambda x: x * 1, (x,)),
    "a closure": lambda m, x: (lambda h: torch.cond(positive(x), lambda x: x * 2, lambda x: x * h, (x,)))(m.w.sin()),
    "an integer": lambda m, x: torch.cond(positive(x).long().reshape(1, 1), m.layer, lambda x: x * m.v, (x,)),
    "a float": lambda m, x: torch.cond(x.detach().sum() * 0 + 0.5, m.layer, lambda x: x * m.v, (x,)),
    "Python's bool": lambda m, x: torch.cond(x.shape[0] > 1, lambda x: x * m.w, lambda x: x * m.v, (x,)),
    "a parameter": lambda m, x: torch.cond(m.w.sum() > -100, lambda x: x * m.w, lambda x: x * m.v, (x,)),
    "dictionaries": lambda m, x: torch.cond(
        positive(x),
        lambda d: {"a": d["k"] * 2, "b": (d["k"] + 1,)},
        lambda d: {"a": d["k"] * m.w, "b": (d["k"] * 3,)},
        ({"k": x},),
    ),
    "nested": lambda m, x: torch.cond(
        positive(x),
        lambda x: torch.cond(x.sum() < -100, lambda x: x * m.w, lambda x: x * m.v, (x,)),
        lambda x: x * 2,
        (x,),
    ),
    "two": lambda m, x: torch.cond(x.sum() > 100, lambda x: x * m.w, lambda x: x * 2, (add(m, x),)),
    "no_grad inside": lambda m, x: torch.cond(
        positive(x), lambda x: without_grad(m.layer, x) + x, lambda x: x * m.v, (x,)
    ),
    "no_grad outside": lambda m, x: x + without_grad(add, m, x * m.w),
    "axes": lambda m, x: torch.cond(positive(x), lambda x: x * 2, lambda x: x * 3, (x.expand(4, 3).t(),)),
    "a while_loop": lambda m, x: torch.cond(
        positive(x),
        lambda x: x * while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, h * m.w), (torch.tensor(0), x * 1))[1],
        lambda x: x * 2,
        (x,),
    ),
}


@pytest.mark.composes(
    "`torch.cond`",
    "as a Python `if`; gradients are eager's: zeros for inputs of the other branch",
    section="Autograd, memory, threads",
)
@pytest.mark.parametrize("case", CONDS)
def test_cond(case):
    check(CONDS[case], ONES)


def test_cond_under_autocast():
    module = Calls(lambda m, x: torch.cond(positive(x), m.layer, lambda x: (x * m.v).bfloat16(), (x * m.w,)))
    reference = copy.deepcopy(module)
    found = []
    with torch.autocast(DEVICE.type, torch.bfloat16):
        add_tvm_dispatch(module, torch.ones(2, 3))
    for each in (module, reference):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            made = each(torch.ones(2, 3))
        made.sum().backward()
        found.append([made, *(p.grad for p in each.parameters())])
    assert stats(module).hits == 1
    torch.testing.assert_close(*found, rtol=2e-2, atol=1e-2)


def counted(step, body, *carried):
    """``while_loop`` for some steps."""
    return while_loop(lambda i, *_: i < step, lambda i, *rest: (i + 1, *body(*rest)), (torch.tensor(0), *carried))


WHILES = {
    "a weight": lambda m, x: counted(3, lambda h: (h * m.w,), x),
    "numbers decide": lambda m, x: while_loop(lambda h: h.sum() < 30, lambda h: (h + m.w.abs(),), (x,)),
    "where": lambda m, x: counted(3, lambda h: (torch.where(h > 0, h + m.shift, h * m.w),), x),
    "a constant carried": lambda m, x: counted(2, lambda h: (h * m.w,), ONES.double()),
    "a constant and more": lambda m, x: counted(3, lambda h, c: (h * c, c * m.w), x, ONES.double()),
    "axes": lambda m, x: counted(2, lambda h: (h * 2,), (x * ROWS).t()),
    "a loop whose steps stop gradients": lambda m, x: (
        counted(7, lambda h: (torch.tanh(m.layer(h)),), ROWS.double())[1] * x
    ),
    "no step": lambda m, x: x * m.w + without_grad(counted, 0, lambda h: (h * m.w,), x)[1],
    "axes without grad": lambda m, x: without_grad(counted, 2, lambda h: (h * m.w[:, None],), (x * ROWS).t()),
}


@pytest.mark.composes(
    "`while_loop` of `torch._higher_order_ops`", "as a Python `while`", section="Autograd, memory, threads"
)
@pytest.mark.parametrize("case", WHILES)
def test_while_loop(case):
    check(WHILES[case], ONES)


def recurrent(m, h, x):
    h = torch.tanh(m.layer(x) + h)
    return h, h * 1


SCANS = {
    "weights": lambda m, h, xs: scan(lambda h, x: (h * x * m.w, h + x), h, xs),
    "an operand of none": lambda m, h, xs: scan(lambda h, x: (h + 1, h * m.v), h, xs),
    "recurrent": lambda m, h, xs: scan(lambda h, x: recurrent(m, h, x), h, xs),
    "from zeros": lambda m, h, xs: scan(lambda h, x: recurrent(m, h, x), torch.zeros(3).double(), xs),
    "backwards over columns": lambda m, h, xs: scan(lambda h, x: (h + x, h * x), xs[:, 0] * 1, xs, dim=1, reverse=True),
    "trees": lambda m, h, xs: scan(
        lambda c, x: ({"h": c["h"] + x[0], "n": c["n"] + 1}, (c["h"] * x[1], c["n"] * 1)),
        {"h": h, "n": torch.zeros(()).double()},
        (xs, xs * m.w),
    ),
    "cond": lambda m, h, xs: scan(
        lambda h, x: (h + x, torch.cond(x.sum() > 0, lambda x: x * m.w, lambda x: x * m.v, (x,))), h, xs
    ),
    "detached": lambda m, h, xs: scan(lambda h, x: (h + 1, (x * 2).detach()), h, xs),
    "without grad": lambda m, h, xs: without_grad(scan, lambda h, x: recurrent(m, h, x), h, xs),
}


@pytest.mark.composes(
    "`scan`, `map` of `torch._higher_order_ops`",
    "as Python loops, whose equal steps are compiled as one",
    section="Autograd, memory, threads",
)
@pytest.mark.parametrize("case", SCANS)
def test_scan(case):
    if case == "from zeros" and torch.__version__ < "2.13":
        pytest.skip("eager's gradient through a carry that begins as a constant is wrong: not the one of a loop")
    check(SCANS[case], ONES, ROWS)


MAPS = {
    "a weight": lambda m, h, xs: mapped(lambda x, h: x * h * m.w, xs, h),
    "an operand of none": lambda m, h, xs: mapped(lambda x, h: (x * 2, {"k": x + 1}), xs, h),
    "a constant": lambda m, h, xs: mapped(lambda x, h: torch.ones(3).double(), xs, h),
    "a layer": lambda m, h, xs: mapped(m.layer, xs),
    "axes": lambda m, h, xs: mapped(lambda x: x * 2, xs.reshape(2, 2, 3, 1).permute(0, 2, 3, 1)),
    "a scan": lambda m, h, xs: mapped(lambda x: scan(lambda h, y: (h + y * m.w, h * y), h, x)[1], xs.expand(2, 4, 3)),
}


@pytest.mark.composes("`scan`, `map` of `torch._higher_order_ops`")
@pytest.mark.parametrize("case", MAPS)
def test_map(case):
    check(MAPS[case], ONES, ROWS)


WRITTEN_OUT = {
    "cond": (lambda m, x: torch.cond(x.isnan().any(), lambda t: t * 2, torch.sin, (x,)), lambda x: x.sin()),
    "while_loop": (
        lambda m, x: while_loop(lambda i, t: i < 3, lambda i, t: (i + 1, t.sin()), (torch.tensor(0, device=DEVICE), x))[
            1
        ],
        lambda x: x.sin().sin().sin(),
    ),
    "scan": (
        lambda m, x: scan(lambda h, t: (h + t.sin(), h * t), torch.zeros_like(x[0]), x)[1],
        lambda x: (x.sin().cumsum(0) - x.sin()) * x,
    ),
    "map": (lambda m, x: mapped(lambda t, u: t.sin() * u.mean(), x, x * 2), lambda x: x.sin() * (x * 2).mean()),
}
"""Calls of torch's operators, and the same values without them."""


@pytest.mark.parametrize("case", WRITTEN_OUT)
def test_second_derivatives_are_of_the_control_flow_written_out(case):
    """Eager's lack terms of ``scan`` and ``while_loop``, and ``cond`` has none (2.13)."""
    function, wanted = WRITTEN_OUT[case]
    x = ROWS.double().requires_grad_()
    module, _ = dispatched(function, x)
    found = []
    for call in (module, wanted):
        (first,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        found.append((first.detach(), *torch.autograd.grad(first.square().sum(), x)))
    assert stats(module).hits
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


REFUSED = {
    "an alias": lambda m, x: torch.cond(positive(x), lambda x: x, lambda x: x * m.v, (x,)),
    "two forms": lambda m, x: torch.cond(positive(x), lambda x: x.sum(), lambda x: x * m.v, (x,)),
    "a write": lambda m, x: torch.cond(positive(x), lambda x: x.add_(1), lambda x: x * m.v, (x * 1,)),
    "a side effect": lambda m, x: torch.cond(positive(x), lambda x: m.seen.append(x) or x * 1, lambda x: x * 2, (x,)),
    "an aliased step": lambda m, x: scan(lambda h, y: (h + y, y), x, x.expand(4, 3)),
    "another carry": lambda m, x: while_loop(lambda h: h.sum() < 30, lambda h: (h.sum(),), (x,)),
}


@pytest.mark.skipif(torch.__version__ < "2.13", reason="the first line of Dynamo's message is its reason")
def test_a_refusal_says_why_dynamo_refuses():
    """Dynamo's reason is in the second line of its message."""
    with pytest.raises(UnsupportedModule, match=r"is refused by Dynamo[^\n]*error: \w"):
        dispatched(REFUSED["a side effect"], ONES)


@pytest.mark.parametrize("case", REFUSED)
def test_what_eager_does_not_run_is_refused_by_name(case):
    with pytest.raises(UnsupportedModule, match=r"(cond|scan|while_loop): is refused by Dynamo[\s\S]*order\.py:\d+: "):
        dispatched(REFUSED[case], ONES)


def test_draws_are_refused_where_eager_draws_anew_in_the_backward():
    def drops(m, x):
        return torch.cond(positive(x), nn.functional.dropout, lambda x: x * m.w, (x,))

    with pytest.raises(UnsupportedModule, match="cond: draws random numbers"):
        dispatched(drops, ONES)
    module, reference = dispatched(lambda m, x: without_grad(drops, m, x) * m.w, ONES)
    found = []
    for each in (module, reference):
        torch.manual_seed(1)
        found.append(each(ONES.double()))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("nested", [False, True])
def test_a_while_loop_without_a_step_is_refused_where_eager_differentiates_one(nested):
    def loop(m, x):
        return counted(0, lambda h: (h * m.w,), x * 1)[1]

    forward = (lambda m, x: torch.cond(positive(x), lambda x: loop(m, x), lambda x: x * 1, (x,))) if nested else loop
    with pytest.raises(UnsupportedModule, match="its body does not run"):
        dispatched(forward, ONES)


@pytest.mark.parametrize("on_miss", ["eager", "compile"])
def test_a_call_that_goes_the_other_way(on_miss):
    module, reference = dispatched(
        lambda m, x: torch.cond(x.sum() > 0, lambda x: x * m.w, lambda x: m.layer(x), (x,)), ONES, on_miss=on_miss
    )
    for x in (ONES, -ONES, ONES, -ONES):
        compare(module, reference, [x])
    assert stats(module).hits == (2 if on_miss == "eager" else 4)
    assert len(stats(module).entries) == (1 if on_miss == "eager" else 2)


SCALE = 2.0


def of_a_global(x):
    return x * SCALE


CHANGES = {
    "an attribute": (CONDS["an attribute"], lambda module: setattr(module, "factor", 3.0)),
    "a global": (
        lambda m, x: torch.cond(positive(x), of_a_global, torch.cos, (x,)),
        lambda module: globals().update(SCALE=SCALE + 1),
    ),
    "in a step": (
        lambda m, x: scan(lambda h, y: (h * m.factor, h + y), x, x.expand(4, 3)),
        lambda module: setattr(module, "factor", 3.0),
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_a_branch_reads_is_a_condition(case):
    if torch.__version__ >= "2.15":
        pytest.skip("eager raises at the second call: a number that Dynamo has made a symbol is an operand of cond")
    function, change = CHANGES[case]
    module, reference = dispatched(function, ONES)
    compare(module, reference, [ONES])
    change(module)
    change(reference)
    compare(module, reference, [ONES])
    assert stats(module).hits == 1 and stats(module).misses.total() == 1


def test_a_loop_of_many_steps_is_one_loop():
    function = SCANS["recurrent"]
    long = torch.randn(60, 3)
    module, reference = dispatched(function, ONES, long)
    compare(module, reference, [ONES, long])
    assert stats(module).hits == 1
