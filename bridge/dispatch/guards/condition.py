"""Conditions of a guard → one generated Python function: a call → its inputs, or ``None``.

The function is straight-line code over named objects: a matching call costs one Python frame, and its printed source is
the code that runs. With ``thorough``, it also accepts equivalent values, and raises the first failure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import chain, count
from typing import Any

import torch

from bridge.base.errors import GuardFailure

__all__ = ["Check", "CheckSource", "differs"]


def _agree(failure: GuardFailure | None) -> None:
    if failure is not None:
        raise failure


def differs(stage: int, field: str, then: Any, now: Any) -> GuardFailure:
    """The failure of a field whose value differs."""
    return GuardFailure(stage, field, f"compiled for {then}, called with {now}")


Check = Callable[..., "list[torch.Tensor] | None"]
"""``check(module, args, kwargs, thorough=False)`` → inputs of the compiled code; ``None``: only the thorough check,
which raises :class:`GuardFailure`, can tell."""

_WORDS = re.compile(r"[A-Za-z]\w*|\d+")
_HEAD = "def check(module, args, kwargs, thorough=False):"


class CheckSource:
    """Builder of a check's source.

    Example:
        >>> source = CheckSource()
        >>> source.refuse(f"len(args) != {source.name(1, 'count')}")
        >>> source.returned("args[0]")(None, (5,), {})
        5
    """

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._namespace: dict[str, Any] = {"agree": _agree}

    def name(self, value: Any, hint: str) -> str:
        """Binds an object to a name in the source: the words of ``hint``, numbered if taken; returns the name."""
        hint = "_".join(_WORDS.findall(hint))
        names = chain([hint], (f"{hint}_{i}" for i in count(2)))
        found = next(name for name in names if name not in self._namespace)
        self._namespace[found] = value
        return found

    def add(self, *lines: str) -> None:
        """Appends statements."""
        self._lines += lines

    def refuse(self, condition: str, failure: str | None = None) -> None:
        """Makes the check return ``None`` if ``condition`` is true.

        ``failure``: expression that the thorough check evaluates instead: a :class:`GuardFailure` to raise, or ``None``
        if the values are equivalent. Without it, the thorough check returns ``None`` as well.
        """
        self.add(f"if {condition}:")
        if failure is None:
            self.add("    return None")
        else:
            self.add("    if not thorough:", "        return None", f"    agree({failure})")

    def returned(self, result: str) -> Check:
        """Compiles the check, which returns the expression ``result``; its attribute ``source`` is the text."""
        text = "\n".join([_HEAD, *(f"    {line}" for line in (*self._lines, f"return {result}")), ""])
        exec(compile(text, "<check>", "exec"), self._namespace)
        check = self._namespace.pop("check")
        check.source = text
        return check
