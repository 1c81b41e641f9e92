"""Recorded places: each place that a run read, with its first value → the places that changed; restores them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bridge.base.errors import Unsupported, UnsupportedModule, is_user_file, line_of, line_of_forward
from bridge.base.torch_autograd import checkpoint_frame
from bridge.guards.kinds import PLAIN, unwatched
from bridge.guards.watched import Answer, Place

__all__ = ["Changes", "read_later", "reads_later"]

_thread = threading.local()


@contextmanager
def read_later() -> Iterator[None]:
    """While active, reads of this thread count as reads of eager's backward, not of its forward."""
    _thread.later = True
    try:
        yield
    finally:
        _thread.later = False


def reads_later() -> bool:
    """Whether reads now are also reads of eager's backward: it runs, or a checkpoint that it will run again."""
    return getattr(_thread, "later", False) or checkpoint_frame() is not None


class Changes:
    """The places that a run read.

    Args:
        instead: (a function under ``lru_cache``, a lookup of its cached results) → the function called in its place;
            ``None``: no replacement.

    Attributes:
        items: the places, each once. ``first``: their values when they were first read, by the same keys.
        by_imports: values that a first import in forward has set, by the same keys.
        later: keys of places that eager's backward reads as well. ``written``: keys of places that forward sets.
        attributes: attributes of the tree's modules that eager's backward reads.
        refused: the refusal of a side effect outside of the call that cannot be undone.
    """

    def __init__(self, instead: Callable[..., Any] | None):
        self._instead = instead
        self._replaced: list[tuple[Any, Any, Any]] = []
        self.items: dict[tuple, Any] = {}
        self.first: dict[tuple, Any] = {}
        self.by_imports: dict[tuple, Any] = {}
        self.later, self.written = set[tuple](), set[tuple]()
        self.attributes: dict[tuple, Any] = {}
        self.refused: UnsupportedModule | None = None

    def _note(self, key: tuple, item: Any) -> Any:
        """Notes a place and its value in the run, once: key, item → the item of that key."""
        if key not in self.items:
            self.items[key] = item
            self.first[key] = self._read(item)
        if reads_later():
            self.later.add(key)
        return self.items[key]

    def _read(self, item: Any) -> Any:
        """The value of a place in the run, with the original cached functions in it."""
        replaced = [(each, made) for each, _, made in self._replaced if each.read() is made]
        self.put_back_functions()
        try:
            return item.read(run=True)
        finally:
            for each, made in replaced:
                each.write(made)

    def ask(self, function: Any, args: tuple, kwargs: dict[str, Any], words: str) -> None:
        """Notes a function in C that returns hidden state; the guard calls it again."""
        owner = getattr(function, "__self__", None)
        of = id(function) if owner is None else id(owner)
        given = [repr(each) if type(each) in PLAIN else id(each) for each in (*args, *kwargs.values())]
        key = "asked", of, getattr(function, "__name__", ""), *given, *kwargs
        if key not in self.items:
            self.items[key] = Answer(function, args, kwargs, Place("", f"what {words} gives"))
        module = str(getattr(function, "__module__", ""))
        if reads_later() and not module.startswith("torch"):  # a checkpoint restores torch's modes itself
            self.later.add(key)

    def refuse(self, what: str, where: str, reason: str, hint: str) -> None:
        """Ends the run before a side effect that cannot be undone; raises :class:`UnsupportedModule`."""
        if self.refused is None:
            file, _, line = where.rpartition(":")
            if line.isdigit():
                where = line_of((file, int(line))) if is_user_file(file) else line_of_forward()
            self.refused = UnsupportedModule("", [Unsupported(what, where, reason, hint)])
        raise self.refused

    def refuse_unwatched(self, value: Any, what: str, where: str) -> None:
        """Ends the run where forward looks into an object of a class in C that has no row in the types table."""
        if (kind := unwatched(type(value))) is not None:
            reason = f"a {kind.__module__}.{kind.__name__}: its state cannot be watched"
            self.refuse(what or "an object", where, reason, "read it outside of forward, and pass what was read")

    def changes(self) -> list[str]:
        """Places whose values differ from their first ones, in words."""
        found = (self.items[key] for key, then in self.first.items() if self.items[key].differs(then, run=True))
        return list(dict.fromkeys(item.place.changed for item in found))

    def state(self) -> dict[tuple, Any]:
        """The present values of all places."""
        return {key: self.items[key].read() for key in self.first}

    def imported(self, state: dict[tuple, Any]) -> None:
        """Notes the changes since ``state`` of a first import, which stay: another call does not repeat it."""
        for key, then in state.items():
            if self.items[key].differs(then):
                self.by_imports[key] = self._read(self.items[key])

    @property
    def earlier(self) -> dict[tuple, Any]:
        """The value of each place before the run, with the changes by imports."""
        return self.first | self.by_imports

    @contextmanager
    def unchanged(self) -> Iterator[list[str]]:
        """While active, cached functions stay replaced; afterwards restores all places and lists the changed ones."""
        state, changed = self.state(), []
        for item, _, made in self._replaced:
            item.write(made)
        try:
            yield changed
        finally:
            self.put_back_functions()  # first: a container that holds one is compared with all its contents
            changed += [str(item.place) for item in self.restore(state)]

    def put_back_functions(self) -> None:
        """Puts the original cached functions back under their names."""
        for item, value, made in self._replaced:
            if item.read() is made:
                item.write(value)

    def cached_function(self, value: Any) -> Any:
        """The original of a replaced cached function; any other object itself."""
        return next((own for _, own, made in self._replaced if made is value), value)

    def _replace(self, item: Any, value: Any) -> None:
        """Replaces a function under ``lru_cache``, under one name, for the time of the run."""
        alone = self._instead is None or getattr(item, "running", None) is not None
        made = None if alone else self._instead(value, self.kept)
        if made is not None:
            self._replaced.append((item, value, made))
            item.write(made)

    def restore(self, state: dict[tuple, Any] | None = None) -> list[Any]:
        """Restores all places to their first values, or to ``state``; returns the places that held another value."""
        found = []
        for key, then in (self.earlier if state is None else state).items():
            item = self.items[key]
            if getattr(item, "running", None) is not None:  # a copy, which ends with the run
                continue
            if item.differs(then):
                item.write(then)
                found.append(item)
        return found
