"""Communication under computation: the kernels of a step → how long NCCL's run, what lies under others, a picture."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["Lanes", "told", "traced"]

Range = tuple[float, float]

_SHADES = " ░▒▓█"
"""Of a lane of the picture: how much of a cell's time something runs."""


@dataclass(frozen=True)
class Lanes:
    """When kernels of a step ran on a GPU, in microseconds: NCCL's, and all others; each lane's ranges lie apart."""

    sent: list[Range]
    computed: list[Range]

    @property
    def communication(self) -> float:
        """How long NCCL's kernels ran, their wait for other processes included."""
        return _length(self.sent)

    @property
    def hidden(self) -> float:
        """How long of that other kernels ran, too."""
        return _shared(self.sent, self.computed)

    @property
    def exposed(self) -> float:
        """How long nothing but communication ran."""
        return self.communication - self.hidden

    @property
    def span(self) -> float:
        """From the first kernel's start to the last one's end."""
        both = [*self.sent, *self.computed]
        return max(end for _, end in both) - min(begin for begin, _ in both)

    def picture(self, width: int = 96) -> str:
        """Two lines, computation above communication; left: the first kernel's start."""
        both = [*self.sent, *self.computed]
        begin, cell = min(start for start, _ in both), self.span / width
        cells = [(begin + place * cell, begin + (place + 1) * cell) for place in range(width)]
        lines = []
        for name, lane in (("kernels", self.computed), ("NCCL", self.sent)):
            busy = [_shared([each], lane) / cell for each in cells]
            lines.append(f"{name:>8} |" + "".join(_SHADES[min(4, round(4 * share + 0.49))] for share in busy) + "|")
        return "\n".join(lines)


def traced(step: Callable[[], None], meet: Callable[[], None], rounds: int = 3) -> list[Lanes]:
    """The kernels of each of so many steps; empty where the profiler sees no kernels (no CUPTI).

    ``meet`` returns when all processes have called it, and runs nothing on a GPU: a profiler takes tens of milliseconds
    to start, in each process others, for which NCCL's kernels would wait.
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
                continue  # the latter: what the process group calls its work
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
    """The same times as ranges that lie apart."""
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
    """The time that lies in both."""
    total, place = 0.0, 0
    for begin, end in one:
        while place < len(other) and other[place][1] <= begin:
            place += 1
        for start, stop in other[place:]:
            if start >= end:
                break
            total += max(0.0, min(end, stop) - max(begin, start))
    return total
