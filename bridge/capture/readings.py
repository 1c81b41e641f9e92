"""Readings: numbers that forward takes out of tensors (``bool``, ``.item()``, ``torch.equal``) → what a call compares.

Python code that reads a number goes on as that number tells it to. So a record holds for calls that read the same
numbers. They are noted in the run on real numbers, given to the code in the run on fake ones, and become results of the
graph, which a compiled call compares with what was noted (:mod:`bridge.aten.number_checks`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bridge.base.errors import TORCH_DIR, is_user_file, line_of
from bridge.capture.prepared_twin import PreparedTwin

__all__ = ["Reading", "ReadsDifferError", "frozen", "line_of_reading", "numbers_of", "same_numbers"]


class ReadsDifferError(Exception):
    """Forward reads other numbers on fake tensors than on real ones; with the user's line."""


@dataclass(frozen=True)
class Reading:
    """A number, or a list of them, that forward read.

    Attributes:
        where: ``file:line: code``, the user's line if there is one.
        dtype: of the numbers as they are compared: a flag is ``torch.bool`` whatever it was read from.
        count: how many.
        value: the numbers that Python got, lists as tuples.
        is_size: whether a result is as long as the number says (:mod:`bridge.capture.counted_sizes`).
        is_least: whether that is mostly the least length that was asked for, which other calls have as well.
    """

    where: str
    dtype: torch.dtype
    count: int
    value: Any
    is_size: bool = False
    is_least: bool = False

    @property
    def key(self) -> tuple:
        """Equal only for the same numbers read at the same line; zeros have a sign, and nan is nan."""
        return self.where, self.dtype, self.count, repr(self.value)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()  # what is read, even if it is written later


def _flag(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.dtype is torch.bool else tensor != 0


def _integer(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.int64) if tensor.is_floating_point() else tensor.clone()


def _equal(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    return (one == other).all() if one.shape == other.shape else None


def _allclose(one: torch.Tensor, other: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    return torch.isclose(one, other, *rest, **options).all()


numbers_of: dict[str, Callable[..., torch.Tensor | None]] = {
    "item": _plain,
    "__int__": _integer,
    "__bool__": _flag,
    "equal": _equal,
    "allclose": _allclose,
}
"""What a function or an operator reads, by its name: its arguments → the numbers that decide about its answer; ``None``
where shapes alone do."""


def same_numbers(some: Sequence[Reading], others: Sequence[Reading]) -> bool:
    """Whether two runs read the same, bit by bit."""
    return [reading.key for reading in some] == [reading.key for reading in others]


def frozen(value: Any) -> Any:
    """Numbers with tuples in the place of lists."""
    return tuple(map(frozen, value)) if isinstance(value, list) else value


_OWN = (os.path.dirname(os.path.dirname(__file__)),)
_OWN += tuple(os.path.join(TORCH_DIR, name) for name in ("overrides.py", "_ops.py", "_library"))
"""Where code between a line that reads and the recorder is from."""


def line_of_reading() -> str:
    """The user's line inside forward, or torch's own where forward is torch's."""
    innermost, frame = None, sys._getframe(2)
    while frame is not None and frame.f_code is not PreparedTwin.__call__.__code__:
        file = frame.f_code.co_filename
        if is_user_file(file):
            innermost = frame
            break
        if innermost is None and not file.startswith(_OWN):
            innermost = frame
        frame = frame.f_back
    if innermost is None:
        return "forward"
    line = line_of((innermost.f_code.co_filename, innermost.f_lineno))
    return line[len(TORCH_DIR) - len("torch") :] if line.startswith(TORCH_DIR) else line
