"""Flow: what a code object reads of what was there before, and how each is used."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

__all__ = ["CallSite", "DataFlow", "Source"]


@lru_cache(maxsize=8192)
def _places(source: tuple) -> frozenset[int]:
    """The calls whose results a source, or what is written, comes from."""
    if source and source[0] in ("result", "called"):
        return frozenset(source[1:])
    inner = (each for each in source if isinstance(each, tuple | frozenset))
    return frozenset().union(*(_places(tuple(each) if isinstance(each, frozenset) else each) for each in inner))


Source = tuple
"""``(kind, ...)``, see :func:`bridge.guards.recording.Reads.values_of` for each."""


@dataclass(frozen=True)
class CallSite:
    """One place that calls.

    Attributes:
        function: sources of what is called.
        args, kwargs: of each argument; ``None``: they are not known one by one (``f(*args)``).
    """

    function: frozenset
    args: tuple[frozenset, ...] | None
    kwargs: tuple[tuple[str, frozenset], ...] = ()

    @property
    def arguments(self) -> frozenset:
        return frozenset().union(*(self.args or ()), *(each for _, each in self.kwargs))


@dataclass
class DataFlow:
    """What a code object reads.

    Attributes:
        reads: sources that are looked up: names, attributes, items.
        wholes: sources whose contents are looked at: iterated, compared (true), tested, handed to an operator.
        calls: by the offset of the instruction.
        writes: what is written: ``("attr", source of the object, name)``, ``("item", source of the container, sources
            of the key)``, ``("global", name)``, ``("cell", name)``.
        operators: special methods that operators in it look up.
        loose: names of attributes that are read of values from nowhere known.
        identities: sources that are compared by ``is``.
        iterated: sources whose next values are taken, if they are iterators.
        relations: values and the classes that ``match`` and ``except`` compare them with.
        compared: results of calls and operators that are compared.
        offsets: of its instructions.
        by_results: whether an entry is looked up by a key that another function gives.
    """

    reads: dict[Source, None] = field(default_factory=dict)
    wholes: dict[Source, bool] = field(default_factory=dict)
    calls: dict[int, CallSite] = field(default_factory=dict)
    writes: dict[tuple, None] = field(default_factory=dict)
    operators: set[str] = field(default_factory=set)
    loose: set[str] = field(default_factory=set)
    identities: dict[Source, None] = field(default_factory=dict)
    iterated: dict[Source, None] = field(default_factory=dict)
    compared: set[Source] = field(default_factory=set)
    relations: dict[int, tuple[frozenset, frozenset]] = field(default_factory=dict)
    by_results: bool = False
    offsets: Sequence[int] = ()
    _about: dict[int, DataFlow] = field(default_factory=dict)

    def about(self, place: int) -> DataFlow:
        """The part that depends on the result of the call there."""
        if place not in self._about:
            part = self._about[place] = DataFlow()
            for name in ("reads", "wholes", "identities", "iterated", "writes"):
                held = getattr(self, name)
                setattr(part, name, {source: held[source] for source in held if place in _places(source)})
            used = {at: (*call.function, *call.arguments) for at, call in self.calls.items()}
            part.calls = {at: self.calls[at] for at in used if any(place in _places(source) for source in used[at])}
        return self._about[place]

    def at(self, last: int) -> int:
        """The offset of the instruction that a frame is at, which may point at a cache behind it."""
        return self.offsets[bisect_right(self.offsets, last) - 1]
