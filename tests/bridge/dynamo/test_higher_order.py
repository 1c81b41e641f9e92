"""Higher-order operators in Dynamo's graphs: ``torch.cond``, ``while_loop``, ``scan``, ``map``, ``flex_attention``."""

import copy

import pytest
import torch
from torch._higher_order_ops import associative_scan, scan
from torch._higher_order_ops import map as mapped
from torch.nn.attention import flex_attention as torchs
from torch.utils.checkpoint import checkpoint

from bridge.dynamo.backend import graphs
from tests.bridge.capture import test_flex_attention as attention
from tests.bridge.capture.test_higher_order import CONDS, MAPS, ONES, ROWS, SCANS, WHILES, Calls, compare, counted
from tests.bridge.dynamo_helpers import made_since, total
from tests.sampling import sampled

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated", "ignore:return_lse is deprecated")


@pytest.fixture(autouse=True)
def made():
    """A function that returns the graphs of the test."""
    torch.compiler.reset()
    known = graphs()
    yield lambda: made_since(known)
    torch.compiler.reset()


def stepped(m, x):
    return checkpoint(lambda h: (h * m.w).sin(), x, use_reentrant=False)


def cast(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        return torch.nn.functional.linear(x.float(), m.layer.weight.float()).double()


MORE = {
    "scans in a scan": lambda m, h, xs: scan(
        lambda h, x: (scan(lambda g, y: (g * m.w + y, g * 1), h, xs)[0] + x, h * x), h, xs
    ),
    "a scan in a while_loop": lambda m, h, xs: counted(
        3, lambda h: (scan(lambda g, y: (g * m.w + y, g * 1), h, xs)[0],), h
    ),
    "a map in a map": lambda m, h, xs: mapped(lambda x: mapped(lambda y: y * m.w, x.expand(2, 3)), xs),
    "associative_scan": lambda m, h, xs: associative_scan(
        lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1] * m.v), (xs.sigmoid(), xs * m.w), 0, combine_mode="generic"
    ),
    "a checkpoint": lambda m, h, xs: torch.cond(h.sum() > 0, lambda h: stepped(m, h), lambda h: h * m.v, (h,)),
    "a checkpoint that casts": lambda m, h, xs: checkpoint(lambda h: cast(m, h), h, use_reentrant=False),
    "casts": lambda m, h, xs: torch.cond(h.sum() > 0, lambda h: cast(m, h), lambda h: h * m.v, (h,)),
}
KINDS = {
    **{f"cond: {name}": (each, (ONES,)) for name, each in CONDS.items()},
    **{f"while_loop: {name}": (each, (ONES,)) for name, each in WHILES.items()},
    **{f"scan: {name}": (each, (ONES, ROWS)) for name, each in SCANS.items()},
    **{f"map: {name}": (each, (ONES, ROWS)) for name, each in MAPS.items()},
    **{name: (each, (ONES, ROWS)) for name, each in MORE.items()},
}
ALWAYS = ["cond: an operand of either", "cond: nested", "while_loop: a constant and more", "scan: trees"]
ALWAYS += ["map: an operand of none", *MORE]


@pytest.mark.composes(
    "`torch.cond`, `while_loop`, `scan`, `map`, `associative_scan`",
    "compiled as Python control flow; an entry of the graph for each branch and number of steps, eight at most",
    section='`torch.compile(model, backend="tvm_dispatch")`',
)
@pytest.mark.parametrize("kind", sampled(KINDS, ALWAYS))
def test_steps_are_eagers(kind, made):
    function, args = KINDS[kind]
    module = Calls(function).double()
    reference = copy.deepcopy(module)
    compiled = torch.compile(module, backend="tvm_dispatch", fullgraph=True)
    for _ in range(2):
        compare(compiled, reference, args)
    (graph,) = made()
    assert graph.stats.hits == 2 and not graph.stats.misses


def branches(m, x):
    x = torch.cond(x.sum() > 0, lambda x: m.layer(x) * m.w, lambda x: x.cos() * m.v, (x,))
    return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: m.layer(x).sin(), (x,))


def any_steps(m, x):
    return counted(x.detach()[0].long(), lambda h: (torch.tanh(m.layer(h)),), x)[1]


@pytest.mark.parametrize(
    ("function", "firsts", "entries"), [(branches, (1, -1, 3, -2), 3), (any_steps, (1, 5, 2, 7), 4)]
)
def test_twenty_steps_that_take_several_branches(function, firsts, entries, made):
    module = Calls(function).double()
    reference = copy.deepcopy(module)
    compiled = torch.compile(module, backend="tvm_dispatch", fullgraph=True)
    optimizers = [torch.optim.SGD(each.parameters(), 0.05) for each in (module, reference)]
    for number in range(20):
        compare(compiled, reference, [torch.tensor([firsts[number % 4], 0.5, -0.25 * number])])
        for each in optimizers:
            each.step()
    (graph,) = made()
    assert graph.stats.hits == 20 and len(graph.stats.entries) >= entries


def test_more_branches_than_entries_run_eager(made):
    module = Calls(any_steps).double()
    compiled = torch.compile(module, backend="tvm_dispatch", fullgraph=True, options={"max_entries": 2})
    for first in (1, 2, 3, 4, 1, 2):
        compare(compiled, copy.deepcopy(module), [torch.full((3,), first)])
    (graph,) = made()
    assert graph.stats.hits == 4 and len(graph.stats.entries) == 2 and graph.stats.misses.total() == 2


# custom Functions


class Scaled(torch.autograd.Function):
    """A product whose gradients are not its own; a second result without one; a number that is kept."""

    @staticmethod
    def forward(ctx, x, w, factor):
        made, sign = x * w * factor, (x > 0).double()
        ctx.save_for_backward(x, w, made)
        ctx.factor = factor
        ctx.mark_non_differentiable(sign)
        return made, sign

    @staticmethod
    def backward(ctx, grad, _):
        x, w, made = ctx.saved_tensors
        return grad * w * 3 * ctx.factor, (grad * x * made).sum(0) if ctx.needs_input_grad[1] else None, None


def custom(m, x):
    made, sign = Scaled.apply(x.sin(), m.w, 2.0)
    return made * sign + checkpoint(lambda h: Scaled.apply(h, m.v.detach(), 0.5)[0], made, use_reentrant=False)


@pytest.mark.composes(
    "a custom `autograd.Function`",
    "compiled with its own backward; one that marks operands as dirty runs eager",
    section='`torch.compile(model, backend="tvm_dispatch")`',
)
def test_a_custom_function_has_its_own_backward(made):
    module = Calls(custom).double()
    reference = copy.deepcopy(module)
    compiled = torch.compile(module, backend="tvm_dispatch", fullgraph=True)
    for scale in (1, -2):
        compare(compiled, reference, [scale * ROWS])
    (graph,) = made()
    assert graph.stats.hits == 2 and not graph.stats.misses


# flex_attention


@pytest.fixture
def on_a_cpu(monkeypatch):
    """Dynamo refuses ``flex_attention`` in training on a CPU before it makes a graph."""
    monkeypatch.setattr(torchs, "_validate_device", lambda *_: None)


def close(module, reference, x, **masks):
    found, wanted = attention.step(module, x, **masks), attention.step(reference, x, **masks, written=attention.written)
    attention.close(found[0], wanted[0])
    for mine, each in zip(found[1], wanted[1], strict=True):
        if mine is not None:
            attention.close(mine, torch.zeros_like(mine) if each is None else each)


@pytest.mark.composes(
    "`flex_attention` in a graph of Dynamo's",
    "attention written out, with its `score_mod`, `mask_mod` and `BlockMask`; on a CPU Dynamo refuses to train it",
    section='`torch.compile(model, backend="tvm_dispatch")`',
)
@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("case", sampled(attention.MODS, ["all of it", "slopes", "rows of no key"]))
def test_training_is_attention_written_out(case, made):
    module = attention.Attention(attention.MODS[case])
    reference = copy.deepcopy(module)
    compiled = torch.compile(module, backend="tvm_dispatch", fullgraph=True)
    x = attention.inputs()
    for scale in (1, -2):
        close(compiled, reference, scale * x)
    assert total(made())[0] == 2 and not total(made())[1]


@pytest.mark.usefixtures("on_a_cpu")
def test_a_mask_that_is_an_argument(made):
    """The numbers of its tensors are inputs; sizes vary from the second on."""
    module = attention.Masked()
    reference = copy.deepcopy(module)
    compiled = torch.compile(module, backend="tvm_dispatch", fullgraph=True)
    close(compiled, reference, attention.inputs(), masks=attention.documents(attention.DOCUMENTS.flip(1)))
    for length in (4, 5, 7):
        mask = torchs.create_block_mask(attention.causal, None, None, length, length, device="cpu", BLOCK_SIZE=4)
        close(compiled, reference, torch.randn(2, length, 8, dtype=torch.float64), masks=mask)
    assert total(made())[0] == 4 and not total(made())[1]
    assert len(made()[-1].stats.entries) == 1
