"""Piecewise graphs without a GPU: captured launches, and reads and writes of the calls between at a replay."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest
import torch
from tvm import relax
from tvm.relax import TensorType, TupleGetItem, TupleType
from tvm.relax import op as R

from autodiff.ir import StringImm
from autodiff.library import GENERATOR_STATE, call
from bridge.base.devices import HOST
from bridge.compile.cuda.piecewise import (
    PiecewiseExecutor,
    PiecewiseGraphs,
    _Between,
    _ones,
    inside_of_loops,
    is_between,
)
from bridge.compile.graphs.control import RecordedGraphs
from bridge.compile.graphs.executor import GraphedExecutor
from bridge.compile.runtime.instructions import CallLibrary
from bridge.compile.runtime.layout import ArenaPool
from tests.bridge.compile.host_recorder import HostMemory, HostRecorder, alias, memories
from tests.bridge.compile_helpers import program

SHAPE, SWAPPED = (1, 2, 4, 8), (1, 4, 2, 8)


def states():
    return [torch.tensor([seed, 8], dtype=torch.uint64) for seed in (3, 4)]


def dropping(emit, q, k, v, state):
    """The results of attention with dropout, by the CPU's formula."""
    numbers = [relax.prim_value(value) for value in (0, 0, 0.3, 0.5, 8)]
    types = TupleType([TensorType(SWAPPED, "float32"), TensorType((1, 2, 32), "float32")])
    pair = emit(call("dropping_attention", [StringImm("efficient"), q, k, v, *numbers, state], types))
    return emit(TupleGetItem(pair, 0)), emit(TupleGetItem(pair, 1))


def again(emit, grad_out, q, k, v, out, sums, state):
    """The first result of the backward of attention with dropout: the gradient of the queries."""
    numbers = [relax.prim_value(value) for value in (0, 0, 0.3, 0.5, 8)]
    given = [StringImm("efficient"), grad_out, q, k, v, out, sums, *numbers, state]
    made = emit(call("dropping_attention_backward", given, TupleType([TensorType(SWAPPED, "float32")] * 3)))
    return emit(R.permute_dims(emit(TupleGetItem(made, 0)), [0, 2, 1, 3]))


def body(emit, x, w, first, second):
    """Two attentions, the second of the first one's result, and the backward of one; one result is the program's."""
    y = emit(R.matmul(x, w))
    one, sums = dropping(emit, y, x, x, first)
    z = emit(R.nn.softmax(emit(R.reshape(one, SHAPE))))
    other, _ = dropping(emit, z, y, x, second)
    dq = again(emit, other, z, y, x, other, sums, second)
    return [z, emit(R.exp(other)), sums, second, emit(R.add(dq, x))]


@pytest.fixture(scope="module")
def compiled():
    return program([(SHAPE, "float32"), ((8, 8), "float32"), GENERATOR_STATE, GENERATOR_STATE], body)


class _Logged:
    """Actions of one graph with the registers that each found; replaying repeats them in the recorded memory."""

    is_empty = False

    def __init__(self):
        self.log = []

    def replay(self, _given):
        for action, before, after in self.log:
            registers = list(before)
            action(registers)
            for now, then in zip(registers, after, strict=True):
                if isinstance(now, torch.Tensor) and now is not then:
                    then.copy_(now)


class _Executor(PiecewiseExecutor):
    """Actions are logged; inputs are known by their addresses alone."""

    def __init__(self, program):
        super().__init__(program, HOST, ArenaPool())
        self.graphs = []
        self.actions = tuple((self._logging(action), last) for action, last in self.actions)

    def _logging(self, action):
        def act(registers):
            before = list(registers)
            action(registers)
            self.graphs[-1].log.append((action, before, list(registers)))

        return act

    def _load(self, registers, inputs):
        super()._load(registers, [each if each.dtype is torch.uint64 else alias(each) for each in inputs])

    @contextmanager
    def capture(self):
        self.graphs.append(_Logged())
        yield [self.graphs[-1]]


def recorded(compiled, inputs, fresh, copies=()):
    execute = _Executor(compiled)
    pieces = PiecewiseGraphs(execute.capture, lambda graph: graph.replay)
    copies = [(place, alias(memory)) for place, memory in copies]
    with pieces, execute.recorded_by(pieces, taken, copies), torch.no_grad():
        results = execute(inputs, fresh=list(map(alias, fresh)))
    return pieces.parts, execute, results


def taken(form):
    """Memory for the result of a call between graphs."""
    shape, strides, dtype = form
    return torch.empty_strided(shape, strides, dtype=dtype)


@pytest.mark.parametrize("found", [float("nan"), -1.0, 7.0])
def test_a_draw_is_recorded_whatever_lies_where_its_parameters_will(found):
    """A probability out of range would make the GPU's context unusable."""
    description = {"args": [{"$tensor": 0, "stride": [8, 1], "dtype": "float32"}], "kwargs": {}, "result": None}
    name = [StringImm("aten.bernoulli.default"), StringImm(json.dumps(description)), relax.prim_value(4)]

    def body(emit, x, state):
        drawn = emit(call("draw_at_offset", [*name, state, emit(R.sigmoid(x))], TensorType((4, 8), "float32")))
        return [emit(R.add(drawn, x))]

    made = program([((4, 8), "float32"), GENERATOR_STATE], body)
    (step,) = [each for each in made.steps if is_between(each)]
    drawing = _Between(step, {}, {0: 0, 1: 1}, {})
    registers = [torch.full((4, 8), found) for _ in range(made.layout.size)]
    state, registers[1] = states()[0], None
    replay = drawing.record(registers, {1: state}, {}, taken)
    (slot,) = step.writes
    assert registers[slot] is drawing.memory[slot] and registers[slot].shape == (4, 8)
    parameter = registers[next(each for each in step.reads if each != 1)]
    for rate in (0.0, 1.0):
        parameter.fill_(rate)
        replay([torch.zeros(4, 8), state])
        assert registers[slot].eq(rate).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[:1].expand(5, -1), lambda x: x.t()[1:], lambda x: x[:0]])
def test_ones_lie_as_what_they_stand_for(dtype, view):
    tensor = view(torch.zeros(4, 6, dtype=dtype))
    made = _ones(tensor)
    assert (made.shape, made.stride(), made.dtype) == (tensor.shape, tensor.stride(), dtype) and bool(made.all())


@pytest.mark.parametrize("is_callers", [False, True])
def test_graphs_and_calls_take_turns_and_find_what_the_others_wrote(compiled, is_callers):
    """With results, of the calls between and of the run, in the caller's memory or in the recording's."""
    layout = compiled.layout
    fresh = [torch.empty(made.shape, dtype=made.torch_dtype) for made in layout.fresh]
    x, w = torch.randn(SHAPE), torch.randn(8, 8)
    copied = [torch.empty(1, 2, 32)] if is_callers else []
    parts, _, results = recorded(compiled, [x, w, *states()], fresh, [(2, each) for each in copied])
    kinds = ["graph" if "_Logged" in part.__qualname__ else part.__name__ for part in parts]
    assert kinds == ["_bring", "graph", "replay", "graph", "replay", "graph"]
    for seed in range(4):
        x.normal_(), w.normal_()  # where the recording looks for them
        given = [x, w, *(torch.tensor([seed + place, 4], dtype=torch.uint64) for place in range(2))]
        wanted = compiled(list(given))
        for part in parts:
            part([*given, *fresh, *copied])
        assert not copied or torch.equal(copied[0], wanted[2])
        for slot, ours, theirs in zip(layout.memory, results, wanted, strict=True):
            if slot >= len(layout.params):
                assert torch.equal(ours, theirs)


def test_an_input_between_is_the_calls_own_and_aligned(compiled):
    """A replay reads the call's tensors, not the recording's."""
    fresh = [torch.empty(made.shape, dtype=made.torch_dtype) for made in compiled.layout.fresh]
    x, w = torch.randn(SHAPE), torch.randn(8, 8)
    parts, _, results = recorded(compiled, [x, w, *states()], fresh)
    moved = torch.empty(x.numel() + 1)[1:].view(SHAPE).copy_(x)
    for part in parts:
        part([moved, w, *states(), *fresh])
    for ours, theirs in zip(results[:3], compiled([x, w, *states()]), strict=False):
        assert torch.equal(ours, theirs)


def test_a_failure_between_ends_the_recording(compiled):
    fresh = [torch.empty(made.shape, dtype=made.torch_dtype) for made in compiled.layout.fresh]
    open_captures = []

    class Failing(_Executor):
        @contextmanager
        def capture(self):
            open_captures.append(1)
            try:
                with super().capture() as made:
                    yield made
            finally:
                open_captures.pop()

    execute = Failing(compiled)
    pieces = PiecewiseGraphs(execute.capture, lambda graph: graph.replay)
    wrong = torch.zeros(1, dtype=torch.uint64)
    with pytest.raises(ValueError, match="shape"), pieces, execute.recorded_by(pieces, taken):
        execute([torch.randn(SHAPE), torch.randn(8, 8), wrong, wrong], fresh=fresh)
    assert not open_captures and not pieces.parts[1:]  # no graph; states would be brought


def test_states_on_the_host_are_in_no_key(compiled):
    """New states at every call, at any address, and no new recordings."""
    recorder, control = HostRecorder(compiled), RecordedGraphs(True)
    run = GraphedExecutor(compiled, compiled.executor, recorder, control, memories(HostMemory(), HostMemory(), 2))
    x, w, kept = torch.randn(SHAPE), torch.randn(8, 8), []
    for seed in range(20):
        x.normal_()
        kept.append([torch.tensor([seed + place, 4], dtype=torch.uint64) for place in range(2)])
        for ours, theirs in zip(run([x, w, *kept[-1]]), compiled([x, w, *kept[-1]]), strict=True):
            assert torch.equal(ours, theirs)
    assert recorder.recorded <= 2 and control.replays > 12 and not run.held_bytes  # a result is kept from call to call


def test_which_steps_are_between(compiled):
    calls = [step for step in compiled.steps if isinstance(step, CallLibrary)]
    assert [step.name for step in calls if is_between(step)] == ["dropping_attention"] * 2
    assert "dropping_attention_backward" in [step.name for step in calls]
    assert not list(inside_of_loops(compiled.steps))
