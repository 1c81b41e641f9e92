"""Autograd nodes of a backward: a program and when its gradients are complete → how many, and what each hands out.

One node hands out all gradients at its end. In several, the program is cut into segments, a node runs one, and the
gradients that are complete then reach whoever waits for them (DDP's all-reduce, an optimizer in the backward) while the
next one runs. A node costs tens of microseconds of the CPU's, as sixteen gradients do, or as long as it takes to send
tens of megabytes: a module gets more than one where it has that much for each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autodiff.extents import sample_of
from bridge.compile import CallLibrary, Launch, Liveness, Program, RunLoop

__all__ = ["Gradient", "gradients_of", "most_nodes", "nodes_of", "places_of"]

MOST_NODES = 16
GRADIENTS_OF_NODE = 16
"""Gradients whose handing out takes the CPU about as long as a node does."""
LARGE_BYTES = 32 << 20
"""Of gradients, that are worth a node however few they are."""
LEAST_BYTES = 1 << 20
"""Of gradients, that a node has to have: DDP's first bucket."""

_FLOPS_OF_BYTE = 16
"""Arithmetic that takes as long as to move a byte, roughly; where the cuts lie changes no bit."""
_BYTES_OF_STEP = 1 << 14


@dataclass(frozen=True)
class Gradient:
    """One gradient of a backward program.

    Attributes:
        place: among the inputs that may get one.
        step: the last that works on its memory, or reads the input that it is for: an optimizer that changes that as
            soon as the gradient is there changes nothing that is still read.
        nbytes: of the sample's sizes.
    """

    place: int
    step: int
    nbytes: int


def most_nodes(program: Program) -> int:
    """How many nodes the gradients that a program returns are worth; 1 for most modules."""
    layout = program.layout
    sizes = {register.slot: register.nbytes for register in (*layout.fresh, *layout.allocated)}
    total = sample_of(sum(sizes.get(root, 0) for root in layout.memory))
    return max(
        1, min(MOST_NODES, total // LEAST_BYTES, max(len(layout.results) // GRADIENTS_OF_NODE, total // LARGE_BYTES))
    )


def gradients_of(program: Program, flow: Liveness, places: Sequence[int], inputs: Mapping[int, int]) -> list[Gradient]:
    """The gradients that a program makes.

    Args:
        flow: of the program.
        places: of its results.
        inputs: by such a place, the slot of the input itself, where the program reads it.
    """
    layout, found = program.layout, []
    for place, slot, root in zip(places, layout.results, layout.memory, strict=True):
        last = flow.born.get(slot, -1) if root in flow.constants else flow.touched.get(root, -1)
        read = flow.touched.get(inputs[place], -1) if place in inputs else -1
        size = sample_of(flow.registers[root].nbytes) if root in flow.registers else 0
        found.append(Gradient(place, max(last, read), size))
    return found


def nodes_of(
    program: Program, flow: Liveness, gradients: Sequence[Gradient], count: int
) -> tuple[tuple[int, ...], ...]:
    """Of each node, in the order in which they run, the places of the inputs that it returns a gradient of.

    Cuts lie where little crosses, near equal times.

    Args:
        gradients: of the program.
        count: of all places; the last node has those that the program has no gradient for.
    """
    found: list[tuple[int, ...]] = []
    given: set[int] = set()
    for end in _ends(program, flow.boundaries, most_nodes(program)):
        here = [each for each in gradients if each.step < end and each.place not in given]
        if sum(each.nbytes for each in here) >= LEAST_BYTES:
            found.append(tuple(sorted(each.place for each in here)))
            given.update(found[-1])
    left = tuple(place for place in range(count) if place not in given)
    return (*found, left) if left else tuple(found)


def _ends(program: Program, boundaries: Mapping[int, int], number: int) -> list[int]:
    """Where so many segments of about equal time end, the last one apart."""
    after = [0.0]
    for step in program.steps:
        work = 0.0
        if isinstance(step, Launch | CallLibrary | RunLoop):
            work = _BYTES_OF_STEP + step.contents.bytes + step.contents.flops / _FLOPS_OF_BYTE
        after.append(after[-1] + work)
    length = after[-1] / number
    found = []
    for index in range(1, number):
        begin, end = (bisect_left(after, (index + side) * length) for side in (-0.5, 0.5))
        near = [place for place in range(begin, end) if place in boundaries]
        if near:
            found.append(min(near, key=lambda place: (boundaries[place], abs(after[place] - index * length))))
    return found


def places_of(
    program: Program, flow: Liveness, gradients: Sequence[Gradient], nodes: Sequence[Sequence[int]]
) -> list[int]:
    """Where to cut a program so that each node can return its gradients: soon after they are complete."""
    boundaries = flow.boundaries | dict.fromkeys((0, len(program.steps)), 0)
    allowed = sorted(boundaries)
    steps = {each.place: each.step for each in gradients}
    found, done = [], 0
    for node in nodes[:-1]:
        before, done = done, max([done, *(steps[place] + 1 for place in node if place in steps)])
        first = bisect_left(allowed, done)
        near = allowed[first : max(first + 1, bisect_left(allowed, done + (done - before) // 4))]
        done = min(near, key=lambda place: (boundaries[place], place))
        found.append(done)
    return found
