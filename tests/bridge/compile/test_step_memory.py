"""Steps read and write only the memory that they declare: the arena and piecewise graphs rest on it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from bridge import lower
from bridge.base.devices import HOST
from bridge.base.tensor_properties import span_of
from bridge.compile import MakeView, compile_function
from bridge.compile.runtime.executor import Executor
from bridge.compile.runtime.layout import ArenaPool
from tests.bridge.compile.random_functions import build, draw, sample
from tests.bridge.compile.test_cuda_programs import CASES as MODULES
from tests.bridge.compile.test_cuda_programs import lowered_case
from tests.bridge.models import bert_layer
from tests.sampling import sampled

compiled = partial(compile_function, name="test")


def inputs_of(program):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.rand(each.shape, generator=generator).to(each.torch_dtype)
        if each.torch_dtype.is_floating_point
        else torch.ones(each.shape, dtype=each.torch_dtype)
        for each in program.layout.params
    ]


def memory_of(tensors):
    """Address ranges of tensors, each from its first element to its last."""
    found = []
    for tensor in tensors:
        if tensor is not None and tensor.numel():
            first = tensor.data_ptr()
            found.append((first, first + span_of(tensor.shape, tensor.stride()) * tensor.itemsize))
    return found


class Confined(Executor):
    """Fills memory that a step does not declare to read with noise; asserts that it writes only declared memory."""

    def __init__(self, program):
        super().__init__(program, HOST, prepare=lambda: None, pool=ArenaPool())

    def _act(self, registers):
        noise = torch.Generator().manual_seed(0)
        read_only = {each.untyped_storage().data_ptr() for each in registers[: len(self._layout.params)]}
        for (action, last_used), step in zip(self.actions, self.steps, strict=True):
            if isinstance(step, MakeView):
                action(registers)
            else:
                self._confined(action, step, registers, read_only, noise)
            for slot in last_used:
                registers[slot] = None

    def _confined(self, action, step, registers, read_only, noise):
        reads, given = (memory_of([registers[slot] for slot in slots]) for slots in (step.reads, step.writes))
        before = {}
        for tensor in registers:
            if tensor is None or tensor.numel() == 0 or tensor.untyped_storage().data_ptr() in read_only:
                continue
            memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            before.setdefault(memory.data_ptr(), (memory, memory.clone()))
        for memory, numbers in before.values():
            told = torch.zeros(len(memory), dtype=torch.bool)
            for first, end in reads:
                told[max(first - memory.data_ptr(), 0) : max(end - memory.data_ptr(), 0)] = True
            words = torch.empty(-(-len(memory) // 8), dtype=torch.int64).random_(-(2**63), None, generator=noise)
            memory.copy_(torch.where(told, numbers, words.view(torch.uint8)[: len(memory)]))
        filled = {place: memory.clone() for place, (memory, _) in before.items()}
        action(registers)
        for place, (memory, numbers) in before.items():
            told = torch.zeros(len(memory), dtype=torch.bool)
            for first, end in given:
                told[max(first - place, 0) : max(end - place, 0)] = True
            assert torch.equal(memory, torch.where(told, memory, filled[place])), f"{step} writes elsewhere"
            memory.copy_(torch.where(told, memory, numbers))


def check(program, inputs):
    wanted = program(list(inputs))
    found = Confined(program)(list(inputs))
    assert all(map(torch.equal, found, wanted)), program.name


@pytest.mark.parametrize("name", sampled(MODULES, lambda name: not name.startswith("GPT-2")))
def test_steps_of_modules(name):
    lowered = lowered_case(name)
    for program in map(compiled, (lowered.forward, lowered.expected_backward)):
        check(program, inputs_of(program))


@pytest.mark.parametrize("seed", sampled(range(20), range(8)))
def test_steps_of_random_functions(seed):
    inputs, instructions = draw(seed, 24)
    last = len(inputs) + len(instructions)
    program = compiled(build(inputs, instructions, "float32", range(last - 6, last)))
    check(program, sample(inputs, torch.float32, seed))


def test_one_that_does_not_say_all_it_writes_is_found():
    program = compiled(lower(torch.nn.Linear(8, 8), torch.randn(4, 8).requires_grad_()).expected_backward)
    inputs = inputs_of(program)
    execute = Confined(program)
    index = next(index for index, step in enumerate(execute.steps) if not isinstance(step, MakeView))
    action, last = execute.actions[index]

    def reaches_further(registers):
        action(registers)
        others = [each for each in registers if each is not None and each.numel()]
        written = {registers[slot].data_ptr() for slot in execute.steps[index].writes}
        place = next(each for each in others[len(inputs) :] if each.data_ptr() not in written)
        place.view(torch.uint8).flatten()[0] += 1

    execute.actions = (*execute.actions[:index], (reaches_further, last), *execute.actions[index + 1 :])
    with pytest.raises(AssertionError, match="writes elsewhere"):
        execute(list(inputs))


def test_one_that_does_not_say_all_it_reads_is_found():
    torch.manual_seed(0)
    program = compiled(lower(bert_layer().train(), torch.randn(3, 17, 24).requires_grad_()).expected_backward)
    arena = {register.slot for register in program.layout.arena}
    index, slot = next(
        (index, slot)
        for index, step in enumerate(program.steps)
        if not isinstance(step, MakeView)
        for slot in step.reads
        if slot in arena
    )
    execute, inputs = Confined(program), inputs_of(program)
    silent = replace(execute.steps[index], reads=tuple(each for each in execute.steps[index].reads if each != slot))
    execute.steps = (*execute.steps[:index], silent, *execute.steps[index + 1 :])
    assert not all(map(torch.equal, execute(list(inputs)), program(list(inputs))))
