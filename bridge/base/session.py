"""Session: all in-memory caches of this process, by kind, in one object that can empty them."""

from __future__ import annotations

from typing import Protocol, TypeVar


class _Clearable(Protocol):
    def clear(self) -> None: ...


Cache = TypeVar("Cache", bound=_Clearable)


class Session:
    """The caches of a process, except constant facts: the machine's, torch's version's, tables of rules.

    Example:
        >>> session = Session()
        >>> squares = session.cache("squares", {})
        >>> squares[2] = 4
        >>> session.reset("squares")
        >>> squares
        {}
    """

    def __init__(self, *kinds: str) -> None:
        self._caches: dict[str, list[_Clearable]] = {kind: [] for kind in kinds}  # importers may come later

    def cache(self, kind: str, made: Cache) -> Cache:
        """Adds a cache to the session; returns it."""
        self._caches.setdefault(kind, []).append(made)
        return made

    def reset(self, *kinds: str) -> None:
        """Empties the caches of these kinds, or all caches; entries in use stay alive.

        ``"programs"``: programs, kernels and idle memory; ``"choices"``: results of measurements; ``"lowerings"``:
        lowered calls; ``"complaints"``: warnings that are given once; ``"stores"``: the disk cache by its settings.

        Raises:
            KeyError: an unknown kind.
        """
        for kind in kinds or tuple(self._caches):
            for each in self._caches[kind]:
                each.clear()


SESSION = Session("programs", "choices", "lowerings", "complaints", "stores")
"""The session of this process."""
