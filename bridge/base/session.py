"""Session: what this process remembers of its work, by kind, in one object that can forget it."""

from __future__ import annotations

from typing import Protocol, TypeVar

__all__ = ["SESSION", "Session"]


class _Clearable(Protocol):
    def clear(self) -> None: ...


Cache = TypeVar("Cache", bound=_Clearable)


class Session:
    """The caches of a process. What only describes the machine, torch's version or a table of rules is none of them.

    Example:
        >>> session = Session()
        >>> squares = session.cache("squares", {})
        >>> squares[2] = 4
        >>> session.reset("squares")
        >>> squares
        {}
    """

    def __init__(self, *kinds: str) -> None:
        self._caches: dict[str, list[_Clearable]] = {kind: [] for kind in kinds}  # whose rooms may be imported later

    def cache(self, kind: str, made: Cache) -> Cache:
        """A cache that is one of the session's from now on."""
        self._caches.setdefault(kind, []).append(made)
        return made

    def reset(self, *kinds: str) -> None:
        """Empties the caches of these kinds, all of them if none is named; what is in use stays alive with its users.

        ``"programs"`` have their kernels and the memory that no run is using with them; ``"choices"`` are what was
        measured; ``"lowerings"`` calls that were lowered; ``"complaints"`` warnings that are said once; ``"stores"``
        the disk cache by its settings.

        Raises:
            KeyError: there is no such kind.
        """
        for kind in kinds or tuple(self._caches):
            for each in self._caches[kind]:
                each.clear()


SESSION = Session("programs", "choices", "lowerings", "complaints", "stores")
"""Of this process."""
