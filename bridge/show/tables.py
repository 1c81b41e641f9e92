"""Tables as text: rows of cells → aligned lines, cut to a terminal's width unless everything is wanted."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["WIDTH", "cut", "more", "table"]

#: Characters of a line, and of a cell, in the short form.
WIDTH, _CELL = 118, 34


def more(everything: Sequence, shown: Sequence, what: str) -> list[str]:
    """A line that tells how many were left out; no line if none were."""
    left = len(everything) - len(shown)
    return [f"    ... {left} more {what}"] if left else []


def cut(line: str, full: bool) -> str:
    """A line of at most ``WIDTH`` characters unless ``full``."""
    return line if full or len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def _tail(cell: str) -> str:
    return cell if len(cell) <= _CELL else "..." + cell[3 - _CELL :]


def table(head: tuple[str, ...], rows: list[tuple[str, ...]], full: bool, right: tuple[int, ...]) -> list[str]:
    """Rows under a head, columns aligned (``right``: to the right); long cells keep their ends unless ``full``."""
    if not rows:
        return []
    if not full:
        last = len(head) - 1
        rows = [tuple(cell if i == last else _tail(cell) for i, cell in enumerate(row)) for row in rows]
    everything = [head, *rows]
    widths = [max(len(row[column]) for row in everything) for column in range(len(head))]
    widths[-1] = 0
    lines = []
    for row in everything:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append(cut(f"    {'  '.join(cells)}".rstrip(), full))
    return lines
