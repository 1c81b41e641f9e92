"""Operator trace: the operators that a call runs → rows that can be compared with those of another call.

Two calls on inputs of the same layout whose traces are equal compute the same function of those inputs: the same
operators, with the same constants, on the same tensors (told apart by identity, whatever they are called), under the
same grad mode, draws included. :mod:`bridge.lowering.reuse` rests on this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bridge.base.devices import HOST
from bridge.base.torch_internals import unset_fake_temporarily
from bridge.base.torch_shapes import SYMBOLIC, environment, expression, is_decided
from bridge.state import constant_key

__all__ = ["OpTrace"]

_LITERALS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


class OpTrace:
    """Records operators as they run.

    Attributes:
        rows: hashable, one per operator: the operator, grad mode, its arguments, its results.
        complete: whether everything that had a part is in ``rows``; false where an operator took something that
            cannot be compared: a tensor that is neither an input nor made before, a generator, a number that a tensor
            gives.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]):
        self.rows: list[tuple] = []
        self.complete = True
        self._tensors = list(inputs)  # kept alive, so that no id is used twice
        self._index = {id(tensor): index for index, tensor in enumerate(self._tensors)}

    def arguments(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple:
        """What an operator is about to be called with."""
        literal = func in _LITERALS
        return tuple(self._key(arg, literal) for arg in (*args, *kwargs.items()))

    def add(self, func: Any, arguments: tuple, result: Any) -> None:
        """An operator has run: ``arguments`` are from :meth:`arguments`."""
        self.rows.append((func, torch.is_grad_enabled(), arguments, self._results(result)))

    def finish(self, *left_behind: Any) -> tuple | None:
        """The whole trace, ending with what the call left behind: its results, and the tensors that it put somewhere.

        ``None`` if it is not complete.
        """
        arguments = tuple(self._key(value, literal=False) for value in left_behind)
        self.rows.append(("end", torch.is_grad_enabled(), arguments, None))
        return tuple(self.rows) if self.complete else None

    def _key(self, value: Any, literal: bool) -> Any:
        if isinstance(value, torch.Tensor):
            index = self._index.get(id(value))
            if index is not None:
                return "tensor", index, value.requires_grad
            if literal and type(value) is torch.Tensor:  # torch.tensor([...]) inside forward
                return "literal", value.dtype, tuple(value.shape), _bytes(value)
            self.complete = False
            return "unknown"
        if isinstance(value, tuple | list):
            return type(value), tuple(self._key(item, literal) for item in value)
        return self._constant(value)

    def _results(self, result: Any) -> Any:
        if isinstance(result, torch.Tensor):
            if id(result) not in self._index:
                self._index[id(result)] = len(self._tensors)
                self._tensors.append(result)
            return self._index[id(result)]
        if isinstance(result, tuple | list):
            return tuple(map(self._results, result))
        return self._constant(result)  # a number that Python code may act on

    def _constant(self, value: Any) -> Any:
        """Of a symbolic number, what it is for all sizes."""
        if isinstance(value, SYMBOLIC) and is_decided(environment(value), expression(value)):
            return "symbolic", type(value), expression(value)
        key = constant_key(value)
        if key is None:
            self.complete = False
        return key


def _bytes(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor that has some, in spite of the fake mode."""
    with unset_fake_temporarily():
        return tensor.detach().reshape(-1).view(torch.uint8).to(HOST).numpy().tobytes()
