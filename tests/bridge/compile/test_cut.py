"""Segments of a program: one after another they have the whole program's bits, wherever it is cut."""

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, stats
from bridge.compile import Liveness, MakeView, Program, cut


class Tied(nn.Module):
    """An embedding that is the last product's matrix, attention in between, results that are views and numbers."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.2, batch_first=True, norm_first=True)
        self.again = nn.Linear(8, 8)

    def forward(self, ids):
        x = self.layer(self.words(ids))
        x = self.again(torch.tanh(self.again(x)))
        return x.reshape(-1, 8), x @ self.words.weight.t(), x.new_zeros(0, 3)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 3)

    def forward(self, x):
        y = torch.relu(self.norm(self.first(x)))
        return self.last(nn.functional.max_pool2d(y, 2)).mean((2, 3)), y.transpose(1, 2)[:, 1:]


def programs(module: nn.Module, *args: torch.Tensor, **options) -> list[Program]:
    entry = stats(add_tvm_dispatch(module.double(), args, **options)).entries[0]
    return [entry.forward, entry.backward]


def inputs_of(program: Program) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for each in program.layout.params:
        dtype = each.torch_dtype
        numbers = torch.rand(each.shape, generator=generator, dtype=torch.float64)
        made.append(numbers.to(dtype) if dtype.is_floating_point else torch.zeros(each.shape, dtype=dtype))
    return made


def run(segments, inputs):
    """The results; asserts that no segment takes a released value, and that no value is left."""
    slots, results = dict(enumerate(inputs)), {}
    taken = {slot for segment in segments for slot, _ in segment.takes}
    for segment in segments:
        given = [slots.pop(slot) if is_last else slots[slot] for slot, is_last in segment.takes]
        if segment.program is not None:
            slots |= dict(zip(segment.gives, segment.program(given, consume=True), strict=True))
        results |= {place: slots[slot] for place, slot in segment.results}
        for _, slot in segment.results:
            slots.pop(slot, None)
    assert not taken & slots.keys()
    return [results[place] for place in range(len(results))]


def bits(tensor):
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def same_bits(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype and mine.shape == other.shape
        assert torch.equal(bits(mine), bits(other))


CASES = {
    "tied, attention": lambda: programs(Tied(), torch.randint(11, (2, 5))),
    "convolutions": lambda: programs(Convolutions(), torch.rand(2, 2, 6, 6, dtype=torch.float64, requires_grad=True)),
    "recurrent": lambda: programs(nn.LSTM(3, 4, 2), torch.rand(5, 2, 3, dtype=torch.float64, requires_grad=True)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_wherever_it_is_cut(case):
    torch.manual_seed(0)
    choose = random.Random(0)
    for program in CASES[case]():
        places, inputs = list(Liveness(program).boundaries), inputs_of(program)
        wanted = program(list(inputs))
        for count in (1, 3, len(places)):
            chosen = sorted(choose.sample(places, min(count, len(places))))
            segments = cut(program, chosen, "part")
            same_bits(run(segments, inputs), wanted)
            assert sum(len(each.program.steps) for each in segments) >= len(program.steps)
        arenas = [each.program.arena_bytes for each in segments]
        assert max(arenas) < program.arena_bytes  # each has its own, and a small one


def test_sizes_that_vary_are_bound_after_the_cut():
    batch = torch.export.Dim("batch", min=2, max=64)
    module = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 4))
    _, program = programs(module, torch.rand(3, 4, dtype=torch.float64), dynamic_shapes=({0: batch},))
    places = list(Liveness(program).boundaries)
    (symbol,) = program.scope.samples
    for rows in (3, 7):
        sizes = {symbol.name: rows}
        inputs = inputs_of(program.at(sizes))
        wanted = program.bind(sizes)(list(inputs))
        bound = [replace(each, program=each.program.at(sizes)) for each in cut(program, places, "part")]
        same_bits(run(bound, inputs), wanted)


def test_nothing_is_written_on_both_sides_of_a_cut():
    module = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 3))
    _, program = programs(module, torch.rand(6, 2, 3, dtype=torch.float64))
    launches = [step for step in program.steps if not isinstance(step, MakeView)]
    assert len(Liveness(program).boundaries) == len(program.steps) - 1
    again = replace(program, steps=(*program.steps, launches[1]))
    assert all(place <= program.steps.index(launches[1]) for place in Liveness(again).boundaries)


def test_equal_places_leave_segments_without_steps():
    program = programs(nn.Linear(3, 2), torch.rand(4, 3, dtype=torch.float64))[1]
    end, inputs = len(program.steps), inputs_of(program)
    segments = cut(program, [0, 0, end, end], "part")
    assert [each.program is None for each in segments] == [True, True, False, True, True]
    same_bits(run(segments, inputs), program(list(inputs)))


@pytest.mark.parametrize("places", [[2, 1], [-1], [99]])
def test_other_places_are_refused(places):
    program = programs(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)), torch.rand(4, 3, dtype=torch.float64))[1]
    with pytest.raises(ValueError, match="cannot be cut"):
        cut(program, places, "part")
