"""Second-stream scheduling: steps off the critical path, their waits; each order that respects the waits is right."""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from tvm.relax import op as R

from autodiff.extents import ExtentScope
from autodiff.ir import Function
from autodiff.library import GENERATOR_STATE
from bridge import lower
from bridge.base.devices import HOST
from bridge.compile import CompileOptions, Launch, MakeView, backend_for, compile_function, cut
from bridge.compile.cuda.executor import Crossings, SecondStream, memory_of
from bridge.compile.cuda.piecewise import PiecewiseExecutor, PiecewiseGraphs, is_between
from bridge.compile.runtime.cut import Liveness
from bridge.compile.runtime.layout import ArenaPool
from bridge.compile.runtime.second_stream import SecondStreamPlan, lasting, second_stream_steps
from tests.bridge.compile.host_recorder import alias
from tests.bridge.compile.random_functions import build, draw, sample
from tests.bridge.compile.test_cuda_programs import CASES as MODULES
from tests.bridge.compile.test_cuda_programs import lowered_case
from tests.bridge.compile.test_piecewise import SHAPE, dropping, states, taken
from tests.bridge.compile_helpers import function
from tests.bridge.models import bert_layer
from tests.sampling import sampled


def compiled(func: Function, streams: int = 2):
    backend = backend_for(None)
    backend = replace(backend, limits=backend.limits.having(streams=streams))
    return compile_function(func, name="test", options=CompileOptions.current(backend))


class Queues:
    """Two streams on the host: launches, to be run in any order that marks and waits allow."""

    def __init__(self):
        self.launched = [], []
        self.current = 0

    @contextmanager
    def beside(self):
        self.current = 1
        yield
        self.current = 0

    def mark(self, stream):
        assert stream == self.current
        return stream, len(self.launched[stream])

    def wait(self, stream, mark):
        assert stream == self.current
        self.launched[stream].append(mark)

    def run(self, choose, waits=True):
        """Runs all launches; ``choose`` picks the next one's stream among the streams that need not wait."""
        done = [0, 0]
        while ready := [s for s in (0, 1) if done[s] < len(self.launched[s]) and self._may_run(s, done, waits)]:
            stream = choose(ready)
            work = self.launched[stream][done[stream]]
            done[stream] += 1
            if callable(work):
                work()
        assert done == list(map(len, self.launched))

    def _may_run(self, stream, done, waits):
        work = self.launched[stream][done[stream]]
        return callable(work) or not waits or done[work[0]] >= work[1]


class Played:
    """The replay of a piecewise graph: its queues, run in an order."""

    is_empty = False

    def __init__(self, queues, choose, waits):
        self.replay = lambda _given: queues.run(choose, waits)


class Recorded(PiecewiseExecutor):
    """Steps are launched on queues, new ones for each piece, with the registers that each found."""

    def __init__(self, program):
        super().__init__(program, HOST, ArenaPool())
        self.queues = Queues()
        self.actions = tuple(
            (self._queued(action, step), last) for (action, last), step in zip(self.actions, self.steps, strict=True)
        )

    def _queued(self, action, step):
        def act(registers):
            if isinstance(step, MakeView):
                return action(registers)
            before = list(registers)
            action(registers)
            after = [registers[slot] for slot in step.writes]

            def again():
                now = list(before)
                action(now)
                for slot, then in zip(step.writes, after, strict=True):
                    if now[slot] is not then:  # a library call allocated it
                        then.copy_(now[slot])

            self.queues.launched[self.queues.current].append(again)

        return act

    def _load(self, registers, inputs):
        given = [each if each.dtype is torch.uint64 else alias(each) for each in inputs]
        super()._load(registers, given)
        for slot, each in enumerate(given):
            if slot not in self._on_host and registers[slot] is not each:
                self.queues.launched[0].append(partial(registers[slot].copy_, each))


def record(program, inputs, choose, waits):
    """The parts of a recorded run, its results and the memory that they lie in."""
    execute = Recorded(program)
    fresh = [torch.empty(made.shape, dtype=made.torch_dtype) for made in program.layout.fresh]
    branches = SecondStream(
        second_stream_steps(program.steps, program.layout.views).spans,
        lambda: execute.queues.beside(),
        lambda stream: execute.queues.mark(stream),
        lambda stream, mark: execute.queues.wait(stream, mark),
    )

    @contextmanager
    def capture():
        execute.queues = Queues()
        yield [Played(execute.queues, choose, waits)]

    pieces = PiecewiseGraphs(capture, lambda graph: graph.replay)
    with pieces, execute.recorded_by(pieces, taken, (), branches), torch.no_grad():
        results = execute(inputs, fresh=list(map(alias, fresh)))
    return pieces.parts, results, fresh, execute


ORDERS = {"the path first": min, "beside first": max, "by chance": random.Random(0).choice}


def agree(program, inputs, choose, waits=True):
    """Whether a run in an order has the bits of a serial run, on other numbers than the recording's."""
    parts, results, fresh, execute = record(program, inputs, choose, waits)
    for each in inputs:
        if each.is_floating_point():
            each.uniform_(0.5, 1.5)
    wanted = program(list(inputs))
    for part in parts:
        part([*inputs, *fresh])
    same = [torch.equal(ours, theirs) for ours, theirs in zip(results, wanted, strict=True)]
    del fresh, execute  # results lie in the one's memory, steps work in the other's
    return all(same)


@cache
def backward(streams=2):
    torch.manual_seed(0)
    lowered = lower(bert_layer().train(), torch.randn(3, 17, 24).requires_grad_())
    return compiled(lowered.expected_backward, streams)


def inputs_of(program):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.rand(each.shape, generator=generator).to(each.torch_dtype)
        if each.torch_dtype.is_floating_point
        else torch.ones(each.shape, dtype=each.torch_dtype)
        for each in program.layout.params
    ]


@pytest.mark.parametrize("order", ORDERS)
def test_a_backward_has_the_same_bits_in_any_order_that_is_allowed(order):
    program = backward()
    assert len(second_stream_steps(program.steps, program.layout.views).spans) > 3
    assert agree(program, inputs_of(program), ORDERS[order])


@cache
def programs_of(name):
    """A module's forward and backward."""
    lowered = lowered_case(name)
    return compiled(lowered.forward), compiled(lowered.expected_backward)


def lying_elsewhere(tensor, place):
    """Tensors of equal numbers: unchanged, not dense, or misaligned."""
    if place % 3 == 0 or tensor.dtype is torch.uint64:
        return tensor
    if place % 3 == 1:
        return tensor.mT.contiguous().mT if tensor.ndim > 1 else torch.stack([tensor, tensor], -1)[..., 0]
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


@pytest.mark.parametrize("name", sampled(MODULES, lambda name: not name.startswith("GPT-2")))
def test_programs_of_modules_with_inputs_that_lie_anywhere(name):
    for program in programs_of(name):
        inputs = [lying_elsewhere(each, place) for place, each in enumerate(inputs_of(program))]
        for choose in ORDERS.values():
            assert agree(program, list(inputs), choose), program.name


@pytest.mark.parametrize("order", ORDERS)
def test_so_have_the_parts_of_one_that_is_cut(order):
    program = backward()
    places = sorted(random.Random(3).sample(list(Liveness(program).boundaries), 2))
    for segment in cut(program, places, "part"):
        if segment.program is not None:
            assert agree(segment.program, inputs_of(segment.program), ORDERS[order])


def test_without_waits_it_has_not():
    """Asserts that the tests above can fail."""
    program = backward()
    orders = [min, max, *(random.Random(seed).choice for seed in range(8))]
    assert not all(agree(program, inputs_of(program), choose, waits=False) for choose in orders)


@pytest.mark.parametrize("seed", sampled(range(30), range(10)))
def test_random_functions(seed):
    inputs, instructions = draw(seed, 24)
    last = len(inputs) + len(instructions)
    program = compiled(build(inputs, instructions, "float32", range(last - 6, last)))
    for choose in (min, max, random.Random(seed).choice):
        assert agree(program, sample(inputs, torch.float32, seed), choose)


def test_arenas_of_one_stream_are_as_they_were():
    one, two = backward(streams=1), backward()
    assert one.steps == two.steps and one.arena_bytes <= two.arena_bytes < 2 * one.arena_bytes


def products(count, rows=64):
    """A chain of products, each with a dependent one that no other step waits for."""

    def body(emit, x, w):
        found = []
        for _ in range(count):
            found.append(emit(R.matmul(emit(R.permute_dims(x, [1, 0])), x)))
            x = emit(R.matmul(x, w))
        return [*found, x]

    return compiled(function([((rows, 64), "float32"), ((64, 64), "float32")], body))


def test_what_hangs_on_a_chain_is_beside_it():
    program = products(4)
    beside = second_stream_steps(program.steps, program.layout.views).spans
    hanging = {step.writes[0] for index, step in enumerate(program.steps) if index in beside}
    assert hanging == set(program.layout.memory[:4])


@pytest.mark.parametrize("order", ORDERS)
def test_a_call_between_graphs_reads_what_steps_beside_have_written(order):
    def body(emit, x, w, first, second):
        heads = [emit(R.matmul(emit(bent(x)), w)) for bent in (R.exp, R.tanh, R.sin)]
        one, _ = dropping(emit, *heads, first)
        hanging = [emit(R.matmul(emit(R.permute_dims(each, [0, 1, 3, 2])), each)) for each in heads]
        y = emit(R.nn.softmax(emit(R.reshape(one, SHAPE))))
        for _ in range(3):
            y = emit(R.matmul(y, w))
        other, _ = dropping(emit, y, *heads[1:], second)
        return [emit(R.exp(other)), *hanging, y]

    program = compiled(function([(SHAPE, "float32"), ((8, 8), "float32"), GENERATOR_STATE, GENERATOR_STATE], body))
    beside = second_stream_steps(program.steps, program.layout.views).spans
    calls = [index for index, step in enumerate(program.steps) if is_between(step)]
    assert len(calls) == 2 and min(beside) < calls[0] < max(beside)
    assert agree(program, [torch.rand(SHAPE), torch.rand(8, 8), *states()], ORDERS[order])


@pytest.mark.parametrize("order", ORDERS)
def test_steps_beside_wait_for_copies_of_inputs(order):
    """Inputs that are not dense, or misaligned for kernels, are copied first."""

    def body(emit, x, y, w):
        hanging = [emit(R.matmul(each, emit(R.permute_dims(each, [1, 0])))) for each in (x, y)]
        for _ in range(4):
            x = emit(R.matmul(emit(R.exp(x)), w))
        return [*hanging, x]

    program = compiled(function([((64, 64), "float32")] * 3, body))
    assert second_stream_steps(program.steps, program.layout.views).spans
    inputs = torch.rand(64, 64).t(), torch.rand(64 * 64 + 1)[1:].view(64, 64), torch.rand(64, 64)
    assert agree(program, list(inputs), ORDERS[order])


@pytest.mark.parametrize("size", [2, 5, 48, 200])
def test_sizes_that_vary(size):
    program = products(4, ExtentScope().symbol("n", 48)).at({"n": size})
    assert second_stream_steps(program.steps, program.layout.views).spans
    for choose in ORDERS.values():
        assert agree(program, inputs_of(program), choose)


def test_what_a_program_knows_is_what_its_steps_say():
    """For a compiled program, its segments, and a program for all sizes."""
    whole = products(4)
    parts = cut(whole, [len(whole.steps) // 2], "part")
    of_sizes = products(4, ExtentScope().symbol("n", 48))
    bound = of_sizes.at({"n": 5})
    for program in (whole, of_sizes, bound, *(part.program for part in parts)):
        assert program.beside == second_stream_steps(program.steps, program.layout.views)
    assert bound.beside is of_sizes.beside and of_sizes.beside.spans


def test_a_chain_alone_has_nothing_beside_it():
    def body(emit, x, w):
        for _ in range(5):
            x = emit(R.matmul(emit(R.exp(x)), w))
        return [x]

    program = compiled(function([((64, 64), "float32"), ((64, 64), "float32")], body))
    assert not second_stream_steps(program.steps, program.layout.views).spans
    assert not second_stream_steps((), ()).spans


def test_little_work_stays_in_one_row():
    program = products(1)
    assert not second_stream_steps(program.steps, program.layout.views).spans


def test_lifetimes_are_as_long_as_what_runs_beside():
    lives = {"read": (0, 2), "made": (2, 2), "other": (1, 1)}
    steps = [MakeView("as_strided", (), (), (), (), (), (), 0)] * 2
    steps += [Launch("k", (), (), (), reads=(0, 2), writes=(1,))]
    assert lasting(lives, steps, SecondStreamPlan({2: (1, 5)}), ["read", "made", "a parameter"].__getitem__) == {
        "read": (0, 5),
        "made": (1, 5),
        "other": (1, 1),
    }


def test_crossings():
    """A step waits once, for the other stream's last step that conflicts; two reads of the same memory do not."""
    crossings = Crossings()
    crossings.add(0, [(0, 8)], [(8, 16)])
    assert crossings.before(1, [(0, 8)], [(32, 40)]) is None  # both read
    crossings.add(1, [(0, 8)], [(32, 40)])
    assert crossings.before(1, [(15, 20)], [(40, 48)]) == 0  # read after write
    crossings.add(1, [(15, 20)], [(40, 48)])
    assert crossings.before(1, [(8, 9)], [(48, 56)]) is None  # it has waited
    assert crossings.before(0, [], [(7, 9)]) == 1 - 1  # write after read
    crossings.add(0, [], [(7, 9)])
    assert crossings.before(0, [], [(36, 44)]) == 1  # write after write
    assert crossings.before(0, [], [(32, 44)]) is None


def test_memory_of_views_and_of_nothing():
    x = torch.zeros(4, 6)
    begin = x.data_ptr()
    assert memory_of([x, x.t(), x[1:3, 2:4], None, x[:0]]) == [
        (begin, begin + 96),
        (begin, begin + 96),
        (begin + 32, begin + 64),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_crossings_beside_a_search_of_all_steps(seed):
    rng, crossings = random.Random(seed), Crossings()
    done, awaited = ([], []), [-1, -1]

    def some():
        begins = [rng.randrange(60) for _ in range(rng.randrange(4))]
        return [(begin, begin + rng.randint(1, 12)) for begin in begins]

    def overlap(one, other):
        return any(begin < stop and start < end for begin, end in one for start, stop in other)

    for _ in range(200):
        stream, reads, writes = rng.randrange(2), some(), some()
        conflicts = [
            number
            for number, (read, written) in enumerate(done[1 - stream])
            if overlap(written, [*reads, *writes]) or overlap(read, writes)
        ]
        last = max(conflicts, default=-1)
        assert crossings.before(stream, reads, writes) == (last if last > awaited[stream] else None)
        awaited[stream] = max(awaited[stream], last)
        crossings.add(stream, reads, writes)
        done[stream].append((reads, writes))
