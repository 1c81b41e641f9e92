"""Second-stream scheduling: instructions → steps that may run in parallel with the critical path, and for how long.

A backward's critical path leads from the results' gradients to the inputs'. The computation of a weight's gradient
hangs on it and delays nothing: a product of few rows leaves most of a GPU idle, which can meanwhile compute the next
step of the path. So a program may run on two streams, one for the critical path and one for other steps, each in the
program's order. A step that the path waits for is on the second stream only if it is expected to finish in time.

The executor of two streams must keep the program's order for any two steps on the same memory of which one writes. So
values of second-stream steps keep their memory for as long as the step is expected to run: otherwise reuse of the
memory would make one stream wait for the other.
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
"""Seconds of the smallest kernel and of the smallest library call, bytes and operations per second: estimates for a
large GPU. They only determine the sample's order of events."""

_CROSSING = 1.5e-6
"""Additional seconds that a step waits for one on the other stream."""

_LEAST = 3e-6
"""The least expected saving, in seconds, for which a second stream is used."""

_PATH, _SECOND = 0, 1


@dataclass(frozen=True)
class SecondStreamPlan:
    """The steps to run on a second stream.

    Attributes:
        spans: a step's index → the first and the last step of the first stream that are expected to run meanwhile.
        saved: expected saving, as a fraction of the time on one stream.
    """

    spans: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    saved: float = 0.0


def second_stream_steps(steps: Sequence[Instruction], views: Iterable[MakeView] = ()) -> SecondStreamPlan:
    """The steps to run in parallel with the critical path; none if that would save hardly any time.

    Args:
        views: of memory that steps use, besides the views among the steps.
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
    """For each step, the steps whose results it reads or overwrites."""
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
    """The wanted steps, and all steps they depend on."""
    needed, left = set(), list(wanted)
    while left:
        index = left.pop()
        if index not in needed:
            needed.add(index)
            left += before[index]
    return needed


def _seconds(step: Instruction) -> float:
    """The estimated seconds of a step."""
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
    """Extends the lifetimes of second-stream steps' values to all first-stream steps that run meanwhile.

    Args:
        lifetimes: first and last steps.
        value_in: slot → the value that owns its memory.
    """
    found = dict(lifetimes)
    for index, (since, until) in beside.spans.items():
        for value in map(value_in, (*steps[index].reads, *steps[index].writes)):
            if value in found:
                first, last = found[value]
                found[value] = min(first, since) if first == index else first, max(last, until)
    return found
