"""Many contents: mutable objects as they were → whether all of them still are, with one look at all lists."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

from bridge.state.reachable import Contents

__all__ = ["ManyContents"]


class ManyContents:
    """Contents that no count of writes tells about, and that every call looks at therefore.

    Lists that are what they were in the very objects, which nearly all are, are told in C: a global of a library may be
    a dictionary of hundreds (transformers notes there in which packages a name is found).
    """

    def __init__(self, contents: Sequence[Contents]):
        self._lists = [each for each in contents if each.held_list is not None]
        self._others = [each for each in contents if each.held_list is None]
        self._held = [each.held_list for each in self._lists]
        values = [each.values for each in self._lists]
        self._lengths: list[int] = list(map(len, values))
        self._values: list[Any] = list(chain.from_iterable(values))

    def __bool__(self) -> bool:
        return bool(self._lists or self._others)

    def unchanged(self) -> bool:
        """Whether each is, see :meth:`~bridge.state.reachable.Contents.unchanged`."""
        held = self._held
        if list(map(len, held)) != self._lengths or not all(map(is_, chain.from_iterable(held), self._values)):
            if not all(each.unchanged() for each in self._lists):
                return False
        return all(each.unchanged() for each in self._others)
