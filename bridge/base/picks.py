"""Picks: places → a function in C that takes the elements at these places of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

__all__ = ["picker"]


def picker(places: Sequence[int]) -> Callable[[Any], Sequence[Any]]:
    """What takes the elements at these places of a list or tuple, as a sequence."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))
