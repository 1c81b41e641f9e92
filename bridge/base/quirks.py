"""Quirks: what one operator or one version of torch, or one library, does that no rule covers → a table
(``python -m bridge.quirks``).

A quirk is declared where it is handled. When a new torch comes, this table says where to look.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.torch_version import TorchVersion

__all__ = ["QUIRKS", "Quirk", "applies", "quirk", "table"]

T = TypeVar("T")

QUIRKS: list[Quirk] = []
"""In the order in which their files were imported."""


@dataclass(frozen=True)
class Quirk:
    """One of them.

    Attributes:
        operators: the functions or operators that it is about, as in ``"torch.istft"``.
        reason: what torch does there, in a sentence.
        test: the test that fails without the handler: a file, or ``file::test``.
        handler: dotted name of what handles it.
        since, until: versions of torch for which it is needed: from ``since`` on, before ``until``; empty: no bound.
        library: whose it is, if it is not torch's.
    """

    operators: tuple[str, ...]
    reason: str
    test: str
    handler: str
    since: str = ""
    until: str = ""
    library: str = ""

    @property
    def versions(self) -> str:
        """In words."""
        bounds = [f"from {self.since}"] * bool(self.since) + [f"before {self.until}"] * bool(self.until)
        return self.library or " ".join(bounds) or "all"

    @property
    def applies(self) -> bool:
        """Whether it is needed with this version of torch."""
        return applies(self.since, self.until)


def applies(since: str = "", until: str = "") -> bool:
    """Whether this version of torch lies in a range."""
    now = TorchVersion(torch.__version__)
    return (not since or now >= TorchVersion(since)) and (not until or now < TorchVersion(until))


def quirk(
    *operators: str, reason: str, test: str, since: str = "", until: str = "", library: str = ""
) -> Callable[[T], T]:
    """A decorator of a handler, or of a function of another form: declares the quirk that it handles.

    Example:
        >>> @quirk("torch.istft", reason="asks for numbers on its way", test="tests/bridge/aten/test_any_operator.py")
        ... def istft(...): ...
    """

    def declare(handler: T) -> T:
        name = f"{getattr(handler, '__module__', '?')}.{getattr(handler, '__qualname__', '?')}"
        QUIRKS.append(Quirk(operators, reason, test, name, since, until, library))
        return handler

    return declare


def table(rows: list[Quirk] | None = None) -> str:
    """The table as Markdown."""
    lines = ["| operator | torch | what it does | handled by | test |", "|---|---|---|---|---|"]
    for each in sorted(QUIRKS if rows is None else rows, key=lambda row: row.operators):
        mark = each.versions if each.applies else f"{each.versions} (not this one)"
        cells: tuple[Any, ...] = ", ".join(each.operators), mark, each.reason, each.handler, each.test
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
