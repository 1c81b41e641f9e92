"""Communication under computation: a step's kernels → NCCL's time, its overlap with other kernels, a picture."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

Range = tuple[float, float]

_SHADES = " ░▒▓█"
"""Shades of a lane's cells, by the share of the cell's time in which a kernel runs."""


@dataclass(frozen=True)
class Lanes:
    """The times of a step's kernels on a GPU, in microseconds: NCCL's, and all others; disjoint ranges in each lane."""

    sent: list[Range]
    computed: list[Range]

    @property
    def communication(self) -> float:
        """The time of NCCL's kernels, including their wait for other processes."""
        return _length(self.sent)

    @property
    def hidden(self) -> float:
        """The part of NCCL's time in which other kernels ran as well."""
        return _shared(self.sent, self.computed)

    @property
    def exposed(self) -> float:
        """The time in which only communication ran."""
        return self.communication - self.hidden

    @property
    def span(self) -> float:
        """The time from the first kernel's start to the last kernel's end."""
        both = [*self.sent, *self.computed]
        return max(end for _, end in both) - min(begin for begin, _ in both)

    def picture(self, width: int = 96) -> str:
        """Two lines, computation above communication; they begin at the first kernel's start."""
        both = [*self.sent, *self.computed]
        begin, cell = min(start for start, _ in both), self.span / width
        cells = [(begin + place * cell, begin + (place + 1) * cell) for place in range(width)]
        lines = []
        for name, lane in (("kernels", self.computed), ("NCCL", self.sent)):
            busy = [_shared([each], lane) / cell for each in cells]
            lines.append(f"{name:>8} |" + "".join(_SHADES[min(4, round(4 * share + 0.49))] for share in busy) + "|")
        return "\n".join(lines)


def traced(step: Callable[[], None], meet: Callable[[], None], rounds: int = 3) -> list[Lanes]:
    """The kernels of each of ``rounds`` steps; empty where the profiler sees no kernels (no CUPTI).

    ``meet`` is a barrier of all processes without GPU work: profilers take tens of milliseconds to start, differently
    in each process, and NCCL's kernels would wait for them.
    """
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            meet()
            step()
            torch.cuda.synchronize()
        sent: list[Range] = []
        computed: list[Range] = []
        for event in profiled.events():
            name = event.name.lower()
            if event.device_type != torch.autograd.DeviceType.CUDA or name.startswith("nccl:"):
                continue  # the latter: the process group's name for its work
            (sent if "nccl" in name else computed).append((event.time_range.start, event.time_range.end))
        if computed:
            found.append(Lanes(_merged(sent), _merged(computed)))
    return found


def told(lanes: list[Lanes]) -> str:
    """Medians over steps, in milliseconds."""
    if not lanes:
        return "the profiler saw no kernels: CUPTI is not at hand"
    span, sent, hidden, exposed = (
        statistics.median(getattr(each, name) for each in lanes) / 1e3
        for name in ("span", "communication", "hidden", "exposed")
    )
    share = f" ({hidden / sent:.0%})" if sent else ""
    return f"{span:.2f} ms of kernels, NCCL {sent:.2f}, under others {hidden:.2f}{share}, by itself {exposed:.2f}"


def _merged(ranges: list[Range]) -> list[Range]:
    found: list[Range] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _length(ranges: list[Range]) -> float:
    return sum(end - begin for begin, end in ranges)


def _shared(one: list[Range], other: list[Range]) -> float:
    total, place = 0.0, 0
    for begin, end in one:
        while place < len(other) and other[place][1] <= begin:
            place += 1
        for start, stop in other[place:]:
            if start >= end:
                break
            total += max(0.0, min(end, stop) - max(begin, start))
    return total
