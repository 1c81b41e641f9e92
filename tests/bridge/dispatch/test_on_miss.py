"""``on_miss="compile"``: the second size of a dimension is compiled for all; other differences get entries.

Where a size cannot vary, each gets an entry of its own: at most eight, of recorded loops 64.
"""

import copy
import logging
import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bridge import DispatchMiss, add_tvm_dispatch, stats
from bridge.dispatch.compile_entry import compile_entry
from bridge.dispatch.dispatcher import MAX_ENTRIES, MISSES_BEFORE_WARNING
from bridge.dispatch.entries import MAX_WASTED
from bridge.dispatch.profitability import TOO_SMALL
from tests.bridge.compare import Call, assert_same, run
from tests.bridge.models import MLP
from tests.device import DEVICE

pytestmark = pytest.mark.usefixtures("lowered_once")

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(count)).requires_grad_()


class Scale(nn.Module):
    """One kernel: cheap to compile."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((6,), 1.5))

    def forward(self, x, power: int = 1):
        return torch.tanh(x * self.weight) * power


class OneSize(Scale):
    """A bound that is a size: compiled for one size alone."""

    def forward(self, x, power: int = 1):
        return torch.tanh(x * self.weight).clamp(max=x.shape[0]) * power


def lengths_of(module: nn.Module) -> list[int]:
    """The lengths of the samples of a module's entries."""
    return [entry.lowered.captured.given.tensors[0].shape[0] for entry in stats(module).entries]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    records = [record for record in caplog.records if record.name.startswith("bridge")]
    return [each for each in records if each.levelno >= logging.WARNING and TOO_SMALL not in each.getMessage()]


def check(module: nn.Module, eager: nn.Module, x: torch.Tensor) -> None:
    assert_same(run(module, Call((x,))), run(eager, Call((x,))), **CLOSE)


@pytest.mark.composes(
    "batches of varying length in a loop",
    "one entry for all from the second length on; where they are refused, eight, the least recently used one leaves",
    section='`on_miss="compile"`',
)
@pytest.mark.skipif(torch.__version__ < "2.13", reason="products of older versions fix the sizes")
def test_batches_of_varying_length_in_a_loop(caplog):
    """The second length is compiled for all lengths, which the log and the statistics show."""
    torch.manual_seed(0)
    module = MLP(dropout=0.5)
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows(4), on_miss="compile")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (module, eager)]
    with caplog.at_level(logging.INFO, logger="bridge.dispatch"):
        for length in (4, 7, 5, 7, 4, 5, 9, 4, 30):
            check(module, eager, rows(length))
            for optimizer in optimizers:
                optimizer.step()
    assert stats(module).hits == 9 and not stats(module).misses
    assert [entry.hits for entry in stats(module).entries] == [8]
    assert "float32[x_0, 6]" in repr(stats(module)) and "8 hits, 5 sizes" in repr(stats(module))
    told = [each.getMessage() for each in caplog.records if "from its second size on" in each.getMessage()]
    assert len(told) == 1 and "x_0: dimension 0 of args[0], 2 <= x_0" in told[0]


def test_a_size_that_cannot_vary_is_tried_once(caplog, monkeypatch):
    """The size at hand is compiled even if compiling for all sizes fails."""
    tried = []  # numbers of dynamic dimensions; a size that forward fixes is then compiled alone

    def compiled(call, options, **more):
        dims = call.dims
        tried.append(len(dims))
        if dims and broken:
            raise RuntimeError("a bug")
        return compile_entry(call, options, **more)

    monkeypatch.setattr("bridge.dispatch.dispatcher.compile_entry", compiled)
    for module, broken in ((OneSize(), False), (Whole(), False), (Scale(), True)):
        eager = copy.deepcopy(module)
        add_tvm_dispatch(module)
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="bridge.dispatch"):
            for length in (3, 4, 5, 4, 3):
                check(module, eager, rows(length))
        assert stats(module).hits == 5 and lengths_of(module) == [3, 4, 5]
        told = [each for each in caplog.records if "gets an entry of its own" in each.getMessage()]
        assert len(told) == 1 and "args[0].shape[0]" in told[0].getMessage()
        assert told[0].levelno == (logging.WARNING if broken else logging.INFO)
    assert tried == [*(0, 1, 0, 0), *(0, 1, 0), *(0, 1, 0, 0)]


class Whole(Scale):
    """Python takes the size as a number."""

    def forward(self, x):
        return torch.tanh(x * self.weight) * int(x.shape[0])


@pytest.mark.composes("batches of varying length in a loop")
def test_the_least_recently_used_entry_leaves(caplog):
    module = OneSize()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows(1), on_miss="compile")
    with caplog.at_level(logging.WARNING, logger="bridge"):
        for length in range(1, MAX_ENTRIES + 1):
            for _ in range(2):
                check(module, eager, rows(length))
        assert not warnings_of(caplog)
        check(module, eager, rows(1))  # now the entry for length 2 is the oldest
        check(module, eager, rows(20))
        check(module, eager, rows(21))
    assert len(stats(module).entries) == MAX_ENTRIES
    assert lengths_of(module) == [1, *range(4, MAX_ENTRIES + 1), 20, 21]
    (record,) = warnings_of(caplog)
    message = record.getMessage()
    assert f"{MAX_ENTRIES} entries" in message and "shape of args[0]" in message and "(20, 6)" in message, message


class Steps(Scale):
    """A loop over the rows, with a float that is made of the length."""

    def forward(self, x):
        state, states = x[0], []
        for row in x:
            state = torch.tanh(row + self.weight * state) * (1.0 / len(x))
            states.append(state)
        return torch.stack(states)


def test_lengths_of_a_loop_that_are_not_alike_are_entries_of_their_own_without_a_try_of_all_sizes(monkeypatch):
    monkeypatch.setattr("bridge.capture.loops.rolled.LEAST_ROWS", 1)
    monkeypatch.setattr("bridge.dispatch.dispatcher.MAX_ENTRIES", 1)
    compiled = []

    def counted(call, options, **more):
        compiled.append(call.dims)
        return compile_entry(call, options, **more)

    for module in ("dispatcher", "automatic_dynamic"):
        monkeypatch.setattr(f"bridge.dispatch.{module}.compile_entry", counted)
    module = Steps()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module)
    for length in (6, 7, 9, 6, 7):
        check(module, eager, rows(length))
    assert compiled == [(), (), ()] and lengths_of(module) == [6, 7, 9] and stats(module).hits == 5
    assert all(entry.has_loops for entry in stats(module).entries)


def test_the_warning_comes_once_for_each_thing_that_differs(caplog):
    module = OneSize()
    add_tvm_dispatch(module, rows(1), on_miss="compile")
    with caplog.at_level(logging.WARNING, logger="bridge"):
        for length in range(1, MAX_ENTRIES + 4):
            module(rows(length)), module(rows(length))
        module(rows(1), 2)
        module.eval()(rows(MAX_ENTRIES + 3))
    fields = [record.getMessage().partition("differing: ")[2].partition(":")[0] for record in warnings_of(caplog)]
    assert fields[0] == "shape of args[0]"
    assert fields[1] == "number of positional arguments" and fields[2].startswith("training flag of"), fields


class Counted(Scale):
    """Counts its calls and draws before it reads its argument."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return torch.rand(()) * x * self.weight


@pytest.mark.composes("a call that eager itself refuses", "fails as in eager, counted", section='`on_miss="compile"`')
@pytest.mark.parametrize("bad", [(torch.ones(4, 7),), (), (torch.ones(4, 6), 3)], ids=["shape", "none", "too many"])
def test_a_call_that_eager_refuses_fails_as_in_eager_and_is_counted(bad):
    module = Counted()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows(4), on_miss="compile")
    left = []
    for each in (eager, module):
        torch.manual_seed(3)
        with pytest.raises((RuntimeError, TypeError)) as caught:
            each(*bad)
        left.append((type(caught.value), str(caught.value), int(each.calls), torch.rand(())))
    assert left[0] == left[1]
    assert stats(module).hits + stats(module).misses.total() == 1
    check(module, eager, rows(4))


def with_a_closure(norm: nn.BatchNorm1d) -> nn.BatchNorm1d:
    """Its forward is a function, which no copy takes along."""
    norm.forward = lambda x: nn.BatchNorm1d.forward(norm, x)
    return norm


@pytest.mark.parametrize(
    ("norm", "plain"),
    [
        (nn.BatchNorm1d(3, momentum=None), nn.BatchNorm1d(3, momentum=None)),  # traced in another form
        (with_a_closure(nn.BatchNorm1d(3)), nn.BatchNorm1d(3)),
    ],
    ids=["cumulative", "closure"],
)
def test_a_call_that_eager_refuses_writes_to_buffers_as_in_eager(norm, plain):
    module, eager = (nn.Sequential(each, nn.Linear(6, 3)) for each in (norm, plain))
    add_tvm_dispatch(module, on_miss="compile")
    for width in (6, 7, 6):
        for each in (module, eager):
            with pytest.raises(RuntimeError) if width == 7 else nullcontext():
                each(torch.randn(4, 3, width, generator=torch.Generator().manual_seed(width)))
    for ours, theirs in zip(module.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_modes_become_entries():
    torch.manual_seed(0)
    module = MLP(dropout=0.5)
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows(4), on_miss="compile")
    for context in (torch.no_grad(), torch.enable_grad(), torch.autocast(DEVICE.type, dtype=torch.bfloat16)):
        with context:
            torch.manual_seed(1)
            actual = module(rows(4))
            torch.manual_seed(1)
            expected = eager(rows(4))
        close = CLOSE if expected.dtype == torch.float32 else {"rtol": 0.03, "atol": 0.03}
        torch.testing.assert_close(actual, expected, **close)
        assert actual.requires_grad == expected.requires_grad
    module.eval(), eager.eval()
    check(module, eager, rows(4))
    assert len(stats(module).entries) == 4 and stats(module).hits == 4


@pytest.mark.composes(
    "a size that cannot vary and is another one at every call",
    "compiled for eight of them that did not come back, then eager, with a warning",
    section='`on_miss="compile"`',
)
def test_what_never_comes_back_is_compiled_for_a_few_times_only(caplog):
    """Other causes of misses are unaffected; old entries still serve; adding by hand starts the count anew."""
    module = OneSize()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows(1), on_miss="compile")
    with caplog.at_level(logging.WARNING, logger="bridge"):
        for length in range(2, MAX_WASTED + 12):
            check(module, eager, rows(length))
    assert stats(module).hits == MAX_WASTED and stats(module).misses.total() == 10
    assert sum("from now on" in record.getMessage() for record in warnings_of(caplog)) == 1
    (message,) = [each.getMessage() for each in warnings_of(caplog) if "from now on" in each.getMessage()]
    assert "shape of args[0]" in message and "pad or bucket" in message, message
    check(module, eager, rows(MAX_WASTED + 1))
    with torch.no_grad():
        check(module, eager, rows(MAX_WASTED + 1))
    assert stats(module).hits == MAX_WASTED + 2
    add_tvm_dispatch(module, rows(100), on_miss="compile")
    check(module, eager, rows(101))
    assert stats(module).misses.total() == 10


def test_sizes_that_come_back_but_are_too_many_are_bounded_too(monkeypatch):
    monkeypatch.setattr("bridge.dispatch.entries.MAX_COMPILED", 4)
    module = OneSize()
    add_tvm_dispatch(module, rows(1), on_miss="compile")
    for length in range(2, 9):
        for _ in range(2):
            module(rows(length))
    assert stats(module).misses.total() == 2 * 3 and stats(module).hits == 2 * 4


@pytest.mark.parametrize(
    ("added", "called", "words"),
    [
        (lambda module: module.eval(), lambda module: module.train(), "training flag.*module.train()"),
        (lambda module: module.train(), lambda module: module.eval(), "training flag.*module.eval()"),
    ],
)
def test_an_entry_that_no_call_ever_fits_is_told_once(added, called, words, caplog):
    module = add_tvm_dispatch(added(MLP()), rows(4))
    called(module)
    with caplog.at_level(logging.WARNING, logger="bridge"):
        for _ in range(MISSES_BEFORE_WARNING - 1):
            module(rows(4))
        assert not warnings_of(caplog)
        for _ in range(5):
            module(rows(4))
    (record,) = warnings_of(caplog)
    assert re.search(words, record.getMessage()), record.getMessage()


def test_what_helps_where_sizes_change_or_forward_is_replaced(caplog):
    def replaced(module):
        module.forward = torch.autocast("cpu", torch.bfloat16)(module.forward)

    for change, count, words in (
        (lambda module: None, 5, 'on_miss="compile", which serves lengths that vary'),
        (replaced, 4, "Accelerator.prepare"),
    ):
        module = add_tvm_dispatch(MLP(), rows(4))
        change(module)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="bridge"):
            for _ in range(MISSES_BEFORE_WARNING):
                module(rows(count))
        (record,) = warnings_of(caplog)
        assert words in record.getMessage(), record.getMessage()


@pytest.mark.parametrize(
    ("options", "words"),
    [({"num_items_in_batch": torch.tensor(3)}, "Trainer adds num_items_in_batch"), ({"other": 1}, "keyword arguments")],
)
def test_arguments_that_a_loop_adds_are_named(options, words, caplog):
    class Loss(nn.Module):
        def forward(self, x, **options):
            return torch.tanh(x)

    module = add_tvm_dispatch(Loss(), {"x": rows(4)})
    for _ in range(MISSES_BEFORE_WARNING):
        module(x=rows(4), **options)
    (record,) = warnings_of(caplog)
    assert words in record.getMessage(), record.getMessage()


def test_a_module_that_was_ever_hit_is_not_complained_about(caplog):
    module = add_tvm_dispatch(Scale(), rows(4))
    module(rows(4))
    for _ in range(2 * MISSES_BEFORE_WARNING):
        module(rows(5))
    assert not warnings_of(caplog)


class Cache(Scale):
    """Keeps a table for the latest length that it has met."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.table = kind, None

    def forward(self, x):
        if self.kind == "buffer" and "steps" not in self._buffers:
            self.register_buffer("steps", torch.arange(8.0), persistent=False)
        if self.kind == "attribute" and (self.table is None or len(self.table) != len(x)):
            self.table = torch.arange(len(x)).to(x).cos()
        steps = self.steps if self.kind == "buffer" else self.table
        return super().forward(x) * steps[: len(x), None]


@pytest.mark.parametrize("kind", ["buffer", "attribute"])
def test_what_the_first_call_keeps_on_the_module_is_there_for_the_second(kind, caplog):
    eager = Cache(kind).to(DEVICE)
    module = add_tvm_dispatch(copy.deepcopy(eager))
    for count in (4, 4, 4, 5, 5):
        check(module, eager, rows(count).to(DEVICE))
    assert stats(module).hits >= 3 and not any("runs eager" in each.message for each in warnings_of(caplog))


def test_a_cache_that_every_call_fills_anew_is_compiled_for_a_few_times_only(caplog):
    """An entry is for the table that forward found; calls of changing lengths have a new table each time."""
    eager = Cache("attribute").to(DEVICE)
    module = add_tvm_dispatch(copy.deepcopy(eager))
    for count in (4, 5) * 6:
        check(module, eager, rows(count).to(DEVICE))
    said = [each.message for each in warnings_of(caplog) if "runs eager from now on" in each.message]
    assert len(said) == 1 and "shape of attribute 'table'" in said[0] and "did not come back" in said[0]


class Counts(nn.Module):
    """A weight by a counter that Python reads."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        self.count += 1
        return self.linear(x) * min(1.0, int(self.count) / 100)


def test_a_number_that_each_call_changes_is_told_with_what_helps(caplog):
    eager = Counts().to(DEVICE)
    module = add_tvm_dispatch(copy.deepcopy(eager))
    for _ in range(12):
        check(module, eager, rows(4).to(DEVICE))
    (said,) = [each.message for each in warnings_of(caplog) if "runs eager from now on" in each.message]
    assert "compute with the tensor, not with its number" in said and "on_miss=" not in said
    assert stats(module).misses


def test_a_sample_does_not_fill_a_cache():
    module = Cache("buffer").to(DEVICE)
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows(4).to(DEVICE))
    assert "steps" not in module._buffers
    for _ in range(3):
        check(module, eager, rows(4).to(DEVICE))
    assert stats(module).hits == 2


def test_what_cannot_be_compiled_runs_eager_and_is_not_tried_again(caplog):
    class Either(nn.Module):
        def forward(self, x):
            return torch.tanh(x) if x.shape[0] < 6 else x * (x.T @ x).to_sparse().to_dense().sum(0)

    module = Either()
    add_tvm_dispatch(module, rows(4), on_miss="compile")
    with caplog.at_level(logging.WARNING, logger="bridge"):
        for _ in range(3):
            torch.testing.assert_close(module(rows(9)), Either()(rows(9)), rtol=0, atol=0)
    (record,) = warnings_of(caplog)
    assert "_to_sparse" in record.getMessage() and "(9, 6)" in record.getMessage()
    assert sum(stats(module).misses.values()) == 3
    assert len(stats(module).entries) == 1
    module(rows(4))
    assert stats(module).hits == 1


class Distinct(Scale):
    """In evaluation, a result whose size the numbers of a parameter decide."""

    def forward(self, x, power: int = 1):
        scaled = super().forward(x, power)
        return scaled if self.training else torch.unique(scaled)


class PassThrough(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("around", [PassThrough, nullcontext], ids=["in a dispatch mode", "refused"])
def test_a_first_call_of_another_kind_says_nothing_about_the_next(around):
    module = add_tvm_dispatch(Distinct())
    with around():
        module.train(around is PassThrough)(rows(3))
    module.train()(rows(3))
    ((reason, count),) = stats(module).misses.items()
    kind = "training, grad mode, torch dispatch mode" if around is PassThrough else "evaluation, grad mode"
    assert stats(module).hits == count == 1 and reason == f"no entry: {kind}, args[0] a Tensor"


def test_a_call_that_eager_refuses_raises_eagers_error():
    module = MLP()
    add_tvm_dispatch(module, rows(4), on_miss="compile")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        module(torch.randn(7, 5))
    with pytest.raises(TypeError):
        module()
    module(rows(4))
    assert stats(module).hits == 1 and len(stats(module).entries) == 1


def test_error_names_the_reason_and_leaves_the_module_usable():
    module = Scale()
    add_tvm_dispatch(module, rows(4), on_miss="error")
    with pytest.raises(DispatchMiss, match=r"shape of args\[0\]: compiled for \(4, 6\), called with \(5, 6\)"):
        module(rows(5))
    module(rows(4))
    assert stats(module).hits == 1 and not stats(module).misses


def test_stats_print_a_few_of_many_reasons():
    module = add_tvm_dispatch(MLP(), rows(2))
    for count in range(3, 33):
        module(rows(count))
    printed = repr(stats(module))
    assert "misses=30" in printed and "10 x 10 other reasons" in printed and 20 < len(printed.splitlines()) < 30


def test_the_reasons_that_are_kept_are_bounded(monkeypatch):
    monkeypatch.setattr("bridge.dispatch.entries.MAX_REASONS", 3)
    module = add_tvm_dispatch(Scale(), rows(2))
    for count in (3, 4, 5, 6, 3, 7):
        module(rows(count))
    assert list(stats(module).misses.values()) == [2, 1, 1, 2] and stats(module).misses["another reason"] == 2
