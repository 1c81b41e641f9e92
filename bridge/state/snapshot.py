"""Python state that a run of ``forward`` may change: everything that the guards would look at, noted before the run.

A compiled call runs no Python. A counter in a settings object, a list that collects losses, a global, a variable of
an enclosing function, Python's random generator: what a run changes at every call a compiled call would not change,
so such a module is refused, and what tracing changed is put back.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from bridge.base.threads import is_alone
from bridge.base.torch_internals import set_grad_enabled
from bridge.state.code import CodeGuard
from bridge.state.module import Snapshot, own_attributes
from bridge.state.reachable import Contents, Reached

__all__ = ["PythonState", "generators_put_back", "modes_put_back", "moved_generators"]


class PythonState(Snapshot):
    """A snapshot that looks further: into what attributes hold, and at what the modules' code refers to."""

    def __init__(self, root: nn.Module):
        super().__init__(root)
        modules = dict(root.named_modules())
        reached = Reached(registered=frozenset(modules.values()))
        for path, module in modules.items():
            for name, value in own_attributes(module):
                reached.add(f"{path}.{name}" if path else name, value)
        self._inside: list[Contents] = reached.contents
        self._code = CodeGuard(dict.fromkeys((*map(type, modules.values()), *reached.kinds)), reached.functions)

    def changes(self) -> list[str]:
        """What was set, deleted or changed in place since: ``"self.log"``, ``"global 'COUNT'"``."""
        inside = [contents.place for contents in self._inside if not contents.unchanged()]
        attributes = [f"self.{name}" for name in sorted({*super().changes(), *inside})]
        return list(dict.fromkeys((*attributes, *self._code.differences())))

    def restore(self) -> None:
        """Puts back attributes, contents of containers, fields of objects, globals, variables of enclosing scopes."""
        super().restore()
        for contents in self._inside:
            contents.restore()
        self._code.restore()


def _numpy_random() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)


def _numpy_state() -> tuple[Any, ...] | None:
    numpy = _numpy_random()
    return numpy.get_state() if numpy else None


def _comparable(state: tuple[Any, ...] | None) -> Any:
    return state and (state[0], state[1].tobytes(), *state[2:])


@contextmanager
def moved_generators() -> Iterator[list[str]]:
    """Collects the names of Python's and numpy's global generators that what runs inside draws from or seeds.

    Where there are other threads, one of them may have done it. Of Python's, the caller hears what this thread does.
    """
    moved: list[str] = []
    python, numpy = random.getstate(), _comparable(_numpy_state())
    yield moved
    if random.getstate() != python and is_alone():
        moved.append("random")
    if _comparable(_numpy_state()) != numpy:
        moved.append("numpy.random")


@contextmanager
def generators_put_back() -> Iterator[None]:
    """Undoes what runs inside do to Python's and numpy's global generators, which other threads must not draw from."""
    alone, python, numpy = is_alone(), random.getstate(), _numpy_state()
    try:
        yield
    finally:
        if alone and is_alone():  # else this would make the numbers come again that another one has drawn
            random.setstate(python)
            if numpy is not None:
                _numpy_random().set_state(numpy)


@contextmanager
def modes_put_back() -> Iterator[list[str]]:
    """Undoes what runs inside do to torch's modes and leave so, and collects the names of those modes."""
    before = {mode: get() for mode, (get, _) in _MODES.items()}
    changed: list[str] = []
    try:
        yield changed
    finally:
        changed += [mode for mode, (get, _) in _MODES.items() if get() != before[mode]]
        for mode in changed:
            _MODES[mode][1](before[mode])


_MODES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "grad mode": (torch.is_grad_enabled, set_grad_enabled),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "deterministic algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "autocast": (partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
}
