"""Autograd nodes of a backward: a program and the steps that complete its gradients → the gradients of each node.

A single node returns all gradients at its end. With several, the program is cut into segments, one per node, and the
gradients of a segment reach their consumers (DDP's all-reduce, an optimizer in the backward) while the next segment
runs. A node costs tens of microseconds of CPU time, as much as sixteen gradients, or as sending tens of megabytes: a
module gets a second node only with that many gradients or bytes for each.

:class:`SegmentedRun` alone owns the tensors of later segments and frees each after its last use: memory falls during
the backward, and a backward that ends early leaves nothing behind.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from autodiff.extents import sample_of
from bridge.base.torch_internals import VF
from bridge.compile import CallLibrary, Launch, Liveness, Program, RunLoop, Segment

__all__ = ["BoundSegment", "Gradient", "SegmentedRun", "gradients_of", "make_token", "most_nodes", "nodes_of"]
__all__ += ["places_of", "run_of_token"]

MOST_NODES = 16
GRADIENTS_OF_NODE = 16
"""Number of gradients whose return costs about as much CPU time as a node."""
LARGE_BYTES = 32 << 20
"""Bytes of gradients that are worth a node, however few the gradients."""
LEAST_BYTES = 1 << 20
"""Least bytes of gradients of a node: DDP's first bucket."""

_FLOPS_OF_BYTE = 16
"""Operations per byte moved in the same time, roughly; the position of the cuts changes no bit."""
_BYTES_OF_STEP = 1 << 14


@dataclass(frozen=True)
class Gradient:
    """One gradient of a backward program.

    Attributes:
        place: index among the inputs that may get a gradient.
        step: the last step that touches its memory or reads its input, so that an optimizer may update the input as
            soon as the gradient is returned.
        nbytes: size for the sample.
    """

    place: int
    step: int
    nbytes: int


def most_nodes(program: Program) -> int:
    """The number of nodes that a backward program's gradients are worth; 1 for most modules."""
    layout = program.layout
    sizes = {register.slot: register.nbytes for register in (*layout.fresh, *layout.allocated)}
    total = sample_of(sum(sizes.get(root, 0) for root in layout.memory))
    return max(
        1, min(MOST_NODES, total // LEAST_BYTES, max(len(layout.results) // GRADIENTS_OF_NODE, total // LARGE_BYTES))
    )


def gradients_of(program: Program, flow: Liveness, places: Sequence[int], inputs: Mapping[int, int]) -> list[Gradient]:
    """A backward program → its gradients.

    Args:
        flow: the program's liveness.
        places: the place of each result.
        inputs: place → slot of the input itself, for inputs that the program reads.
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
    """Per node, in the order in which they run, the places of its gradients.

    The cuts have few live bytes and divide the time about equally.

    Args:
        gradients: the program's gradients.
        count: number of all places; the last node also has the places without a gradient.
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
    """The ends of ``number`` segments of about equal time, without the last one's."""
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
    """The cuts of a program: for each node but the last, a step soon after the node's gradients are complete."""
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
"""A segment and the function that runs its program."""
Pass = Callable[[int], list[torch.Tensor | None]]
"""The number of an autograd node → its gradients."""

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
    """One run of a backward's segments: the number of a segment → its gradients. Each runs once, in order.

    Args:
        segments: the segments with their functions.
        taken: per segment, the places of the gradients returned after it; ``None`` for a gradient that eager lacks.
        copied: places of gradients to clone, since their memory is shared.
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
        """Runs a segment → its gradients. ``RuntimeError``: it is not the next, or an input was changed in place."""
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
            tensor = None  # lets the program free its inputs
            slots.update(zip(segment.gives, execute(inputs, consume=True), strict=True))
        for place, slot in segment.results:
            self._ready[place] = slots[slot].clone() if place in self._copied else slots[slot]
        for _, slot in segment.results:
            slots.pop(slot, None)
        return [None if place is None else self._ready.pop(place) for place in self._taken[index]]


def make_token(device: torch.device, run: Pass | None = None) -> torch.Tensor:
    """An empty tensor that one autograd node hands to the next, with the segmented run as attribute ``run``."""
    token = VF.empty(0, dtype=torch.float32, device=device)  # autograd casts one of another type than the output's
    token.run = run
    return token


def run_of_token(token: torch.Tensor) -> Pass:
    """The segmented run of a token. ``RuntimeError`` if a hook replaced the token."""
    run = getattr(token, "run", None)
    if run is None:
        raise RuntimeError(_REPLACED)
    return run
