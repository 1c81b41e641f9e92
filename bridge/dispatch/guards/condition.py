"""A condition of a guard: what is read, what is expected, which values mean the same, and the words for a failure.

Generated check: the conditions of an entry → one Python function of a call, which gives its inputs or ``None``.

The function is straight-line code over named objects, so a matching call is one Python frame, and what is printed is
what runs. Asked to be ``thorough``, the same function takes what only means the same, and raises the first failure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, count
from operator import is_
from typing import Any

import torch

from bridge.base.errors import GuardFailure

__all__ = ["Check", "CheckSource", "Condition", "differs"]


@dataclass(frozen=True, eq=False)
class Condition:
    """One condition on all the places that it speaks of: every argument, every submodule, every attribute.

    Values are read for all places at once, so that the quick path (:meth:`holds`) is a loop that runs in C; the
    thorough one (:meth:`failure`) compares the same values one by one.

    Attributes:
        name: tells it from the other conditions of a guard.
        read: what is guarded → a value per place, as many as expected. May raise ``KeyError`` where one is gone.
        expected: the values at the time of compiling.
        explain: the place, the expected value and the present one → the failure in the user's words.
        exact: the quick path's comparison, a function in C. It never takes what ``same`` does not.
        same: whether a value means what the expected one means.
        quick: a quicker test of the source that holds only if all values are the expected ones, where there is one.

    Example:
        >>> names = ["a", "b"]
        >>> explain = lambda place, then, now: GuardFailure(MODULE, f"{names[place]} changed")
        >>> condition = Condition("training", lambda modules: [m.training for m in modules], [True, True], explain)
        >>> condition.holds([nn.Tanh(), nn.Tanh()]), condition.failure([nn.Tanh(), nn.Tanh().eval()]).reason
        (True, 'b changed')
    """

    name: str
    read: Callable[[Any], Iterable[Any]]
    expected: Sequence[Any]
    explain: Callable[[int, Any, Any], GuardFailure]
    exact: Callable[[Any, Any], bool] = is_
    same: Callable[[Any, Any], bool] = is_
    quick: Callable[[Any], bool] | None = None

    def holds(self, source: Any) -> bool:
        """The quick path: whether every value is exactly the expected one."""
        return self.quick(source) if self.quick else all(map(self.exact, self.read(source), self.expected))

    def failure(self, source: Any) -> GuardFailure | None:
        """The thorough path: the first place whose value does not mean the same, in words; ``None`` if all do."""
        for place, (now, then) in enumerate(zip(self.read(source), self.expected, strict=True)):
            if not self.same(now, then):
                return self.explain(place, then, now)
        return None


def _agree(failure: GuardFailure | None) -> None:
    if failure is not None:
        raise failure


def differs(stage: int, field: str, then: Any, now: Any) -> GuardFailure:
    """The failure of a field that has another value."""
    return GuardFailure(stage, field, f"compiled for {then}, called with {now}")


Check = Callable[..., "list[torch.Tensor] | None"]
"""``check(module, args, kwargs, thorough=False)`` → inputs of the compiled code; ``None``: the call needs a closer
look, which raises :class:`GuardFailure` instead."""

_WORDS = re.compile(r"[A-Za-z]\w*|\d+")
_HEAD = "def check(module, args, kwargs, thorough=False):"


class CheckSource:
    """The source of a check in the making.

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
        """The name by which the source knows an object: words in ``hint``, numbered where that is taken."""
        hint = "_".join(_WORDS.findall(hint))
        names = chain([hint], (f"{hint}_{i}" for i in count(2)))
        found = next(name for name in names if name not in self._namespace)
        self._namespace[found] = value
        return found

    def add(self, *lines: str) -> None:
        """Appends statements."""
        self._lines += lines

    def refuse(self, condition: str, failure: str | None = None) -> None:
        """A call for which the expression is true needs a closer look: at ``failure``, an expression for what the call
        does not meet, ``None`` where it only looks otherwise."""
        self.add(f"if {condition}:")
        if failure is None:
            self.add("    return None")
        else:
            self.add("    if not thorough:", "        return None", f"    agree({failure})")

    def returned(self, result: str) -> Check:
        """The function; its text is attribute ``source``."""
        text = "\n".join([_HEAD, *(f"    {line}" for line in (*self._lines, f"return {result}")), ""])
        exec(compile(text, "<check>", "exec"), self._namespace)
        check = self._namespace.pop("check")
        check.source = text
        return check
