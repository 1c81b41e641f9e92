"""Counters: integers on the module that each call of forward counts up by a constant, ``self.calls += 1``.

A compiled call runs no Python; it adds the constant afterwards. That is the same function of the old value if forward
does nothing else with it: so a call is observed, on fake tensors, in a twin of the module in which a stand-in that can
only be added to takes each counter's place. Any other use of it raises, and the module is refused as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from bridge.base.checkpoint_frames import checkpoint_frame
from bridge.capture.fake_run import fake_run
from bridge.capture.number_reader import given
from bridge.capture.numbers import NotArithmeticError, refusing_all_use, twin_of
from bridge.capture.readings import Reading
from bridge.capture.symbolic_sizes import SymbolicSizes
from bridge.capture.thread_isolation import capturing
from bridge.state import PythonState, module_tensors

__all__ = ["Counter", "counters_of", "may_be_counters"]


@dataclass(frozen=True)
class Counter:
    """An attribute that each call counts up.

    Attributes:
        path, name: its module, as a dotted path, and its name.
        step: what a call adds; may be negative.
    """

    path: str
    name: str
    step: int


def counters_of(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    changed: Sequence[str],
    readings: Sequence[Reading] = (),
    sizes: SymbolicSizes | None = None,
) -> list[Counter] | None:
    """The counters that these attributes are; ``None`` if one of them is something else, or is read.

    Args:
        changed: what forward changes, as ``PythonState.changes`` calls it: ``"self.calls"``, ``"self.encoder.calls"``.
        readings: numbers that forward takes out of tensors.
        sizes: those of the arguments that vary; a step that is made of them is no constant.
    """
    if not may_be_counters(module, changed):
        return None
    places = _places(changed)
    before = PythonState(module)
    if before.mentions("type"):  # a stand-in is of another one
        return None
    twin = twin_of(module)
    owners = [twin.get_submodule(path).__dict__ for path, _ in places]
    for index, (owner, (_, name)) in enumerate(zip(owners, places, strict=True)):
        owner[name] = _Counted(0, index)
    try:
        with capturing(twin), given(twin, readings):
            run = fake_run(twin, *module_tensors(twin), args, kwargs, sizes)
    except Exception:  # noqa: BLE001 - whatever forward raises where a counter is read
        before.restore()
        return None
    ends = [owner.get(name) for owner, (_, name) in zip(owners, places, strict=True)]
    is_own = [type(end) is _Counted and end.place == index for index, end in enumerate(ends)]
    returned = any(type(output.value) is _Counted for output in run.observation.outputs)
    if before.changes() or returned or not all(is_own):
        before.restore()
        return None
    return [Counter(path, name, end.step) for (path, name), end in zip(places, ends, strict=True)]


def may_be_counters(module: nn.Module, changed: Sequence[str]) -> bool:
    """Whether all of these are integers that modules hold, which :func:`counters_of` looks at more closely."""
    places = _places(changed)
    if len(places) < len(changed) or "forward" in module.__dict__:
        return False
    try:
        held = [module.get_submodule(path).__dict__.get(name) for path, name in places]
    except AttributeError:  # inside something that is no module
        return False
    return all(type(value) is int for value in held)


def _places(changed: Sequence[str]) -> list[tuple[str, str]]:
    """Path and name of those that are attributes."""
    return [what.removeprefix("self.").rpartition(".")[::2] for what in changed if what.startswith("self.")]


@refusing_all_use
class _Counted:
    """Stands for a counter while forward is observed: its old value, which nobody knows, and what was added to it."""

    __slots__ = ("place", "step")

    def __init__(self, step: int, place: int):
        self.step = step
        self.place = place

    @property
    def __class__(self) -> type:
        return int

    def __add__(self, other: Any) -> _Counted:
        if type(other) is not int:
            raise NotArithmeticError("a counter to which something else than a constant is added")
        if checkpoint_frame() is not None:
            raise NotArithmeticError("a counter that eager's backward counts up again")
        return _Counted(self.step + other, self.place)

    __radd__ = __add__

    def __sub__(self, other: Any) -> _Counted:
        return self + -other if type(other) is int else NotImplemented
