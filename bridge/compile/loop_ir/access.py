"""Index arithmetic of a loop nest as data: numbers that code is made for, and arguments that each launch passes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Access", "Argument", "Number", "Term", "counting_dtype"]


@dataclass(frozen=True)
class Argument:
    """The integer at that index of those that a launch passes."""

    index: int


Number = int | Argument


@dataclass(frozen=True)
class Term:
    """``row // below % extent * stride``; 1 below means no division, extent ``None`` no remainder."""

    below: Number
    extent: Number | None
    stride: Number


@dataclass(frozen=True)
class Access:
    """Index of the element of a row at given column coordinates: ``offset + terms + coordinates * columns``."""

    offset: Number
    terms: tuple[Term, ...]
    columns: tuple[Number, ...]


def counting_dtype(*counts: int) -> str:
    """The integers that count so many, and a few thousand more: the last threads of a launch are behind the end."""
    return "int32" if max(counts) < 2**31 - 2**13 else "int64"
