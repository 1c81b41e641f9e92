"""Dynamic entries: the bound call of each size equals eager's, is kept for the next call, and bounded in number.

The sizes of the sample are made symbols of a captured call here, and the programs of each size are compiled for it, so
that the test is of guards, draws, results and the cache of bound calls.
"""

import copy
import gc
import tracemalloc
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autodiff.extents import ExtentScope
from bridge import add_tvm_dispatch, explain, stats
from bridge.base.torch_internals import COMPILED_CALL
from bridge.capture import one_capture_at_a_time
from bridge.compile import backend_for
from bridge.dispatch import entry as bound_module
from bridge.dispatch.call_run import CallValues
from bridge.dispatch.call_steps import plan_call
from bridge.dispatch.entry import Entry, EntryOptions
from bridge.dispatch.guards import EntryGuard
from bridge.dispatch.programs import Programs, compile_programs
from bridge.lowering import lower_once
from bridge.state import SampleCall
from tests.bridge.compare import Call, assert_same, run
from tests.device import DEVICE
from tests.threads import together

pytestmark = pytest.mark.usefixtures("lowered_once")

BATCH, LENGTH = 13, 11


class Net(nn.Module):
    """Draws, returns views, other strides, an input, a number that is a size."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.register_buffer("total", torch.zeros(6))

    def forward(self, x, mask):
        h = F.dropout(torch.tanh(self.linear(x)), 0.3) * mask[:, :, None]
        with torch.no_grad():
            self.total += h.sum((0, 1))
        noise = torch.rand(x.shape[0], x.shape[1])
        return {"h": h, "t": (2 * h).transpose(0, 1), "flat": h.view(-1, 6), "x": x, "rows": x.shape[0], "n": noise}


def call_of(batch: int, length: int) -> Call:
    made = torch.Generator().manual_seed(batch * 1000 + length)
    x = torch.randn(batch, length, 4, generator=made, dtype=torch.float64)
    return Call((x.requires_grad_(), torch.rand(batch, length, generator=made, dtype=torch.float64)))


def symbolic(value, extents: dict[int, object]):
    """A value with extents for the sample's sizes and multiples of them, which no other number is."""
    if isinstance(value, tuple | list):
        return type(value)(symbolic(part, extents) for part in value)
    if type(value) is int and value:
        for size, extent in extents.items():
            if value % size == 0:
                return symbolic(value // size, extents) * extent
    return value


@pytest.fixture
def dispatched(monkeypatch):
    """``(eager, dispatched)``: copies of a module whose one entry takes any batch, and lengths up to 40."""
    torch.manual_seed(0)
    eager = Net().double()
    module = copy.deepcopy(eager)
    sample = call_of(BATCH, LENGTH)
    backend = backend_for(DEVICE)
    lowered = lower_once(SampleCall(module, sample.args, {}), "min_cut")
    captured, scope = lowered.captured, ExtentScope()
    extents = {BATCH: scope.symbol("batch", BATCH), LENGTH: scope.symbol("length", LENGTH, high=40)}

    def with_extents(each):
        names = [name for name in ("shape", "stride", "offset", "value", "args") if hasattr(each, name)]
        made = {name: symbolic(getattr(each, name), extents) for name in names}
        operand = getattr(each, "operand", None)  # of a GPU's dropout
        return replace(each, **made, **({} if operand is None else {"operand": with_extents(operand)}))

    observation = copy.copy(captured.observation)
    observation.outputs = [with_extents(each) for each in observation.outputs]
    observation.draws = [with_extents(each) for each in observation.draws]
    varying = replace(
        captured,
        observation=observation,
        sizes=captured.sizes._replace(
            scope=scope,
            shapes=tuple(symbolic(tuple(each.shape), extents) for each in captured.given.tensors),
            strides=tuple(symbolic(each.stride(), extents) for each in captured.given.tensors),
        ),
    )

    def programs_of(programs: Programs, sizes: dict[str, int]) -> Programs:
        call = call_of(sizes["batch"], sizes["length"])
        with one_capture_at_a_time():
            found = compile_programs(lower_once(SampleCall(eager, call.args, {}), "min_cut"), backend)
        found.sizes = sizes
        return found

    monkeypatch.setattr(Programs, "at", programs_of)
    add_tvm_dispatch(module)
    dispatcher = module.__dict__[COMPILED_CALL]
    dispatcher.learns = False
    dispatcher.take(replace(dispatcher.options, on_miss="eager"))
    guard = EntryGuard(module, varying, sample.args)
    programs = compile_programs(lowered, backend)
    options = EntryOptions("min_cut", backend)
    dispatcher.entries.add(Entry(guard, replace(lowered, captured=varying), programs, options))
    return eager, module


def test_calls_of_any_size_are_eagers(dispatched):
    eager, module = dispatched
    sizes = [(2, 2), (13, 11), (5, 7), (3, 40), (5, 7), (17, 2), (2, 2)]
    for step, size in enumerate(sizes):
        assert_same(run(module, call_of(*size), seed=step), run(eager, call_of(*size), seed=step))
    assert stats(module).hits == len(sizes) and not stats(module).misses
    (entry,) = stats(module).entries
    assert "float64[batch, length, 4]" in repr(entry) and "7 hits, 5 sizes" in repr(entry)
    assert [tuple(each.values()) for each in entry.bound.sizes] == [(13, 11), (3, 40), (5, 7), (17, 2), (2, 2)]


def test_results_are_strided_and_aliased_as_eagers(dispatched):
    eager, module = dispatched
    for size in [(5, 7), (2, 3)]:
        ours, theirs = call_of(*size), call_of(*size)
        got, want = module(*ours.args), eager(*theirs.args)
        assert [got[name].stride() for name in "ht"] == [want[name].stride() for name in "ht"]
        assert got["x"] is ours.args[0] and got["rows"] == size[0]
        assert got["flat"].data_ptr() == got["h"].data_ptr()


def test_a_size_outside_of_the_range_runs_eager_and_says_why(dispatched):
    eager, module = dispatched
    for size in [(1, 5), (5, 41)]:
        assert_same(run(module, call_of(*size)), run(eager, call_of(*size)))
    reasons = [
        "shape of args[0]: dimension 0 (batch) is 1, compiled for 2 <= batch",
        "shape of args[0]: dimension 1 (length) is 41, compiled for 2 <= length <= 40",
    ]
    assert list(stats(module).misses) == reasons and stats(module).hits == 0


def test_steps_print_the_extents(dispatched):
    (entry,) = stats(dispatched[1]).entries
    text = "\n".join(map(str, entry.steps))
    assert "of batchxlengthx6" in text and "view (batch*length, 6) of result 0" in text


def test_explain_tells_symbols_ranges_conclusions_and_bound_sizes(dispatched):
    _, module = dispatched
    (entry,) = stats(module).entries
    assert entry.lowered.captured.sizes.scope.guards == ()
    for size in [(5, 7), (2, 3)]:
        module(*call_of(*size).args)
    text = str(explain(module, full=True))
    assert "x: float64[batch, length, 4], strides (4*length, 4, 1), requires grad" in text
    assert [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith("  sizes ")] == [
        "batch: dimension 0 of args[0], 2 <= batch, 13 in the sample",
        "length: dimension 1 of args[0], 2 <= length <= 40, 11 in the sample",
        "bound for batch = 2, length = 3",
        "bound for batch = 5, length = 7",
    ]


def test_a_size_that_cannot_be_bound_is_eagers(dispatched, monkeypatch):
    eager, module = dispatched

    def refuse(programs, sizes):
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(Programs, "at", refuse)
    assert_same(run(module, call_of(5, 7)), run(eager, call_of(5, 7)))
    reason = "error in binding sizes: batch = 5, length = 7: NotImplementedError: no kernel"
    assert dict(stats(module).misses) == {reason: 1} and stats(module).hits == 0


def test_what_is_kept_is_bounded(dispatched, monkeypatch):
    _, module = dispatched
    (entry,) = stats(module).entries
    first = entry.bound.of(inputs_of(entry, module, 2, 2))
    assert entry.bound.of(inputs_of(entry, module, 2, 2)) is first
    monkeypatch.setattr(Programs, "at", lambda programs, sizes: first.programs)
    tracemalloc.start()
    for batch in range(3, 303):
        entry.bound.of(inputs_of(entry, module, batch, 2))
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    for batch in range(303, 603):
        entry.bound.of(inputs_of(entry, module, batch, 2))
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert bound_module.MAX_BOUND * 0.9 < len(entry.bound) <= bound_module.MAX_BOUND
    assert grown < before / 3  # 300 more would be as much again, or twice
    assert entry.bound.of(inputs_of(entry, module, 2, 2)) is not first


def inputs_of(entry, module, batch, length):
    call = CallValues()
    call.inputs = entry.guard.match(SampleCall(module, call_of(batch, length).args, {}))
    return call


@pytest.mark.parametrize("sizes", [(BATCH, LENGTH), (2, 3), (5, 2)])
def test_the_steps_at_other_sizes_are_as_planned_for_them(dispatched, sizes):
    _, module = dispatched
    (entry,) = stats(module).entries
    sizes = dict(zip(("batch", "length"), sizes, strict=True))
    anew = plan_call(entry.lowered, entry.programs, entry.guard, entry.bound._observed(sizes))
    assert [*map(str, entry.bound._planned(sizes))] == [*map(str, anew)]


def test_a_backward_outlives_what_was_kept(dispatched):
    eager, module = dispatched
    (entry,) = stats(module).entries
    ours, theirs = call_of(5, 7), call_of(5, 7)
    torch.manual_seed(1)
    result = module(*ours.args)["h"]
    for size in [(3, 3), (4, 4)]:
        module(*call_of(*size).args)
    entry.bound.clear()
    gc.collect()
    result.sum().backward()
    torch.manual_seed(1)
    eager(*theirs.args)["h"].sum().backward()
    torch.testing.assert_close(ours.args[0].grad, theirs.args[0].grad, rtol=1e-10, atol=1e-12)


def test_threads_share_what_is_kept(dispatched):
    eager, module = dispatched
    wanted = {size: eager.linear(call_of(*size).args[0]).tanh() for size in [(2, 3), (4, 5), (6, 7)]}
    wrong = []

    def work(turn: int) -> None:
        for step in range(9):
            size = [*wanted][(step + turn) % 3]
            x, mask = call_of(*size).args
            found = module(x, mask)["h"]
            kept = found != 0
            if not torch.allclose(found[kept], (wanted[size] * mask[:, :, None] / 0.7)[kept], rtol=1e-10):
                wrong.append(size)

    together(*(partial(work, turn) for turn in range(4)))
    (entry,) = stats(module).entries
    assert not wrong and len(entry.bound) == 3 and entry.hits == 36
