"""Track: choices of one call → their entries, built at the same time; two of them are raced, one pair at a time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from bridge.base.errors import CompilationError, UnsupportedModule
from bridge.base.log import Stopwatch
from bridge.base.threads import raise_deferred, serves
from bridge.compile import Choices, same_code, settle
from bridge.dispatch import Entry, EntryOptions, TimedStep, entry_of_call, unnoticed, with_choices
from bridge.state import SampleCall
from bridge.trials import Pairs, Race, is_faster
from bridge.tune.search import GAIN, Outcome

__all__ = ["CallTrack"]

_BUILDERS = 2
"""One that runs Python, one that waits for a compiler, which takes one library at a time."""

_FAILURES = (UnsupportedModule, CompilationError, RuntimeError, NotImplementedError)
"""What a candidate may come to; it is then no candidate."""


class CallTrack:
    """The track of a call.

    Args:
        options: as the user asks for, without choices.
        memory: times the bytes of the default's captures that a candidate's may take.

    Attributes:
        default: the entry of no choices.

    Raises:
        UnsupportedModule, CompilationError: the call cannot be compiled.
    """

    def __init__(self, call: SampleCall, options: EntryOptions, *, memory: float, race: Race):
        self._call, self._options = call, options
        self._memory, self._race = memory, race
        self._watch: Stopwatch | None = None
        self.default = self._captured(Choices())
        self._captures: dict[Any, Entry] = {None: self.default}
        self._made: dict[Choices, Entry | str] = {Choices(): self.default}

    def prepare(self, candidates: Sequence[Choices]) -> None:
        """Entries of these choices, built by several threads; LLVM works for one while Python works for another."""
        self._watch = Stopwatch()
        self._made = {choices: self._made[choices] for choices in candidates if choices in self._made}
        missing = [choices for choices in candidates if choices not in self._made]
        for choices in missing:  # captures are made one by one
            self._capture_of(choices)
        with ThreadPoolExecutor(_BUILDERS, "bridge-tune", serves) as pool:
            for choices, made in zip(missing, pool.map(self._make, missing), strict=True):
                self._made[choices] = made
        settle()

    def __call__(self, incumbent: Choices, candidate: Choices) -> Outcome:
        raise_deferred()
        watch, self._watch = self._watch or Stopwatch(), None
        pairs, why = self._raced(self.entry(incumbent), self.entry(candidate), self._race)
        if is_faster(pairs, GAIN):  # of many candidates some are lucky: what counts is a race of its own
            pairs, why = self._raced(self.entry(incumbent), self.entry(candidate), self._race)
        return Outcome(pairs, why, watch.seconds)

    def entry(self, choices: Choices) -> Entry | str:
        """The entry of choices, or why there is none."""
        if choices not in self._made:
            self._capture_of(choices)
            self._made[choices] = self._make(choices)
        return self._made[choices]

    def confirm(self, known: Choices, chosen: Choices, race: Race) -> tuple[Pairs, str]:
        """Races the choices of a search against those that are in use, longer, after their numbers were compared."""
        one, other = self.entry(known), self.entry(chosen)
        if isinstance(other, Entry) and isinstance(one, Entry):
            problem = self._deviation(one, other)
            if problem:
                return [], problem
        return self._raced(one, other, race)

    def _raced(self, one: Entry | str, other: Entry | str, race: Race) -> tuple[Pairs, str]:
        for entry in (one, other):
            if isinstance(entry, str):
                return [], entry
        if _are_same(one, other):
            return [], "the same code"
        most = self._memory * _saved_bytes(self.default)
        if _saved_bytes(other) > most:
            return [], f"saves {_saved_bytes(other)} bytes for the backward, may save {int(most)}"
        settle()
        with unnoticed(self.default, self._call.module):
            return race(TimedStep(one, self._call), TimedStep(other, self._call)), ""

    def _deviation(self, one: Entry, other: Entry) -> str:
        """Where the numbers of two entries, on the same draws, differ by more than rounding; empty: nowhere."""
        found = []
        for entry in (one, other):
            with unnoticed(self.default, self._call.module):
                found.append(TimedStep(entry, self._call).results())
        largest = max(map(_largest, found[0]), default=0.0)
        for place, (mine, its) in enumerate(zip(*found, strict=True)):
            if not _is_close(mine, its, largest):
                return f"result {place} differs by more than rounding"
        return ""

    def _captured(self, choices: Choices) -> Entry:
        return entry_of_call(self._call, self._options, choices=choices)

    def _capture_of(self, choices: Choices) -> None:
        """Sees to an entry with the choices' partition; others are made from it without another capture."""
        if choices.partition not in self._captures:
            try:
                self._captures[choices.partition] = self._captured(Choices(partition=choices.partition))
            except _FAILURES as error:
                self._made[choices] = f"failed: {type(error).__name__}"

    def _make(self, choices: Choices) -> Entry | str:
        if choices in self._made:
            return self._made[choices]
        try:
            return with_choices(self._captures[choices.partition], choices)
        except KeyError:
            return "failed: no partition"
        except _FAILURES as error:
            return f"failed: {type(error).__name__}"


def _are_same(one: Entry, other: Entry) -> bool:
    pairs = [(one.forward, other.forward), (one.backward, other.backward)]
    return all(a is b or (a is not None and b is not None and same_code(a, b)) for a, b in pairs)


def _saved_bytes(entry: Entry) -> int:
    return 0 if entry.plan is None else entry.plan.bytes


_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}
"""Of the largest number, that two orders of the same sums may differ by; what is wrong differs by more."""

_NOTHING = 1e-5
"""Of the largest number of all: a gradient that is zero but for rounding is less than that."""


def _largest(tensor: torch.Tensor) -> float:
    if not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    return float(torch.nan_to_num(tensor.detach().double(), posinf=0.0, neginf=0.0).abs().max())


def _is_close(one: torch.Tensor, other: torch.Tensor, largest: float) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point() or not one.numel():
        return torch.equal(one, other) if not one.is_complex() else torch.allclose(one, other)
    if not torch.equal(torch.isfinite(one), torch.isfinite(other)):
        return False
    most = _ROUNDING.get(one.dtype, 1e-1)
    one, other = (torch.nan_to_num(each.detach().double()) for each in (one, other))
    return bool((one - other).abs().max() <= most * one.abs().max() + _NOTHING * largest)
