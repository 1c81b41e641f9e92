"""Calls of library functions that have several forms: what their time depends on, as plain data.

A form is another function of :mod:`bridge.library`, of the same arguments, that gives the same results to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bridge.compile.loop_ir.graph import LibraryCall, LoopCall
from bridge.library import FORMS, TensorAt

__all__ = ["CallShape", "call_of_plain"]


@dataclass(frozen=True)
class CallShape:
    """A class of calls.

    Attributes:
        name: of the function.
        operands: element type, extents and strides of each tensor.
        arguments: in order: numbers, lists of them, and ``"#0"``, ``"#1"``, … for the tensors.
    """

    name: str
    operands: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    arguments: tuple

    @classmethod
    def of(cls, call: object) -> CallShape | None:
        """``None`` for a node that is no such call, or whose sizes vary."""
        if not isinstance(call, LibraryCall) or isinstance(call, LoopCall) or call.name not in FORMS:
            return None
        operands = tuple((each.dtype, tuple(each.view.shape), tuple(each.view.strides)) for each in call.operands)
        arguments = tuple(str(each) if isinstance(each, TensorAt) else each for each in call.attrs)
        numbers = [number for _, *sizes in operands for size in sizes for number in size]
        numbers += [number for each in arguments for number in (each if isinstance(each, tuple) else (each,))]
        return cls(call.name, operands, arguments) if all(isinstance(each, int | str) for each in numbers) else None

    def __str__(self) -> str:
        sizes = " x ".join("x".join(map(str, shape)) for _, shape, _ in self.operands)
        return f"{self.name} {sizes} {self.arguments[len(self.operands) :]}"


def call_of_plain(plain: Sequence) -> CallShape:
    """A call from what ``dataclasses.astuple`` gives of it, also after JSON."""
    name, operands, arguments = map(_frozen, plain)
    return CallShape(str(name), operands, arguments)


def _frozen(plain: Any) -> Any:
    return tuple(map(_frozen, plain)) if isinstance(plain, list | tuple) else plain
