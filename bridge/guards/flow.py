"""Flow: what a code object reads of what was there before, and how each is used."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CallSite", "DataFlow", "Source"]

Source = tuple
"""``(kind, ...)``, see :func:`bridge.guards.recording.Reads.values_of` for each."""


@dataclass(frozen=True)
class CallSite:
    """One place that calls.

    Attributes:
        function: sources of what is called.
        args, kwargs: of each argument; ``None``: they are not known one by one (``f(*args)``).
        spread: then, what they may be.
    """

    function: frozenset
    args: tuple[frozenset, ...] | None
    kwargs: tuple[tuple[str, frozenset], ...] = ()
    spread: frozenset = frozenset()

    @property
    def arguments(self) -> frozenset:
        return self.spread.union(*(self.args or ()), *(each for _, each in self.kwargs))


@dataclass
class DataFlow:
    """What a code object reads.

    Attributes:
        reads: sources that are looked up: names, attributes, items.
        variables: of locals that are assigned, by name: the sources of what is.
        wholes: sources whose contents are looked at: iterated, compared or shown (true), tested, handed to an operator.
        calls: by the offset of the instruction.
        writes: what is written: ``("attr", source of the object, name)``, ``("item", source of the container, sources
            of the key)``, ``("global", name)``, ``("cell", name)``.
        operators: special methods that operators in it look up.
        identities: sources that are compared by ``is``.
        iterated: sources whose next values are taken, if they are iterators.
        relations: values and the classes that ``match`` and ``except`` compare them with.
        compared: results of calls and operators that are compared.
        offsets: of its instructions.
        by_results: whether an entry is looked up by a key that another function gives.
    """

    reads: dict[Source, None] = field(default_factory=dict)
    variables: dict[str, dict[Source, None]] = field(default_factory=dict)
    wholes: dict[Source, bool] = field(default_factory=dict)
    calls: dict[int, CallSite] = field(default_factory=dict)
    writes: dict[tuple, None] = field(default_factory=dict)
    operators: set[str] = field(default_factory=set)
    identities: dict[Source, None] = field(default_factory=dict)
    iterated: dict[Source, None] = field(default_factory=dict)
    compared: set[Source] = field(default_factory=set)
    relations: dict[int, tuple[frozenset, frozenset]] = field(default_factory=dict)
    by_results: bool = False
    offsets: Sequence[int] = ()
    _places: dict[Any, frozenset[int]] = field(default_factory=dict)
    _parts: dict[int, DataFlow] = field(default_factory=dict)

    def places(self, source: Any) -> frozenset[int]:
        """The calls whose results a source, or what is written, comes from."""
        if source not in self._places:
            found, waiting, seen = set(), [source], {source}
            while waiting:
                each = waiting.pop()
                if type(each) is tuple and each and each[0] in ("result", "called"):
                    found.update(each[1:])
                    continue
                inner = self.variables.get(each[1], ()) if type(each) is tuple and each[:1] == ("var",) else each
                new = [part for part in inner if type(part) in (tuple, frozenset) and part not in seen]
                seen.update(new)
                waiting += new
            self._places[source] = frozenset(found)
        return self._places[source]

    def about(self, place: int) -> DataFlow:
        """The part that depends on the result of the call there."""
        if place not in self._parts:
            part = self._parts[place] = DataFlow()
            for name in ("reads", "wholes", "identities", "iterated", "writes"):
                held = getattr(self, name)
                setattr(part, name, {source: held[source] for source in held if place in self.places(source)})
            for name, held in self.variables.items():
                if found := {source: None for source in held if place in self.places(source)}:
                    part.variables[name] = found
            used = {at: (*call.function, *call.arguments) for at, call in self.calls.items()}
            part.calls = {at: self.calls[at] for at in used if any(place in self.places(source) for source in used[at])}
        return self._parts[place]

    def at(self, last: int) -> int:
        """The offset of the instruction that a frame is at, which may point at a cache behind it."""
        return self.offsets[bisect_right(self.offsets, last) - 1]
