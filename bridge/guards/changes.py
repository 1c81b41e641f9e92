"""Changes: the places that a run read, each noted once with what it held → which of them it changed, and back again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bridge.base.errors import Unsupported, UnsupportedModule
from bridge.guards.kinds import PLAIN, unwatched
from bridge.guards.watched import Answer, Place

__all__ = ["Changes", "read_later", "reads_later"]

_thread = threading.local()


@contextmanager
def read_later() -> Iterator[None]:
    """While active, in this thread: what is read is read by eager's backward, not by its forward."""
    _thread.later = True
    try:
        yield
    finally:
        _thread.later = False


def reads_later() -> bool:
    return getattr(_thread, "later", False)


class Changes:
    """The places that a run read.

    Args:
        instead: a function that keeps its results (``lru_cache``), and what gives what it keeps → what is called in its
            place; ``None``: itself.

    Attributes:
        items: the places, each once. ``first``: what they held when they were first read, by the same keys.
        later: keys of places that eager's backward reads, too.
        refused: what forward was about to do to something outside that cannot be put back.
    """

    def __init__(self, instead: Callable[..., Any] | None):
        self._instead = instead
        self._replaced: list[tuple[Any, Any, Any]] = []
        self.items: dict[tuple, Any] = {}
        self.first: dict[tuple, Any] = {}
        self.later: set[tuple] = set()
        self.refused: UnsupportedModule | None = None

    def _note(self, key: tuple, item: Any) -> Any:
        """Notes a place, and what it holds in the run, once: key, item → the item of that key."""
        if key not in self.items:
            self.items[key] = item
            self.first[key] = self._read(item)
        if reads_later():
            self.later.add(key)
        return self.items[key]

    def _read(self, item: Any) -> Any:
        """What a place holds in the run, with cached functions in it as they were before."""
        replaced = [(each, made) for each, _, made in self._replaced if each.read() is made]
        self.put_back_functions()
        try:
            return item.read(run=True)
        finally:
            for each, made in replaced:
                each.write(made)

    def ask(self, function: Any, args: tuple, kwargs: dict[str, Any], words: str) -> None:
        """A function in C that tells hidden state, which is asked again."""
        owner = getattr(function, "__self__", None)
        of = id(function) if owner is None else id(owner)
        given = [repr(each) if type(each) in PLAIN else id(each) for each in (*args, *kwargs.values())]
        key = "asked", of, getattr(function, "__name__", ""), *given, *kwargs
        if key not in self.items:
            self.items[key] = Answer(function, args, kwargs, Place("", f"what {words} gives"))
        if reads_later():
            self.later.add(key)

    def refuse(self, what: str, where: str, reason: str, hint: str) -> None:
        """Ends the run before it does what cannot be undone."""
        if self.refused is None:
            self.refused = UnsupportedModule("", [Unsupported(what, where, reason, hint)])
        raise self.refused

    def refuse_unwatched(self, value: Any, what: str, where: str) -> None:
        """Ends the run where forward looks into an object of a class in C that no row of the types table tells."""
        if (kind := unwatched(type(value))) is not None:
            reason = f"a {kind.__module__}.{kind.__name__}: its state cannot be watched"
            self.refuse(what or "an object", where, reason, "read it outside of forward, and pass what was read")

    def changes(self) -> list[str]:
        """Places that do not hold what they held when they were first read."""
        found = []
        for key, then in self.first.items():
            item = self.items[key]
            if item.differs(then, run=True):
                found.append(item.place.changed)
        return list(dict.fromkeys(found))

    def state(self) -> dict[tuple, Any]:
        """What all places hold now."""
        return {key: self.items[key].read() for key in self.first}

    @contextmanager
    def unchanged(self) -> Iterator[list[str]]:
        """While active, no cached function is called; then places hold what they held, and the list has changes."""
        state, changed = self.state(), []
        for item, _, made in self._replaced:
            item.write(made)
        try:
            yield changed
        finally:
            self.put_back_functions()  # first: a container that holds one is compared with all that is in it
            changed += [str(item.place) for item in self.restore(state)]

    def put_back_functions(self) -> None:
        """Names lead to cached functions again, as they did before the run."""
        for item, value, made in self._replaced:
            if item.read() is made:
                item.write(value)

    def cached_function(self, value: Any) -> Any:
        """The cached function in whose place one is called; any other object itself."""
        return next((own for _, own, made in self._replaced if made is value), value)

    def _replace(self, item: Any, value: Any) -> None:
        """A name of a function that keeps its results leads to another one, for the time of the run."""
        alone = self._instead is None or getattr(item, "running", None) is not None
        made = None if alone else self._instead(value, self.kept)
        if made is not None:
            self._replaced.append((item, value, made))
            item.write(made)

    def restore(self, state: dict[tuple, Any] | None = None) -> list[Any]:
        """Puts back what places held first, or in ``state``; gives the places that held something else."""
        found = []
        for key, then in (self.first if state is None else state).items():
            item = self.items[key]
            if getattr(item, "running", None) is not None:  # a copy's, which goes with the run
                continue
            if item.differs(then):
                item.write(then)
                found.append(item)
        return found
