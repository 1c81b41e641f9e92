"""Tuned choices of a call: what an earlier tuning has kept in the disk cache → how its entry is compiled.

They are found by the functions that would be compiled by default, the machine, the number of threads, versions and
torch's settings. Choices decide how fast a program is and how its sums are rounded, never what it computes: choices
that were made for another call would be right, too, only not the best.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from bridge.artifact import current_store, of_this_package
from bridge.base.log import channel
from bridge.compile import Backend, Choices, CompileOptions, KeptFunction, digest_of
from bridge.dispatch.entry import Entry
from bridge.dispatch.frozen import FrozenPrograms
from bridge.lowering import LoweredCall
from partition import MinCut

__all__ = [
    "Tuned",
    "Tuner",
    "before_compiling",
    "has_other_choices",
    "installed_tuner",
    "keep_tuned",
    "kept_tuned",
    "strategy_of",
    "tuned_of",
    "tuning_key",
    "with_choices",
]

_KIND = "tuning"

_LOG = channel("tune")


@dataclass(frozen=True)
class Tuned:
    """What a tuning has kept.

    Attributes:
        choices: made in it.
        date: when it ended, as in ``"2026-05-31"``.
        log: the name of its log; empty if there was none.
        before, after: seconds of a step without and with the choices, by turns in one process.
        key: that it is kept by.
    """

    choices: Choices
    date: str
    log: str
    before: float
    after: float
    key: str = field(default="", compare=False)

    def __str__(self) -> str:
        where = f", {self.log}" if self.log else ""
        return f"tuned {self.date}{where}: {1e3 * self.before:.3f} ms a step before, {1e3 * self.after:.3f} ms after"


def tuning_key(lowered: LoweredCall, backend: Backend, frozen: bool) -> str | None:
    """The key of a call's choices, of a call lowered with the strategy that the user asks for; ``None``: it has none.

    ``frozen``: whether the module's tensors are constants of it.
    """
    if lowered.captured.extents is not None:
        return None
    try:
        functions = [_digest(lowered.forward_source)]
        if lowered.differentiable:
            functions.append(_digest(lowered.backward_source(lowered.expected)))
    except ValueError as error:  # a literal that no text holds
        _LOG.info("%s cannot be tuned: %s", lowered.captured.module_name, error)
        return None
    return of_this_package(_KIND, backend.machine(), CompileOptions.current(backend).key, functions, frozen)


def kept_tuned(lowered: LoweredCall, backend: Backend, frozen: bool) -> Tuned | None:
    """The choices that are kept for a call; ``None`` where it was not tuned, or not to any avail."""
    store = current_store()
    if not store.has(_KIND):  # who has tuned nothing pays nothing
        return None
    key = tuning_key(lowered, backend, frozen)
    return None if key is None else tuned_of(key)


def tuned_of(key: str) -> Tuned | None:
    """What is kept by a key."""
    found = current_store().get(_KIND, key)
    if found is None:
        return None
    try:
        plain = json.loads(found.parts["tuned"])
        return Tuned(**{**plain, "choices": Choices.of_plain(plain["choices"]), "key": key})
    except (ValueError, KeyError, TypeError) as error:
        _LOG.warning("choices on disk are ignored: %r", error)
        return None


def keep_tuned(tuned: Tuned, name: str) -> None:
    """Puts choices into the disk cache; every later entry of their key is compiled with them."""
    plain = {**vars(tuned), "choices": tuned.choices.plain()}
    current_store().put(_KIND, tuned.key, {"tuned": json.dumps(plain).encode()}, name)


def has_other_choices(entry: Entry) -> bool:
    """Whether other choices are kept for an entry's call than those that it was compiled with."""
    if entry.bound is not None or not isinstance(entry.lowered, LoweredCall) or not current_store().has(_KIND):
        return False
    if entry.tuned is not None:
        return tuned_of(entry.tuned.key) != entry.tuned
    return kept_tuned(entry.lowered, entry.backend, entry.is_frozen) is not None


def strategy_of(choices: Choices, default: Any) -> Any:
    """The partition's strategy: the one chosen, or the default."""
    chosen = choices.partition
    return default if chosen is None else chosen if isinstance(chosen, str) else MinCut(budget=chosen)


def with_choices(entry: Entry, choices: Choices) -> Entry:
    """Another entry of the same lowered call and guard, compiled with choices; nothing is captured.

    Not for choices of a partition, which is an earlier stage's.
    """
    backend = entry.backend.choosing(choices)
    frozen = entry.guard.frozen
    programs = None if frozen is None else FrozenPrograms(entry.lowered, backend, frozen.tensors)
    found = Entry(entry.guard, entry.lowered, backend, programs)
    found.partition, found.backend = entry.partition, entry.backend
    return found


class Tuner(Protocol):
    """What is asked before an entry is compiled; it may tune the call."""

    def __call__(
        self, module: nn.Module, args: tuple, kwargs: dict[str, Any], *, partition: Any, backend: Backend, freeze: bool
    ) -> None:
        """Tunes ``module(*args, **kwargs)``."""


_TUNERS: list[Tuner] = []


@contextmanager
def before_compiling(tuner: Tuner) -> Iterator[None]:
    """While this is active, the tuner is asked before each entry of one size is compiled."""
    _TUNERS.append(tuner)
    try:
        yield
    finally:
        _TUNERS.remove(tuner)


def installed_tuner() -> Tuner | None:
    """The one that is to be asked now."""
    return _TUNERS[-1] if _TUNERS else None


def _digest(function: Any) -> str:
    return function.digest if isinstance(function, KeptFunction) else digest_of(function)
