"""``tune(module, sample)``: a call → faster choices by A/B timing, stored in the disk cache.

:class:`CallCandidates`: choices of one call → their entries, compiled in parallel and timed pairwise.
"""

from __future__ import annotations

import datetime
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from bridge.artifact import current_store, key_of
from bridge.base.errors import CompilationError, UnsupportedModule
from bridge.base.log import Stopwatch, channel
from bridge.base.threads import interrupts_deferred, raise_deferred, serves
from bridge.capture import after_pre_hooks, normalize_sample
from bridge.compile import Backend, Choices, backend_for, same_code, settle
from bridge.dispatch import (
    Entry,
    EntryOptions,
    TimedStep,
    Tuned,
    backend_of_call,
    entry_of_call,
    keep_tuned,
    require_capturable,
    tuned_of,
    tuning_key,
    unnoticed,
    with_choices,
)
from bridge.lowering import DEFAULT_PARTITION
from bridge.state import SampleCall
from bridge.trials import Pairs, Race, is_faster, ratio_of
from bridge.tune.search import FASTER, GAIN, Outcome, Search, Trial, Tunable, TuningLog, tunables_of
from partition.cut import resolve as resolve_strategy

__all__ = ["CallCandidates", "Means", "Progress", "TuningResult", "tune", "tune_call"]

_BUILDERS = 2
"""One thread runs Python while the other waits for LLVM, which builds one library at a time."""

_FAILURES = (UnsupportedModule, CompilationError, RuntimeError, NotImplementedError)
"""Errors of a candidate that only exclude it."""


class CallCandidates:
    """Compiles and times candidates for one call.

    Args:
        options: the user's options, without choices.
        memory: upper limit of a candidate's saved bytes, as a multiple of the default's.

    Attributes:
        default: the entry compiled with the default choices.

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
        """Compiles the entries of these choices in several threads: LLVM builds one while Python lowers another."""
        self._watch = Stopwatch()
        self._made = {choices: self._made[choices] for choices in candidates if choices in self._made}
        missing = [choices for choices in candidates if choices not in self._made]
        for choices in missing:  # one capture at a time
            self._capture_of(choices)
        with ThreadPoolExecutor(_BUILDERS, "bridge-tune", serves) as pool:
            for choices, made in zip(missing, pool.map(self._make, missing), strict=True):
                self._made[choices] = made
        settle()

    def __call__(self, incumbent: Choices, candidate: Choices) -> Outcome:
        raise_deferred()
        watch, self._watch = self._watch or Stopwatch(), None
        pairs, why = self._raced(self.entry(incumbent), self.entry(candidate), self._race)
        if is_faster(pairs, GAIN):  # among many candidates some are faster by chance: only a second timing counts
            pairs, why = self._raced(self.entry(incumbent), self.entry(candidate), self._race)
        return Outcome(pairs, why, watch.seconds)

    def entry(self, choices: Choices) -> Entry | str:
        """The entry of choices, or the reason why it failed."""
        if choices not in self._made:
            self._capture_of(choices)
            self._made[choices] = self._make(choices)
        return self._made[choices]

    def confirm(self, known: Choices, chosen: Choices, race: Race) -> tuple[Pairs, str]:
        """Compares the results of a search's choices and of the current ones, then times them longer."""
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
        """The first result in which two entries, with equal draws, differ by more than rounding; empty: none."""
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
        """Captures an entry with the choices' partition, if there is none; other choices reuse its capture."""
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
"""Difference allowed between two orders of the same sums, relative to the tensor's largest value; errors exceed it."""

_NOTHING = 1e-5
"""Difference allowed relative to the largest value of all results, for gradients that are zero up to rounding."""


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


_LOG = channel("tune")

_FORM = "{desc} {percentage:3.0f}%|{bar:20}| {n:.0f} of {total:.0f} s{postfix}"


class Progress:
    """Progress bar over the trials' time limit.

    Args:
        name: the module's name.
        seconds: the time limit.
        shown: whether to show the bar.
    """

    def __init__(self, name: str, seconds: float, *, shown: bool):
        self._name, self._bar, self._shown_seconds = name, None, 0.0
        self._seconds = seconds
        self._is_shown = shown

    def __enter__(self) -> Progress:
        if self._is_shown:
            with suppress(ImportError):  # it comes with the extra ``train``
                from tqdm import tqdm

                self._bar = tqdm(total=self._seconds, desc=f"tune {self._name}", bar_format=_FORM)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()

    def told(self, search: Search, tunable: Tunable, trial: Trial) -> None:
        """Logs a trial and updates the bar."""
        verdict = trial.outcome.verdict
        _LOG.info("%s %s: %s", self._name, tunable, verdict)
        if verdict == FASTER:
            _LOG.debug("%s: %r instead of %r", self._name, trial.candidate, trial.incumbent)
        if self._bar is None:
            return
        best = math.prod(search.gains)
        self._bar.set_postfix_str(f"best {best:.3f} of the time, {search.trials} tried, {tunable}", refresh=False)
        now = min(search.spent, self._seconds)
        self._bar.update(now - self._shown_seconds)
        self._shown_seconds = now


@dataclass(frozen=True)
class TuningResult:
    """The result of :func:`bridge.tune`.

    Attributes:
        module_name: class of the module.
        choices: the choices for later processes; the defaults if none was clearly faster.
        words: the choices, a line each.
        before, after: seconds of a step with the previous choices and with new ones, timed in turns. Equal if the new
            ones were not confirmed; the stored tuning's times, or 0, if the search found no others.
        trials: number of trials, including earlier processes'.
        seconds: their duration.
        kept: whether new choices were stored in the disk cache.
        why: the outcome in words.
        log: the name of the log, or empty.
    """

    module_name: str
    choices: Choices
    words: tuple[str, ...]
    before: float
    after: float
    trials: int
    seconds: float
    kept: bool
    why: str
    log: str = ""

    def __str__(self) -> str:
        head = f"{self.module_name}: {self.trials} candidates in {self.seconds:.0f} s; {self.why}"
        return "\n".join([head, *(f"  {each}" for each in self.words)])


CONFIRM = "confirm"

_GAIN = 0.01
"""Least share of a step's time that all choices together must gain to be stored."""

_RACE = Race()
_FINAL = Race(fewest=15, most=41, seconds=20.0)


@dataclass(frozen=True)
class Means:
    """Options of a tuning.

    Attributes:
        minutes: time limit of the trials.
        log: file of the log, or ``None``.
        memory: upper limit of the saved bytes, as a multiple of the default's.
        progress: whether to show a bar.
        race: pace of the A/B timing of two candidates; ``final``: of the result against the current choices.
        tunables: an entry, its strategy and the log → its tunables.
    """

    minutes: float = 2.0
    log: str | os.PathLike | None = None
    memory: float = 1.0
    progress: bool = True
    race: Race = _RACE
    final: Race = _FINAL
    tunables: Callable[[Entry, Any, TuningLog], Sequence[Tunable]] = tunables_of

    def __post_init__(self) -> None:
        for name in ("minutes", "memory"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name}: wanted a number, got {value!r}")
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name}: wanted a positive number, got {value!r}")
        if self.log is not None and not isinstance(self.log, str | os.PathLike):
            raise TypeError(f"log: wanted a path or None, got {self.log!r}")
        if self.log is not None and not Path(self.log).absolute().parent.is_dir():
            raise ValueError(f"log: there is no directory {str(Path(self.log).absolute().parent)!r}")


def tune(
    module: nn.Module,
    sample_input: Any,
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    minutes: float = 2.0,
    log: str | os.PathLike | None = None,
    partition: Any = DEFAULT_PARTITION,
    target: Any = None,
    freeze: bool = False,
    memory: float = 1.0,
    progress: bool = True,
) -> TuningResult:
    """Implements :func:`bridge.tune`."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: wanted a torch.nn.Module, got {type(module).__name__}")
    means = Means(minutes=minutes, log=log, memory=memory, progress=progress)
    sample = SampleCall(module, *normalize_sample(module, sample_input, sample_kwargs))
    resolve_strategy(partition)
    wanted = None if target is None else backend_for(target)
    with after_pre_hooks(sample) as call, torch.no_grad() if freeze else nullcontext():
        return tune_call(call, EntryOptions(partition, backend_of_call(wanted, call), freeze), means)


@interrupts_deferred()
def tune_call(
    call: SampleCall, options: EntryOptions, means: Means, done: set[str] | None = None
) -> TuningResult | None:
    """:func:`tune` for a call in the current modes; ``None`` if its key is in ``done``, else adds it to ``done``."""
    name, backend = call.name, options.backend
    require_capturable(name)
    if not current_store().is_usable:
        raise ValueError("tune: the disk cache, where choices are kept, is off or cannot be used (BRIDGE_CACHE)")
    track = CallCandidates(call, options, memory=means.memory, race=means.race)
    key = tuning_key(track.default.lowered, backend, track.default.is_frozen)
    if key is None:
        raise ValueError(f"tune: what {name} computes has a literal that no file holds; it cannot be recognized")
    if done is not None and key in done:
        return None
    if done is not None:
        done.add(key)
    log = TuningLog(means.log, key_of(key, means.memory))
    if not log.records:
        log.append(kind="begin", module=name, threads=backend.threads(), machine=tuple(map(str, backend.machine())))
    with Progress(name, 60 * means.minutes, shown=means.progress) as bar:
        search = Search(means.tunables(track.default, options.partition, log), track, log, 60 * means.minutes, bar.told)
        found = search.run()
    used = tuned_of(key)
    known = Choices() if used is None else used.choices
    if found == known:
        why = "the choices in use are the best" if known else "nothing is faster than the default choices"
        times = (used.before, used.after) if used is not None else (0.0, 0.0)
        return _result(search, backend, name, found, times, False, why, log)
    record = _confirmed(log, track, known, found, means.final)
    pairs: Pairs = [(one, other) for one, other in record["pairs"]]
    before, after = (statistics.median(times) for times in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
    if not is_faster(pairs, _GAIN):
        ratio = f"{ratio_of(pairs):.3f} of the time" if pairs else "no race"
        why = f"not kept: {record['why'] or f'the last race did not confirm it, {ratio}'}"
        return _result(search, backend, name, known, (before, before), False, why, log)
    tuned = Tuned(found, record["date"], "" if log.path is None else log.path.name, before, after, key)
    keep_tuned(tuned, name)
    why = f"a step takes {ratio_of(pairs):.3f} of the time, {1e3 * before:.3f} -> {1e3 * after:.3f} ms"
    return _result(search, backend, name, found, (before, after), True, why, log)


def _confirmed(log: TuningLog, track: CallCandidates, known: Choices, found: Choices, race: Race) -> dict[str, Any]:
    """The record of the final A/B timing: from the log, or measured now."""
    for record in log.records:
        if record.get("kind") == CONFIRM and (record.get("over"), record.get("choices")) == (known, found):
            return record
    pairs, why = track.confirm(known, found, race)
    date = datetime.date.today().isoformat()
    return log.append(kind=CONFIRM, over=known, choices=found, pairs=tuple(pairs), why=why, date=date)


def _result(
    search: Search,
    backend: Backend,
    name: str,
    choices: Choices,
    times: tuple[float, float],
    kept: bool,
    why: str,
    log: TuningLog,
) -> TuningResult:
    words = tuple(choices.words(backend.limits, backend.order))
    where = "" if log.path is None else log.path.name
    result = TuningResult(name, choices, words, *times, search.trials, search.spent, kept, why, where)
    _LOG.info("%s", result)
    return result
