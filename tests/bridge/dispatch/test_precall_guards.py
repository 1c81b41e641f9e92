"""Pre-call guard expressions: numbers of the inputs, computed by torch's operators before the compiled forward."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, examine, explain, load_compiled, save_compiled, stats
from bridge.dispatch import entries
from tests.bridge.compare import Call, assert_same, run
from tests.device import ASSERTS, DEVICE
from tests.sampling import sampled

F64 = torch.float64


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


X = draw(3, 4)
KEPT, PADDED = torch.ones(3, dtype=torch.bool), torch.tensor([True, False, True])


class Reading(nn.Module):
    """A linear layer, dropout, a counter of calls, and a function that reads numbers."""

    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("limit", torch.zeros((), dtype=F64))
        self.function = function

    def forward(self, *args):
        self.calls += 1
        return nn.functional.dropout(self.linear(self.function(self, *args)), 0.5)


def dispatched(function, *sample, **options):
    torch.manual_seed(0)
    module = Reading(function).double()
    eager = copy.deepcopy(module)
    return eager, add_tvm_dispatch(module, sample, **options)


def same_as_eager(eager, module, *args, seed=0):
    assert_same(run(module, Call(args), seed=seed), run(eager, Call(args), seed=seed))


def steps(module):
    return [[step.kind for step in entry.steps] for entry in stats(module).entries]


def padded(module, x, kept):
    return x.sin() if kept.all() else x * kept[:, None]


def nested(module, x, kept):
    """The second number is one only where the first is true; the buffer is read after it was written."""
    if kept.all():
        return x.sin() if module.calls < 4 else x.cos()
    return x


def counted(module, x, n):
    return x[: n.item()].sum(0, keepdim=True) if n > 1 else x * n


def flagged(module, x, kept):
    return x * 2 if kept.tolist() == [True, False, True] else x


def literal(module, x, kept):
    return x * 2 if torch.equal(kept, torch.tensor([True, True, True])) else x


N = torch.tensor
BRANCHES = {
    "flag": (padded, [(X, KEPT), (X, PADDED), (X, ~KEPT), (X, KEPT)], 2),
    "nested, of a buffer that changes": (nested, [(X, KEPT), (X, PADDED), (X, KEPT), (X, KEPT), (X, KEPT)], 3),
    "integer": (counted, [(X, N(2)), (X, N(1)), (X, N(3)), (X, N(2))], 2),  # one of all sizes
    "list": (flagged, [(X, PADDED), (X, KEPT), (X, PADDED)], 2),
    "beside a literal": (literal, [(X, KEPT), (X, PADDED)], 2),
}


@pytest.mark.composes(
    "numbers that forward reads of its inputs (`if mask.all():`, `.item()` of a length)",
    "read before the call as in eager; each outcome is an entry",
    section="Guards",
)
@pytest.mark.parametrize("name", sampled(BRANCHES, lambda name: name != "flag"))
def test_each_outcome_is_an_entry(name):
    function, calls, entries = BRANCHES[name]
    eager, module = dispatched(function, *calls[0], on_miss="compile")
    for seed, args in enumerate(calls):
        same_as_eager(eager, module, *args, seed=seed)
    assert (stats(module).hits, stats(module).misses.total()) == (len(calls), 0)
    assert len(stats(module).entries) == entries
    for kinds in steps(module):
        assert kinds.index("numbers") < kinds.index("draws") and "checks" not in kinds


def test_another_outcome_is_a_miss_with_a_reason_before_anything_is_computed():
    eager, module = dispatched(padded, X, KEPT)
    (entry,) = stats(module).entries
    entry.run.forward.insert(0, lambda call: pytest.fail("the forward was run for nothing"))
    same_as_eager(eager, module, X, PADDED)
    ((reason, count),) = stats(module).misses.items()
    assert count == 1 and reason.startswith("number read at ")
    assert reason.endswith("x.sin() if kept.all() else x * kept[:, None]: compiled for True, called with False")
    assert "kept.all() else x * kept[:, None]: compiled for True" in str(explain(module).full)
    assert "nothing stands in the way" in str(examine(eager, (X, KEPT)))


def test_a_number_that_is_another_at_every_call_is_left_to_eager_in_the_end(caplog, monkeypatch):
    monkeypatch.setattr(entries, "MAX_WASTED", 2)

    def scaled(module, x, n):
        return x * n.item()

    eager, module = dispatched(scaled, X, N(0), on_miss="compile")
    with caplog.at_level(logging.WARNING, "bridge"):
        for n in range(6):
            same_as_eager(eager, module, X, N(n))
    counted = stats(module)
    assert len(counted.entries) == 3 and counted.misses.total() >= 3
    assert all("called with" in reason for reason in counted.misses)
    assert sum("runs eager from now on" in record.message for record in caplog.records) == 1


OTHERS = {
    "a parameter": lambda module, x: x if module.linear.weight.sum() > -100 else x * 2,
    "a draw": lambda module, x: x if torch.randn(()) < 20 else x * 2,
    "much": lambda module, x: x if (x.new_zeros(1, 1 << 20) + x[0, 0]).max() < 100 else x * 2,
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_function_of_inputs_or_takes_long_is_compared_by_the_compiled_forward(name):
    eager, module = dispatched(OTHERS[name], X)
    same_as_eager(eager, module, X)
    assert stats(module).hits == 1
    ((*_, kinds),) = (steps(module),)
    assert "checks" in kinds and "numbers" not in kinds


def test_what_is_read_of_constants_is_no_condition():
    eager, module = dispatched(lambda module, x: x if torch.arange(x.shape[0]).sum() == 3 else x * 2, X)
    same_as_eager(eager, module, X)
    ((*_, kinds),) = (steps(module),)
    assert stats(module).hits == 1 and "checks" not in kinds and "numbers" not in kinds


@pytest.mark.parametrize("seed", range(4))
def test_rounding_decides_as_in_eager(seed):
    """Eager's own sum is the limit: compiled code may add in another order."""
    x = draw(173, 4, seed=seed)
    eager, module = dispatched(lambda module, x: x if x.sum() >= module.limit else x * 2, x)
    for each in (eager, module):
        each.limit.copy_(x.sum())
    same_as_eager(eager, module, x)
    for each in (eager, module):
        each.limit.copy_(x.sum().nextafter(torch.tensor(9e9, dtype=F64)))
    same_as_eager(eager, module, x)
    assert (stats(module).hits, stats(module).misses.total()) == (1, 1)


@pytest.mark.cpu("CUDA's autocast casts inside of sums, which is refused by name")
def test_casts_of_autocast_are_eagers():
    def halved(module, x, y):
        return x if (x.float() @ y.float()).sum() >= module.limit else x * 2

    x, y = draw(5, 4), draw(4, 6)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        total = (x.float() @ y.float()).sum()
        eager, module = dispatched(halved, x, y)
        for each in (eager, module):
            each.limit.copy_(total)
            assert each(x, y).shape == x.shape
    assert stats(module).hits == 1


def test_an_operator_without_a_conversion_may_decide():
    def function(module, x, n):
        return x * 2 if torch.kthvalue(n, 2).values > 1 else x

    eager, module = dispatched(function, X, N([3, 1, 2]), on_miss="compile")
    for numbers in ([3, 1, 2], [1, 1, 3], [4, 1, 2]):
        same_as_eager(eager, module, X, N(numbers))
    assert stats(module).hits == 3 and len(stats(module).entries) == 2


@ASSERTS
def test_where_reading_raises_so_does_eager():
    def chosen(module, x, flags, n):
        return x * 2 if flags.index_select(0, n) else x

    eager, module = dispatched(chosen, X, PADDED, N([0]), on_miss="compile")
    same_as_eager(eager, module, X, PADDED, N([0]))
    for each in (eager, module):
        with pytest.raises((IndexError, RuntimeError), match="out of range"):
            each(X, PADDED, N([7]))
    assert len(stats(module).entries) == 1 and "error in the number read" in str(stats(module).misses)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="older versions fix the sizes")
def test_sizes_that_vary_do_so_for_each_outcome():
    def function(module, x, kept):
        return x.sin() if kept.all() and kept.sum() == x.shape[0] else x * kept[:, None]

    eager, module = dispatched(function, X, KEPT, on_miss="compile")
    for rows in (3, 5, 7, 6, 9):
        for kept in (torch.ones(rows, dtype=torch.bool), torch.arange(rows) > 1):
            same_as_eager(eager, module, draw(rows, 4), kept)
    assert stats(module).hits == 10 and not stats(module).misses
    assert len(stats(module).entries) <= 4


def test_a_saved_call_reads_as_well(tmp_path):
    eager, module = dispatched(nested, X, KEPT)
    save_compiled(module, tmp_path / "saved")
    loaded = load_compiled(tmp_path / "saved")
    for calls in range(3):
        same_as_eager(eager, loaded, X, KEPT, seed=calls)
    with pytest.raises(Exception, match="compiled for True, called with False"):
        loaded(X, KEPT)


def test_equal_modules_share_what_is_lowered():
    (_, one), (_, two) = dispatched(padded, X, KEPT), dispatched(padded, X, KEPT)
    assert stats(one).entries[0].lowered is stats(two).entries[0].lowered


def test_what_is_read_may_be_computed_with_too():
    """The nodes behind the number stay in the graph."""
    eager, module = dispatched(lambda module, x, kept: x * kept.all() if kept.all() else x, X, KEPT)
    same_as_eager(eager, module, X, KEPT)
    assert stats(module).hits == 1
