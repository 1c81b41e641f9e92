"""Shapes that numbers in arguments decide: compiled for the sample's count, or for all from the second one on."""

import copy
import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from bridge.dispatch.dispatcher import Dispatcher
from tests.bridge.compare import Call, Function, assert_same, check_module, run
from tests.sampling import sampled

ROWS, WIDTH = 6, 5


class Picked(nn.Module):
    """A layer around a function of its result and of the arguments."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x, mask, *others):
        return self.function(self.linear(x), mask, *others)


def arguments(mask=(1, 0, 1, 1, 0, 1)):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.tensor(mask, dtype=torch.bool)


def _assigned(y, mask):
    y = y * 1
    y[mask] = torch.ones(4, WIDTH, dtype=y.dtype) * y[~mask].sum()
    return y


FORMS = {
    "rows": lambda y, mask: y[mask].tanh(),
    "elements": lambda y, mask: y[mask[:, None] & (torch.arange(WIDTH) > 1)],
    "between other items": lambda y, mask: y[None, mask, 1:],
    "masked_select": lambda y, mask: torch.masked_select(y, mask[:, None]).exp(),
    "nonzero": lambda y, mask: y[mask.nonzero().squeeze(1)] * 2,
    "nonzero of integers": lambda y, mask: y[torch.nonzero(mask.long(), as_tuple=True)],
    "argwhere": lambda y, mask: y.index_select(0, torch.argwhere(mask)[:, 0]),
    "where": lambda y, mask: y[torch.where(mask)[0]].sum(0),
    "a loss of some rows": lambda y, mask: F.cross_entropy(y[mask], mask[mask].long()),
    "equal parts": lambda y, mask: y[mask].reshape(2, -1, WIDTH).mean(1),
    "written": _assigned,
    "repeats": lambda y, mask: torch.repeat_interleave(y, mask.long() + 1, dim=0).sin(),
    "a result": lambda y, mask: (y, mask.nonzero()),
    "bins": lambda y, mask: y.sum(0)[:2] / torch.bincount(mask.long()),
    "bins of weights": lambda y, mask: y[:3, 0] * torch.bincount(mask.long(), y[:, 1].detach(), 3),
    "bins of a kind": lambda y, mask: y[:3] * mask.to(torch.uint8).bincount(minlength=3)[:, None],
}


def _places(mask):
    """Integers, some of them twice: four different ones, five runs."""
    return torch.tensor([[3, 3, -1], [3, 7, 2]]) * mask.new_ones(1).long()


FORMS |= {
    "distinct": lambda y, mask: torch.unique(_places(mask)) * y.sum(),
    "distinct, of a few": lambda y, mask: (y * 1, *_places(mask).to(torch.int32).unique(return_inverse=True)),
    "distinct, counted": lambda y, mask: (y * 1, *torch.unique(_places(mask), True, True, True)),
    "distinct flags": lambda y, mask: (y * 1, *mask.unique(return_counts=True)),
    "distinct, one number": lambda y, mask: (y * 1, *torch.unique(_places(mask)[0, 0], return_inverse=True)),
    "runs": lambda y, mask: (y * 1, *torch.unique_consecutive(_places(mask), return_inverse=True, return_counts=True)),
    "runs of flags": lambda y, mask: y.sum() * mask.unique_consecutive(),
}

ALIKE = (
    "distinct, of a few",
    "distinct flags",
    "runs of flags",
    "nonzero of integers",
    "argwhere",
    "a loss of some rows",
    "equal parts",
    "bins of a kind",
)
"""Of rows, of positions, of bins: another one is here."""


@pytest.mark.parametrize("name", sampled(FORMS, lambda name: name not in ALIKE))
def test_it_is_eagers_result(name):
    check_module(lambda: Picked(FORMS[name]), arguments, calls=1)


def test_another_count_is_a_miss_and_another_mask_of_the_same_count_is_not():
    torch.manual_seed(0)
    eager = Picked(FORMS["rows"]).double()
    module = add_tvm_dispatch(Picked(FORMS["rows"]).double(), arguments())
    module.load_state_dict(eager.state_dict())
    for mask, hits in (
        ((0, 1, 1, 1, 1, 0), 1),
        ((1, 1, 1, 1, 1, 0), 1),
        ((0, 0, 0, 0, 0, 0), 1),
        ((1, 1, 0, 0, 1, 1), 2),
    ):
        call = Call(arguments(mask))
        assert_same(run(module, call), run(eager, call))
        assert stats(module).hits == hits
    (reason,) = [each for each in stats(module).misses if "called with 5" in each]
    assert "compiled for 4" in reason and "test_counted_sizes.py" in reason


def _convolved(module, x, edges):
    """A graph convolution, without the graph's self-loops and with one for each node."""
    edges = edges[:, edges[0] != edges[1]]
    edges = torch.cat([edges, torch.arange(x.shape[0]).expand(2, -1)], 1)
    degree = torch.zeros(x.shape[0], dtype=x.dtype).scatter_add(0, edges[1], torch.ones(edges.shape[1], dtype=x.dtype))
    y, scale = module.linear(x), degree.rsqrt()
    return torch.zeros_like(y).index_add(0, edges[1], y[edges[0]] * (scale[edges[0]] * scale[edges[1]])[:, None])


def _detected(module, x, boxes, classes):
    """A detector's loss over the present boxes, divided by their number."""
    found = classes > 0
    (places,) = found.nonzero(as_tuple=True)
    y = module.linear(x)
    lost = F.smooth_l1_loss(y[found][:, :4], boxes[places], reduction="sum") / found.sum()
    return lost + F.cross_entropy(y, classes)


def _attended(module, x, lengths):
    steps = lengths.max()
    is_padding = torch.arange(int(steps)) >= lengths[:, None]
    y = module.layer(module.linear(x[:, :steps]), src_key_padding_mask=is_padding)
    return y.masked_fill(is_padding[:, :, None], 0).sum(1)


def _twice(module, x, edges):
    edges = edges[:, edges[0] != edges[1]]
    weights = torch.ones(edges.shape[1], dtype=x.dtype) - 0.5 * (edges[0] == 0)
    few = edges[:, edges[0] < 3]
    return (module.linear(x)[edges[0]] * weights[:, None]).sum(0) + x[few[1]].mean(0)


def _pooled(module, x, graph):
    count = int(graph.max()) + 1
    sums = torch.zeros(count, WIDTH, dtype=x.dtype).index_add(0, graph, module.linear(x))
    return sums / torch.bincount(graph, minlength=count)[:, None]


def _mined(module, x, labels):
    """A loss of pairs of one class, as libraries of metric learning write it."""
    same = labels[:, None] == labels
    same.fill_diagonal_(False)
    places, others = torch.where(same)
    if len(places) == 0:
        return module.linear(x).sum() * 0
    y = module.linear(x)
    return (y[places] - y[others]).square().sum(1).clamp_(min=0.1).sum() / len(places)


def _of_kinds(module, x):
    """Numbers that follow from sizes alone: how many rows there are of each kind."""
    kinds = torch.cat([torch.zeros(x.shape[0]), torch.ones(x.shape[0])])
    first = (kinds == 0).sum()
    y = module.linear(torch.cat([x, x.tanh()]))
    square = torch.ones(x.shape[0], x.shape[0], dtype=x.dtype).fill_diagonal_(3).clamp_(max=2)
    return y[:first].sum(0) * y[first:].mean(0) * square.sum()


def _pooled_by_name(module, x, names):
    """Means of the rows of each name: PyTorch Geometric's pooling by clusters."""
    _, places, counts = torch.unique(names, return_inverse=True, return_counts=True)
    return torch.zeros(len(counts), WIDTH, dtype=x.dtype).index_add(0, places, module.linear(x)) / counts[:, None]


def _in_a_row(module, x, graph):
    """Rows of graphs, padded to the longest one's number and taken out again: PyTorch Geometric's dense batches."""
    counts = torch.zeros(2, dtype=torch.long).index_add(0, graph, torch.ones_like(graph))
    starts = counts.new_empty(3)
    starts[:1].zero_()
    torch.cumsum(counts, 0, out=starts[1:])
    longest = int(counts.max())
    places = torch.arange(len(x)) - starts[graph] + graph * longest
    rows, is_row = x.new_zeros(2 * longest, WIDTH), torch.zeros(2 * longest, dtype=torch.bool)
    rows[places], is_row[places] = x, True
    return module.linear(rows)[is_row] + x


def _padded(module, x, n):
    y = F.pad(module.linear(x), (0, n)).flip(1).cumsum(1)
    return torch.cat([y, x.new_zeros(x.shape[0], n)], 1)[:, : 2 * n] * torch.arange(2 * n)


def _number(i):
    return (5, 3, 7, 4, 9, 2, 8, 6)[i % 8]


def _random(i, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)


def _integers(i, high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(i))


def _mask(i):
    return torch.randperm(12, generator=torch.Generator().manual_seed(i)) < _number(i)


def _graph(i, nodes):
    loops = torch.tensor([[0, 1, 1], [0, 1, 2]])
    return _random(i, nodes, WIDTH), torch.cat([loops, _integers(i, nodes, 2, 6 + _number(i))], 1)


def _boxes(i):
    classes = torch.where(_mask(i), 1 + _integers(i, WIDTH - 1, 12), 0)
    return _random(i, 12, WIDTH), _random(i + 50, 12, 4), classes


def _lengths(i):
    return _random(i, 3, 11, WIDTH), torch.tensor([2, _number(i), _number(i) - 1])


VARYING = {
    "rows": (lambda m, x, mask: m.linear(x[mask]).tanh().mean(0), lambda i: (_random(i, 12, WIDTH), _mask(i))),
    "edges": (_convolved, lambda i: _graph(i, 6)),
    "nodes and edges": (_convolved, lambda i: _graph(i, 3 + _number(i + 3))),
    "boxes": (_detected, _boxes),
    "the longest sequence": (_attended, _lengths),
    "repeats": (
        lambda m, x, times: torch.repeat_interleave(m.linear(x), times, 0).tanh().mean(0),
        lambda i: (_random(i, 5, WIDTH), _integers(i, 4, 5) + 1),
    ),
    "a mask of what a mask selected": (_twice, lambda i: _graph(i, 6)),
    "a number of graphs, and bins": (_pooled, lambda i: (_random(i, 9, WIDTH), torch.arange(9) % max(3, _number(i)))),
    "0-d tensors as sizes": (_padded, lambda i: (_random(i, 3, WIDTH), torch.tensor(_number(i)))),
    "lengths of what was picked": (_mined, lambda i: (_random(i, 12, WIDTH), _integers(i, 3, 12))),
    "masked_select": (
        lambda m, x, mask: m.linear(x).masked_select(mask[:, None]).square().mean(),
        lambda i: (_random(i, 12, WIDTH), _mask(i)),
    ),
    "padded rows": (_in_a_row, lambda i: (_random(i, 9, WIDTH), (torch.arange(9) >= 1 + _number(i) % 7).long())),
    "names": (_pooled_by_name, lambda i: (_random(i, 9, WIDTH), torch.arange(9) % max(3, _number(i)) * 5 - 1)),
}


class Counted(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function
        self.layer = nn.TransformerEncoderLayer(WIDTH, 1, 8, dropout=0.0, batch_first=True)

    def forward(self, *args):
        return self.function(self, *args)


BATCHES = int(os.environ.get("COUNTED_BATCHES", "8"))


@pytest.mark.parametrize("name", sampled(VARYING, lambda name: name not in ("edges", "masked_select", "repeats")))
def test_all_counts_have_one_entry(name):
    function, batch = VARYING[name]
    torch.manual_seed(0)
    eager = Counted(function).double()
    module = add_tvm_dispatch(Counted(function).double(), batch(0), on_miss="compile")
    module.load_state_dict(eager.state_dict())
    for i in range(BATCHES):
        call = Call(batch(i))
        assert_same(run(module, call), run(eager, call))
    assert (stats(module).hits, len(stats(module).entries)) == (BATCHES, 1), stats(module)


def test_numbers_that_sizes_alone_decide_vary_with_them():
    """The sample's entry has them as constants."""
    torch.manual_seed(0)
    eager = Counted(_of_kinds).double()
    module = add_tvm_dispatch(copy.deepcopy(eager), (_random(0, 3, WIDTH),), on_miss="compile")
    for size in (3, 4, 7, 5):
        call = Call((_random(size, size, WIDTH),))
        assert_same(run(module, call), run(eager, call))
    assert (stats(module).hits, len(stats(module).entries)) == (4, 2), stats(module)


def test_counts_that_are_no_sizes_in_general_have_entries_of_their_own():
    """Counts of 0 and 1 are special cases of torch's. A later count finds the dynamic entry."""
    function, _ = VARYING["rows"]
    eager = Counted(function).double()
    module = add_tvm_dispatch(copy.deepcopy(eager), arguments((1, 0, 1, 1, 0, 0)), on_miss="compile")
    ones = (0, 3, 1, 5, 0, 1, 2, 6, 4)
    for count in ones:
        call = Call(arguments([1] * count + [0] * (ROWS - count)))
        assert_same(run(module, call), run(eager, call))
    assert (stats(module).hits, len(stats(module).entries)) == (len(ones), 3)


def test_relations_of_counts_are_asked_of_each_call():
    """As many elements are set in one mask as in another one, here and not there: eager's branch, or its error."""
    module = Counted(lambda m, x, a, b: m.linear(x[a] + x[b]) if a.sum() == b.sum() else m.linear(x[a]) * 2).double()
    eager = copy.deepcopy(module)
    x = _random(0, 12, WIDTH)
    add_tvm_dispatch(module, (x, _mask(0), _mask(8)), on_miss="compile")
    for i, k in ((0, 8), (1, 9), (2, 3), (4, 12), (3, 6), (5, 5)):
        call = Call((x, _mask(i), _mask(k)))
        assert_same(run(module, call), run(eager, call))
    unequal = Counted(lambda m, x, a, b: m.linear(x[a] + x[b])).double()
    add_tvm_dispatch(unequal, (x, _mask(0), _mask(8)), on_miss="compile")
    unequal(x, _mask(1), _mask(9))
    with pytest.raises(RuntimeError, match="must match"):
        unequal(x, _mask(1), _mask(2))


def test_bins_of_what_parameters_decide_are_as_many_as_were_asked_for_or_a_miss():
    """As the load of a mixture's experts. A number in a further bin makes another length."""
    torch.manual_seed(0)
    module = Picked(lambda y, mask: (y * 1e-3, torch.bincount(y.argmax(1), minlength=3)))
    x = arguments()[0].requires_grad_()

    def fall_into(bins):
        nn.init.zeros_(module.linear.weight)
        with torch.no_grad():
            module.linear.bias.copy_(torch.eye(WIDTH)[bins - 1])

    module.double()
    fall_into(2)
    add_tvm_dispatch(module, (x, x))
    for bins in (1, 3, 5, 2):
        fall_into(bins)
        y, load = module(x, x)
        assert load.tolist() == [ROWS * (bins == k + 1) for k in range(max(bins, 3))] and y.requires_grad
    assert stats(module).hits == 3 and stats(module).misses.total() == 1


def test_a_negative_number_has_no_bin_in_eager_either():
    module, (x, mask) = Picked(lambda y, mask: y.sum() * torch.bincount(mask, minlength=3)).double(), arguments()
    add_tvm_dispatch(module, (x, mask.long()))
    with pytest.raises(RuntimeError, match="non-negative"):
        module(x, mask.long() - 1)
    module(x, 1 - mask.long())
    assert stats(module).hits == 1 and stats(module).misses.total() == 1


def test_a_mask_of_nothing():
    check_module(lambda: Picked(FORMS["rows"]), lambda: arguments((0,) * ROWS), calls=1)


def test_a_mask_that_the_module_owns():
    class Owner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("kept", arguments()[1])

        def forward(self, x):
            return self.linear(x)[self.kept]

    check_module(Owner, lambda: arguments()[0], calls=1)


@pytest.mark.parametrize(
    "function",
    [
        lambda y, mask: y[y[:, 0] > 0],
        lambda y, mask: y[F.dropout(mask.double(), 0.5, True) > 0],
        lambda y, mask: torch.unique(mask.double()) * y.sum(),
        lambda y, mask: torch.unique((y > 0).long()) * y.sum(),
    ],
)
def test_counts_that_every_call_computes_anew_are_refused(function):
    with pytest.raises(UnsupportedModule, match="the shape of a result depends on"):
        add_tvm_dispatch(Picked(function).double(), arguments())


def test_a_mask_that_does_not_fit_is_eagers_error():
    with pytest.raises(IndexError):
        add_tvm_dispatch(Function(lambda x, mask: x[mask[:3]]), arguments())


class LogsOrCounts(nn.Module):
    def __init__(self, logs: bool):
        super().__init__()
        self.logs, self.seen = logs, []

    def forward(self, x):
        if self.logs:
            self.seen.append(x.shape[0] + len(self.seen))
        return x * 2 if self.logs else x[x[:, 0] > 0] * 2


def test_counts_are_sizes_that_vary_only_where_it_is_they_that_are_refused(monkeypatch):
    added, tried = Dispatcher._added, []
    monkeypatch.setattr(Dispatcher, "_added", lambda *args: tried.append(args) or added(*args))
    x, varying = torch.randn(5, 3), ({0: torch.export.Dim.AUTO},)
    with pytest.raises(UnsupportedModule, match="at every call"):
        add_tvm_dispatch(LogsOrCounts(True), x, dynamic_shapes=varying)
    assert len(tried) == 1
    add_tvm_dispatch(LogsOrCounts(False), x, dynamic_shapes=varying)
    assert len(tried) == 3
