"""Generated check: the conditions of an entry → one Python function of a call, which gives its inputs or ``None``.

The function is straight-line code over named objects, so a matching call is one Python frame, and what is printed is
what runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import chain, count
from typing import Any

import torch
from torch import nn

__all__ = ["Check", "CheckSource"]

Check = Callable[[nn.Module, tuple, dict[str, Any]], "list[torch.Tensor] | None"]
"""Module, positional and keyword arguments → inputs of the compiled code; ``None``: the call needs a closer look."""

_WORDS = re.compile(r"[A-Za-z]\w*|\d+")
_HEAD = "def check(module, args, kwargs):"


class CheckSource:
    """The source of a check in the making.

    Example:
        >>> source = CheckSource()
        >>> source.require(f"len(args) == {source.name(1, 'count')}")
        >>> source.returned("args[0]")(None, (5,), {})
        5
    """

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._namespace: dict[str, Any] = {}

    def name(self, value: Any, hint: str) -> str:
        """The name by which the source knows an object: words in ``hint``, numbered where that is taken."""
        hint = "_".join(_WORDS.findall(hint))
        names = chain([hint], (f"{hint}_{i}" for i in count(2)))
        found = next(name for name in names if name not in self._namespace)
        self._namespace[found] = value
        return found

    def add(self, *lines: str) -> None:
        """Appends statements."""
        self._lines += lines

    def require(self, condition: str) -> None:
        """A call for which the expression is false needs a closer look."""
        self.refuse(f"not {condition}")

    def refuse(self, condition: str) -> None:
        """A call for which the expression is true needs a closer look."""
        self.add(f"if {condition}:", "    return None")

    def returned(self, result: str) -> Check:
        """The function; its text is attribute ``source``."""
        text = "\n".join([_HEAD, *(f"    {line}" for line in (*self._lines, f"return {result}")), ""])
        exec(compile(text, "<check>", "exec"), self._namespace)
        check = self._namespace.pop("check")
        check.source = text
        return check
