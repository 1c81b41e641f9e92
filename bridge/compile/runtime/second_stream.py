"""Steps beside: instructions → those that may run at the same time as the longest chain, and for how long.

A backward's chain leads from the gradients of the results to those of the inputs. What a weight's gradient takes hangs
on it and holds nothing up: a product of few rows leaves most of a GPU idle, which can compute the chain's next one
meanwhile. So a program may be run on two streams: one for the critical path, one for what is not on it, each in the
program's order. A step that the path waits for is beside it only where that is expected to be over earlier.

Whoever runs steps beside others keeps to the program's order wherever two work on the same memory, of which one writes
it. So values that a step beside works on have their memory to themselves for as long as it is expected to run: one of
the two would wait otherwise, for memory that the other has for something else.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from bridge.compile.runtime.instructions import CallLibrary, MakeView, roots_of
from bridge.compile.runtime.loop_frame import Instruction

__all__ = ["SecondStreamPlan", "lasting", "second_stream_steps"]

Key = TypeVar("Key", bound=Hashable)

_LAUNCH, _CALL, _BYTES, _FLOPS = 2e-6, 3.5e-6, 3e12, 1e14
"""Seconds of the smallest kernel and of the smallest library call, bytes and operations of a second: a large GPU's,
about. Only the sample's order of events is asked of them."""

_CROSSING = 1.5e-6
"""Seconds that a step waits longer for one of the other stream."""

_LEAST = 3e-6
"""Seconds that are worth a second stream."""

_PATH, _SECOND = 0, 1


@dataclass(frozen=True)
class SecondStreamPlan:
    """What is to run on a second stream.

    Attributes:
        spans: by a step's index, the first and the last step of the first stream that are expected to run at the same
            time.
        saved: of the time that all steps take one after another, expected.
    """

    spans: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    saved: float = 0.0


def second_stream_steps(steps: Sequence[Instruction], views: Iterable[MakeView] = ()) -> SecondStreamPlan:
    """The steps that are to run beside the critical path; none if that would save hardly any time.

    Args:
        views: of memory that steps work on, besides those among the steps.
    """
    before = _waited_for(steps, views)
    seconds = list(map(_seconds, steps))
    path = _critical_path(before, seconds)
    critical, needed = set(path), _needed(before, path[-1:])
    free, streams = [0.0, 0.0], []
    begins: list[float] = []
    ends: list[float] = []
    for index, others in enumerate(before):
        ready = [
            max([free[stream], *(ends[other] + _CROSSING * (streams[other] != stream) for other in others)])
            for stream in (_PATH, _SECOND)
        ]
        if isinstance(steps[index], MakeView) or index in critical:
            stream = _PATH
        else:
            stream = _SECOND if index not in needed or ready[_SECOND] + _CROSSING < ready[_PATH] else _PATH
        streams.append(stream)
        begins.append(ready[stream])
        ends.append(ready[stream] + seconds[index])
        free[stream] = ends[-1]
    alone, both = sum(seconds), max(ends, default=0.0)
    if both + _LEAST > alone:
        return SecondStreamPlan()
    on_path = [index for index, stream in enumerate(streams) if stream == _PATH]
    path_begins, path_ends = ([times[index] for index in on_path] for times in (begins, ends))
    spans = {}
    for index, stream in enumerate(streams):
        if stream == _SECOND:
            first = bisect_right(path_ends, begins[index] - _LAUNCH)
            at_once = on_path[first : bisect_left(path_begins, ends[index] + _LAUNCH)]
            spans[index] = min([index, *at_once[:1]]), max([index, *at_once[-1:]])
    return SecondStreamPlan(spans, 1 - both / alone)


def _waited_for(steps: Sequence[Instruction], views: Iterable[MakeView]) -> list[set[int]]:
    """For each step those whose results it reads or writes over."""
    roots = roots_of((*views, *(step for step in steps if isinstance(step, MakeView))))
    writers: dict[int, int] = {}
    before: list[set[int]] = []
    for index, step in enumerate(steps):
        touched = {roots.get(slot, slot) for slot in (*step.reads, *step.writes)}
        before.append({writers[root] for root in touched if root in writers})
        if not isinstance(step, MakeView):
            writers.update(dict.fromkeys((roots.get(slot, slot) for slot in step.writes), index))
    return before


def _critical_path(before: Sequence[Collection[int]], seconds: Sequence[float]) -> list[int]:
    """The steps of the chain that takes longest, in order."""
    takes: list[float] = []
    for index, others in enumerate(before):
        takes.append(seconds[index] + max((takes[other] for other in others), default=0.0))
    path: list[int] = []
    left: Collection[int] = range(len(takes))
    while left:
        path.append(max(left, key=takes.__getitem__))
        left = before[path[-1]]
    return path[::-1]


def _needed(before: Sequence[Collection[int]], wanted: Iterable[int]) -> set[int]:
    """Steps that others wait for, directly or not, and these."""
    needed, left = set(), list(wanted)
    while left:
        index = left.pop()
        if index not in needed:
            needed.add(index)
            left += before[index]
    return needed


def _seconds(step: Instruction) -> float:
    """What a step takes, roughly."""
    if isinstance(step, MakeView):
        return 0.0
    least = _CALL if isinstance(step, CallLibrary) else _LAUNCH
    return least + max(step.contents.bytes / _BYTES, step.contents.flops / _FLOPS)


def lasting(
    lifetimes: Mapping[Key, tuple[int, int]],
    steps: Sequence[Instruction],
    beside: SecondStreamPlan,
    value_in: Callable[[int], Key],
) -> dict[Key, tuple[int, int]]:
    """First and last steps of values, where those that steps beside work on last for all that these run beside.

    Args:
        lifetimes: first and last steps.
        value_in: a slot → the value whose memory is in it.
    """
    found = dict(lifetimes)
    for index, (since, until) in beside.spans.items():
        for value in map(value_in, (*steps[index].reads, *steps[index].writes)):
            if value in found:
                first, last = found[value]
                found[value] = min(first, since) if first == index else first, max(last, until)
    return found
