"""Late mapping: values by name that are read when they are asked for: functions whose machine code is enough."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeVar

__all__ = ["LateMapping", "some_of"]

Value = TypeVar("Value")


class LateMapping(Mapping[str, Value]):
    """``read``: what makes each value, by its name; each is made once."""

    def __init__(self, read: Mapping[str, Callable[[], Value]]):
        self._read = read
        self._found: dict[str, Value] = {}

    def __getitem__(self, name: str) -> Value:
        if name not in self._found:
            self._found[name] = self._read[name]()
        return self._found[name]

    def __contains__(self, name: object) -> bool:
        return name in self._read

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


def some_of(values: Mapping[str, Value], names: Collection[str]) -> Mapping[str, Value]:
    """Those of a mapping that are among ``names``, in its order; nothing is read for it."""
    if isinstance(values, LateMapping):
        return LateMapping({name: lambda name=name: values[name] for name in values if name in names})
    return {name: value for name, value in values.items() if name in names}
