"""Steps along the columns of a row: an extent, a number or the launch's → loops of vectors, and of the scalar tail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx import Expr

from bridge.compile.codegen.arguments import LaunchArguments
from bridge.compile.loop_ir.access import Number

__all__ = ["Steps", "block_of", "left_over", "narrowed", "vectors_and_tail"]

_NARROWEST = 4
"""Lanes of a vector below which the columns behind the vectors are walked one by one."""


@dataclass(frozen=True)
class Steps:
    """A loop along the last columns: ``trips`` times ``copies`` steps of so many lanes, from column ``first`` on."""

    lanes: int
    copies: int
    first: Expr
    trips: Expr


def block_of(number: LaunchArguments, rows: Expr, block: int) -> tuple[Expr, Expr]:
    """Rows of a block of a chunk of column reductions, and whether there are several (:mod:`..schedule.order`)."""
    several = tirx.And(number(2 * block) < rows, tirx.const(block > 0, "bool"))
    return tirx.Select(several, number(block), tirx.max(rows, number(1))), several


def vectors_and_tail(
    number: LaunchArguments, extent: Number, lanes: int, widths: Sequence[int]
) -> tuple[list[Steps], list[Steps]]:
    """The loop of all vectors in turns of so many, for each of the widths; that of the columns behind the vectors.

    Of an extent that is a number, loops without a turn are left out.
    """
    if isinstance(extent, int):
        vectors, tail = divmod(extent, lanes)
        turns = [Steps(lanes, width, number(0), number(vectors // width)) for width in widths if vectors]
        return turns, [Steps(1, 1, number(extent - tail), number(tail))] if tail else []
    vectors = tirx.truncdiv(number(extent), number(lanes))
    whole = vectors * number(lanes)
    turns = [Steps(lanes, width, number(0), tirx.truncdiv(vectors, number(width))) for width in widths]
    return turns, [Steps(1, 1, whole, number(extent) - whole)]


def narrowed(number: LaunchArguments, extent: Number, lanes: int, tail: Sequence[Steps]) -> list[Steps]:
    """The columns behind the vectors, as many of them as make a narrower vector at once: an attention
    over 328 columns takes a seventh less than with the last 8 one by one."""
    left = extent % lanes if isinstance(extent, int) else 0
    width = 1 << max(left.bit_length() - 1, 0)
    if width < _NARROWEST:
        return list(tail)
    first = extent - left
    narrow = Steps(width, 1, number(first), number(1))
    return [narrow, Steps(1, 1, number(first + width), number(left - width))] if left > width else [narrow]


def left_over(number: LaunchArguments, extent: Number, lanes: int, width: int) -> list[Steps]:
    """The loop of the vectors behind the last turn of an extent that is the launch's; a number has none."""
    if isinstance(extent, int) or width == 1:
        return []
    vectors = tirx.truncdiv(number(extent), number(lanes))
    left = tirx.truncmod(vectors, number(width))
    return [Steps(lanes, 1, (vectors - left) * number(lanes), left)]
