"""Autograd nodes of a backward: a program and when its gradients are complete → how many, and what each hands out.

One node hands out all gradients at its end. In several, the program is cut into segments, a node runs one, and the
gradients that are complete then reach whoever waits for them (DDP's all-reduce, an optimizer in the backward) while the
next one runs. A node costs tens of microseconds of the CPU's, as sixteen gradients do, or as long as it takes to send
tens of megabytes: a module gets more than one where it has that much for each.

Segmented run: a backward's segments, saved tensors and grad_outs → one segment's gradients at a time.

What later segments need is held here and nowhere else, and let go of after its last use, so memory falls while the
backward goes on, and a backward that ends early leaves nothing behind.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from autodiff.extents import sample_of
from bridge.compile import CallLibrary, Launch, Liveness, Program, RunLoop, Segment

__all__ = ["BoundSegment", "Gradient", "SegmentedRun", "gradients_of", "make_token", "most_nodes", "nodes_of"]
__all__ += ["places_of", "run_of_token"]

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


Execute = Callable[..., list[torch.Tensor]]
BoundSegment = tuple[Segment, Execute | None]
"""A segment, and what runs its program."""
Pass = Callable[[int], list[torch.Tensor | None]]
"""The number of an autograd node → the gradients that it hands out."""

_CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation, while the backward"
    " of a module dispatched to TVM was on its way: {tensor} is at version {now}, version {then} is wanted. Something"
    " that runs in the backward, as hooks do, has changed it."
)

_REPLACED = (
    "the gradient between two autograd nodes of a module dispatched to TVM was replaced: hooks on autograd nodes have "
    "to leave gradients without elements as they are. Let them, or call remove_tvm_dispatch(module) first."
)


class SegmentedRun:
    """One pass through the segments of a backward. Each may be run once, in order.

    Args:
        segments: bound.
        taken: of each segment, the places of the gradients that are handed out after it, ``None`` for one that eager
            has not.
        copied: places of gradients in memory that others can see.
        inputs: saved tensors and grad_outs; emptied.
    """

    __slots__ = ("_copied", "_next", "_ready", "_segments", "_slots", "_taken", "_versions")

    def __init__(
        self,
        segments: Sequence[BoundSegment],
        taken: Sequence[Sequence[int | None]],
        copied: Collection[int],
        inputs: list[torch.Tensor],
    ):
        self._segments, self._taken, self._copied, self._next = segments, taken, copied, 0
        self._slots = dict(enumerate(inputs))
        inputs.clear()
        later = {slot for segment, _ in segments[1:] for slot, _ in segment.takes}
        self._versions = {
            slot: each._version for slot, each in self._slots.items() if slot in later and not each.is_inference()
        }
        self._ready: dict[int, torch.Tensor] = {}

    def __call__(self, index: int) -> list[torch.Tensor | None]:
        """Runs a segment; returns the gradients that are handed out after it.

        Raises:
            RuntimeError: not the next one; or an input of it was changed in place since the first one ran.
        """
        if index != self._next:
            raise RuntimeError(f"segment {index} of a dispatched module's backward was run after {self._next} others")
        self._next += 1
        segment, execute = self._segments[index]
        slots = self._slots
        inputs = []
        for slot, is_last in segment.takes:
            tensor = slots.pop(slot) if is_last else slots[slot]
            if index and slot in self._versions and tensor._version != self._versions[slot]:
                told = f"a tensor of shape {tuple(tensor.shape)}"
                raise RuntimeError(_CHANGED.format(tensor=told, now=tensor._version, then=self._versions[slot]))
            inputs.append(tensor)
        if execute is not None:
            tensor = None  # the program lets go of its inputs
            slots.update(zip(segment.gives, execute(inputs, consume=True), strict=True))
        for place, slot in segment.results:
            self._ready[place] = slots[slot].clone() if place in self._copied else slots[slot]
        for _, slot in segment.results:
            slots.pop(slot, None)
        return [None if place is None else self._ready.pop(place) for place in self._taken[index]]


def make_token(device: torch.device, run: Pass | None = None) -> torch.Tensor:
    """A tensor without elements that one autograd node hands to the next, with the pass that goes on there."""
    token = torch.empty(0, dtype=torch.float32, device=device)  # autograd casts one of another type than the output's
    token.run = run
    return token


def run_of_token(token: torch.Tensor) -> Pass:
    """The pass that a token came with. ``RuntimeError`` if it is another tensor by now."""
    run = getattr(token, "run", None)
    if run is None:
        raise RuntimeError(_REPLACED)
    return run
