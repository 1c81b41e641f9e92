"""Quirks: exceptions of one operator, torch version or library that no rule covers → a table
(``python -m bridge.quirks``).

A quirk is declared at its handler. For a new torch, this table lists the places to check.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.torch_version import TorchVersion

T = TypeVar("T")

QUIRKS: list[Quirk] = []
"""In the order of their files' imports."""


@dataclass(frozen=True)
class Quirk:
    """An exception that a handler covers.

    Attributes:
        operators: its functions or operators, as in ``"torch.istft"``.
        reason: torch's behaviour, in a sentence.
        test: the test that fails without the handler: a file, or ``file::test``.
        handler: dotted name of the handler.
        since, until: versions of torch that need it: from ``since`` on, before ``until``; empty: no bound.
        library: the library with this behaviour, if it is not torch.
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
        """The versions, in words."""
        bounds = [f"from {self.since}"] * bool(self.since) + [f"before {self.until}"] * bool(self.until)
        return self.library or " ".join(bounds) or "all"

    @property
    def applies(self) -> bool:
        """Whether the present version of torch needs it."""
        return applies(self.since, self.until)


def applies(since: str = "", until: str = "") -> bool:
    """Whether the present version of torch lies in a range."""
    now = TorchVersion(torch.__version__)
    return (not since or now >= TorchVersion(since)) and (not until or now < TorchVersion(until))


def quirk(
    *operators: str, reason: str, test: str, since: str = "", until: str = "", library: str = ""
) -> Callable[[T], T]:
    """A decorator of a handler: declares the quirk that it handles.

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
