"""Indexing operators on indices in and out of bounds, of every integer type: eager's results, or eager's errors.

Negative indices count from the end where eager's do; where eager raises, the call raises the same error.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from tests.bridge.compare import Function
from tests.device import ASSERTS
from tests.sampling import sampled

pytestmark = ASSERTS

TALL, WIDE, SQUARE, VECTOR, SCALAR = (5, 3), (3, 5), (5, 5), (5,), ()


def rows(i):
    """An index for each of three columns."""
    return i[:, None].repeat(1, 3)


def assigned(x, place, value):
    x[place] = value
    return x


def plus(x, place, value):
    x[place] += value
    return x


def _scatter_reduce(mode, include_self):
    return lambda x, i: x.scatter_reduce(0, rows(i), 2 * x[:3], reduce=mode, include_self=include_self)


MODES = ("sum", "prod", "mean", "amax", "amin")

#: name -> function of a tensor and a 1-D index, shape of the tensor, a valid index, first index out of bounds
CASES = {
    "index_select": (lambda x, i: x.index_select(0, i), TALL, (0, 3, 2), 5),
    "index_select, columns": (lambda x, i: x.index_select(1, i), WIDE, (0, 3, 2), 5),
    "index_select of a number": (lambda x, i: x.index_select(0, i), SCALAR, (0,), 1),
    "index_add": (lambda x, i: x.index_add(0, i, 2 * x[:3]), TALL, (0, 3, 2), 5),
    "index_add, columns": (lambda x, i: x.index_add(1, i, 2 * x[:, :3], alpha=3), WIDE, (0, 3, 2), 5),
    "index_add to a number": (lambda x, i: x.index_add(0, i, 2 * x), SCALAR, (0,), 1),
    "index_add_": (lambda x, i: (x * 1).index_add_(0, i, 2 * x[:3]), TALL, (0, 3, 2), 5),
    "index_copy": (lambda x, i: x.index_copy(0, i, 2 * x[:3]), TALL, (0, 3, 2), 5),
    "index_copy of a number": (lambda x, i: x.index_copy(0, i, x.sum()), VECTOR, (2,), 5),
    "index_fill": (lambda x, i: x.index_fill(0, i, 2.5), TALL, (0, 3, 2), 5),
    "index_fill_": (lambda x, i: (x * 1).index_fill_(1, i, 2), WIDE, (0, 3, 2), 5),
    "index_fill of a number": (lambda x, i: x.index_fill(0, i, 2.5), SCALAR, (0,), 1),
    "index_fill with a tensor": (lambda x, i: x.index_fill(0, i, x.sum().detach()), TALL, (0, 3, 2), 5),
    "index_put": (lambda x, i: x.index_put((i,), 2 * x[:3]), TALL, (0, 3, 2), 5),
    "index_put, two": (lambda x, i: x.index_put((i, i % 3), 2 * x[0], accumulate=True), TALL, (0, 3, 2), 5),
    "index_reduce": (lambda x, i: x.index_reduce(0, i, 2 * x[:3], "mean"), TALL, (0, 3, 2), 5),
    "x[i]": (lambda x, i: x[i], TALL, (0, 3, 2), 5),
    "x[i, j]": (lambda x, i: x[i, i % 3], TALL, (0, 3, 2), 5),
    "x[:, i]": (lambda x, i: x[:, i], WIDE, (0, 3, 2), 5),
    "x[i] = v": (lambda x, i: assigned(x * 1, i, 2 * x[:3]), TALL, (0, 3, 2), 5),
    "x[:, i] = v": (lambda x, i: assigned(x * 1, (slice(None), i), 2 * x[:, :3]), WIDE, (0, 3, 2), 5),
    "x[t]": (lambda x, i: x[i[-1]] * 2, TALL, (0, 3, 2), 5),
    "x[t], a result": (lambda x, i: (x * 1)[i[-1]], TALL, (0, 3, 2), 5),
    "x[..., t, None]": (lambda x, i: x[..., i[-1], None] * 2, WIDE, (0, 3, 2), 5),
    "x[t, t]": (lambda x, i: x[i[-1], i[-1]] * 2, SQUARE, (0, 3, 2), 5),
    "x[i, t]": (lambda x, i: x[[1, 0, 1], i[-1]] * 2, WIDE, (0, 3, 2), 5),
    "x[t] = v": (lambda x, i: assigned(x * 1, i[-1], 2 * x[0]), TALL, (0, 3, 2), 5),
    "x[t] = 2": (lambda x, i: assigned(x * 1, i[-1], 2), TALL, (0, 3, 2), 5),
    "x[t, 1:] = v": (lambda x, i: assigned(x * 1, (i[-1], slice(1, None)), x[0, :2].float()), TALL, (0, 3, 2), 5),
    "x[i, t] = v": (lambda x, i: assigned(x * 1, ([2, 0], i[-1]), 2 * x[:2, 0]), WIDE, (0, 3, 2), 5),
    "x[t] = f(x[t])": (lambda x, i: assigned(y := x * 1, i[-1], y[i[-1]].tanh() + x[0]), TALL, (0, 3, 2), 5),
    "x[t] += v": (lambda x, i: plus(x.detach().clone(), i[-1], 2) * x, TALL, (0, 3, 2), 5),
    "x[t] under dropout": (lambda x, i: F.dropout(x, 0.0)[i[-1]] * 2, TALL, (0, 3, 2), 5),
    "take": (lambda x, i: x.take(i), TALL, (0, 3, 2), 15),
    "take_along_dim": (lambda x, i: torch.take_along_dim(x, rows(i), 0), TALL, (0, 3, 2), 5),
    "take_along_dim, flat": (lambda x, i: torch.take_along_dim(x, i), TALL, (0, 3, 2), 15),
    "put_": (lambda x, i: (x * 1).put_(i, 2 * x[:3, 0]), TALL, (0, 3, 2), 15),
    "gather": (lambda x, i: x.gather(0, rows(i)), TALL, (0, 3, 2), 5),
    "gather from a number": (lambda x, i: x.gather(0, i), SCALAR, (0, 0), 1),
    "scatter": (lambda x, i: x.scatter(0, rows(i), 2 * x[:3]), TALL, (0, 3, 2), 5),
    "scatter_ a number": (lambda x, i: (x * 1).scatter_(0, rows(i), 2.0), TALL, (0, 3, 2), 5),
    "scatter, multiplied": (lambda x, i: x.detach().scatter(0, rows(i), 2.0, reduce="multiply"), TALL, (0, 3, 2), 5),
    "scatter_add": (lambda x, i: x.scatter_add(0, rows(i), 2 * x[:3]), TALL, (0, 3, 2), 5),
    "gather of one": (lambda x, i: x.gather(0, i[-1]), VECTOR, (0, 3, 2), 5),
    "scatter of one": (lambda x, i: x.scatter(0, i[-1], 2 * x.sum()), VECTOR, (0, 3, 2), 5),
    "scatter_ a number to one": (lambda x, i: (x * 1).scatter_(0, i[-1], 2.0), VECTOR, (0, 3, 2), 5),
    "scatter_add of one": (lambda x, i: x.scatter_add(0, i[-1:], 2 * x.sum()), VECTOR, (0, 3, 2), 5),
    "scatter_add of nothing": (lambda x, i: x.scatter_add(0, i[:0], x.detach()), TALL, (0, 3, 2), 5),
    **{f"scatter_reduce {mode}": (_scatter_reduce(mode, mode < "n"), TALL, (0, 3, 2), 5) for mode in MODES},
    "embedding": (lambda x, i: F.embedding(i, x), TALL, (0, 3, 2), 5),
    "embedding, padded": (lambda x, i: F.embedding(i, x, padding_idx=2), TALL, (0, 3, 2), 5),
    "embedding, padded by the last": (lambda x, i: F.embedding(i, x, padding_idx=-1), TALL, (0, 4, 2), 5),
    "embedding_bag": (lambda x, i: F.embedding_bag(i[None], x, mode="sum", padding_idx=2), TALL, (0, 3, 2), 5),
    "embedding_bag, maxima": (lambda x, i: F.embedding_bag(i[None], x, mode="max"), TALL, (0, 3, 2), 5),
    "embedding_bag, offsets": (lambda x, i: F.embedding_bag(torch.arange(5, dtype=i.dtype), x, i), TALL, (0, 1, 3), 5),
    "one_hot": (lambda x, i: F.one_hot(i, 5) * x[0, 0], TALL, (0, 3, 2), 5),
    "nll_loss": (lambda x, i: F.nll_loss(x[:3], i), SQUARE, (0, 3, 2), 5),
    "nll_loss, weighted": (lambda x, i: F.nll_loss(x[:3], i, x[4].detach()), SQUARE, (0, 3, 2), 5),
    "nll_loss, -1 ignored": (lambda x, i: F.nll_loss(x[:3], i, ignore_index=-1), SQUARE, (0, 3, 2), 5),
    "nll_loss, 5 ignored": (
        lambda x, i: F.nll_loss(x[:3], i, ignore_index=5, reduction="none"),
        SQUARE,
        (0, 3, 2),
        5,
    ),
    "nll_loss of an image": (lambda x, i: F.nll_loss(x[None], i[None]), TALL, (0, 3, 2), 5),
    "cross_entropy": (lambda x, i: F.cross_entropy(x[:3], i), SQUARE, (0, 3, 2), 5),
    "cross_entropy, smoothed": (
        lambda x, i: F.cross_entropy(x[:3], i, label_smoothing=0.1, ignore_index=-1),
        SQUARE,
        (0, 3, 2),
        5,
    ),
    "multi_margin_loss": (lambda x, i: F.multi_margin_loss(x[:3], i), SQUARE, (0, 3, 2), 5),
    "multilabel_margin_loss": (
        lambda x, i: F.multilabel_margin_loss(x[0], F.pad(i, (0, 2), value=-1)),
        SQUARE,
        (0, 3, 2),
        5,
    ),
    "max_unpool1d": (lambda x, i: F.max_unpool1d(x[:1, :3], i[None], 2), TALL, (0, 3, 4), 6),
    "max_unpool2d": (lambda x, i: F.max_unpool2d(x[None, :1, :3], i[None, None], 2), TALL, (0, 3, 4), 12),
    "max_unpool3d": (lambda x, i: F.max_unpool3d(x[None, None, :1, :3], i[None, None, None], 2), TALL, (0, 3, 4), 24),
    "segment_reduce": (lambda x, i: torch.segment_reduce(x, "sum", lengths=i, axis=0), TALL, (0, 3, 2), 3),
}


def tensor_of(shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)


def outcome(module, shape, index):
    """Result and gradient, or the error's type and first line."""
    x = tensor_of(shape)
    try:
        y = module(x, index)
    except Exception as error:  # noqa: BLE001 - the test compares the exceptions
        return type(error), str(error).partition("\n")[0]
    if y.requires_grad:
        y.backward(torch.arange(1.0, y.numel() + 1, dtype=y.dtype).reshape(y.shape))
    return y.detach(), x.grad


def indices(valid, n, dtype):
    """The valid index, then variants with one element that is negative, beyond the end or the last one."""
    yield torch.tensor(valid, dtype=dtype)
    for value in (-1, -n, -n - 1, n - 1, n, n + 5):
        if value >= 0 or dtype.is_signed:
            yield torch.tensor([*valid[:-1], value], dtype=dtype)


def check(eager, dispatched, shape, given):
    """Compares outcomes; returns how many calls eager served."""
    served = 0
    for index in given:
        wanted, got = outcome(eager, shape, index), outcome(dispatched, shape, index)
        if isinstance(wanted[0], type):
            assert got == wanted, index
        else:
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12, msg=lambda text, i=index: f"{i}: {text}")
            served += 1
    return served


ALIKE = (
    *("index_select, columns", "index_add, columns", "index_add_", "index_copy of a number"),
    *("index_fill_", "index_fill with a tensor", "x[i]", "x[:, i]"),
    *("x[i] = v", "x[t], a result", "x[..., t, None]", "x[i, t]"),
    *("x[t] = v", "x[t] = 2", "x[i, t] = v", "x[t] = f(x[t])"),
    *("take_along_dim, flat", "scatter_ a number", "scatter_ a number to one", "scatter_add of one"),
    *("scatter_reduce sum", "scatter_reduce amin", "embedding, padded by the last", "embedding_bag, maxima"),
    *("nll_loss, weighted", "nll_loss, -1 ignored", "cross_entropy", "max_unpool1d"),
    *("max_unpool3d",),
)
"""Other ways to write another one, or other axes and numbers of it."""


@pytest.mark.parametrize("name", sampled(CASES, lambda name: name not in ALIKE))
def test_int64(name):
    _agrees(name, torch.int64)


TYPED = ("index_select", "index_add", "index_copy", "index_put", "x[i]", "gather", "embedding")


@pytest.mark.parametrize(
    ("name", "dtype"),
    sampled(
        itertools.product(TYPED, (torch.int32, torch.uint8)),
        lambda case: (case[1] == torch.uint8) == (case[0] in ("index_add", "index_copy", "x[i]")),
    ),
    ids=str,
)
def test_other_types(name, dtype):
    _agrees(name, dtype)


def _agrees(name, dtype):
    function, shape, valid, n = CASES[name]
    eager, dispatched = Function(function), Function(function)
    valid_index = torch.tensor(valid, dtype=dtype)
    wanted = outcome(eager, shape, valid_index)
    if isinstance(wanted[0], type):  # eager takes no indices of this type
        with pytest.raises(wanted[0]) as raised:
            add_tvm_dispatch(dispatched, (tensor_of(shape), valid_index))
        assert str(raised.value).partition("\n")[0] == wanted[1]
        return
    add_tvm_dispatch(dispatched, (tensor_of(shape), valid_index))
    served = check(eager, dispatched, shape, indices(valid, n, dtype))
    assert stats(dispatched).hits == served


@pytest.mark.parametrize(
    ("name", "dtype"),
    sampled(
        itertools.product(("x[t]", "x[t] = v"), (torch.int32, torch.int8)),
        [("x[t]", torch.int32), ("x[t] = v", torch.int8)],
    ),
    ids=str,
)
def test_numbers_of_other_types(name, dtype):
    _agrees(name, dtype)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x, t: x[t], "returns a view, at a position that a tensor gives"),
        (lambda x, t: (y := x * 1, y[t]), "returns a view, at a position that a tensor gives"),
        (lambda x, t: assigned((x[0] * 1).expand(5, 3), t, 2), "data-dependent|is written, or read|is expanded"),
    ],
)
def test_what_depends_on_where_a_number_points(function, words):
    with pytest.raises(UnsupportedModule, match=words):
        add_tvm_dispatch(Function(function), (tensor_of(TALL), torch.tensor(0)))


class Held(nn.Module):
    """Takes the view at a position of a buffer, and writes one of the two."""

    def __init__(self, write):
        super().__init__()
        self.register_buffer("held", tensor_of(TALL).detach())
        self.write = write

    def forward(self, x, t):
        view = self.held[t]
        self.write(self.held, view)
        return view * x + self.held.sum()


@pytest.mark.parametrize(
    "write", [lambda held, _: held.add_(1), lambda _, view: view.add_(1), lambda held, _: held[1:4].mul_(2)]
)
def test_a_view_at_a_position_of_a_buffer_shows_its_writes(write):
    eager, dispatched, x = Held(write), Held(write), tensor_of(VECTOR)[:3].detach().requires_grad_()
    add_tvm_dispatch(dispatched, (x, torch.tensor(0)))
    for place in (0, 3, 4):
        made, wanted = (module(x, torch.tensor(place)) for module in (dispatched, eager))
        torch.testing.assert_close(made, wanted)
        torch.testing.assert_close(dispatched.held, eager.held)
    assert stats(dispatched).hits == 3


def test_a_number_is_no_constant():
    """Entries of equal calls share programs: one at position 0 and one at a number that is 0 are not equal."""
    x = tensor_of(TALL)
    functions = (lambda x, t: x[0] * 2 + t), (lambda x, t: x[t] * 2 + t), (lambda x, t: x[0] * 2 + t)
    modules = [add_tvm_dispatch(Function(function), (x, torch.tensor(0))) for function in functions]
    for module in modules:
        torch.testing.assert_close(module(x, torch.tensor(2)), module.forward(x, torch.tensor(2)))
        assert stats(module).hits == 1


def test_a_number_that_is_drawn_beside_is_eagers():
    class Memory(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cells", torch.zeros(4, 3))

        def forward(self, x, t):
            self.cells[t] = F.dropout(x.detach())
            self.cells[t] += 1
            return self.cells[t] * x if t > 0 else x

    x, eager, dispatched = tensor_of((3,)), Memory(), Memory()
    add_tvm_dispatch(dispatched, (x, torch.tensor(1)))
    for place in (1, 3, 2):
        runs = []
        for module in (eager, dispatched):
            torch.manual_seed(place)
            runs += [module(x, torch.tensor(place)), module.cells.clone(), torch.get_rng_state()]
        torch.testing.assert_close(runs[:3], runs[3:])
    assert stats(dispatched).hits == 3


@pytest.mark.parametrize(
    "name", sampled(["index_select", "index_add", "nll_loss", "max_unpool2d"], ["index_select", "nll_loss"])
)
def test_through_torch_compile(name):
    function, shape, valid, n = CASES[name]
    torch._dynamo.reset()
    compiled = torch.compile(Function(function), backend="tvm_dispatch")
    assert check(Function(function), compiled, shape, indices(valid, n, torch.int64)) == 2


def test_a_graph_layer_padded_with_minus_one_raises_as_eager():
    """Messages along edges; an edge list padded with -1 must not train silently on the last node."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, edges):
            messages = self.linear(x).index_select(0, edges[0])
            return torch.zeros_like(x).index_add_(0, edges[1], messages)

    layer, x = Layer(), torch.randn(3, 4)
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    add_tvm_dispatch(layer, (x, edges))
    layer(x, edges)
    with pytest.raises(IndexError, match="index out of range in self"):
        layer(x, torch.tensor([[0, 1, -1], [1, 2, 0]]))
    with pytest.raises((IndexError, RuntimeError), match=r"index -1 is out of bounds|index out of range"):
        layer(x, torch.tensor([[0, 1, 2], [1, 2, -1]]))
    assert stats(layer).hits == 1
