"""Symbolic run: the second run of a call whose sizes vary → what the first one cannot tell: sizes as torch's symbols.

It is the run on fake tensors, whose arguments have a symbol for each dimension that varies; parameters have numbers.
Its rows at the sample's sizes are those of the first run. Whatever forward or torch asked about sizes on the way is a
condition in torch's environment, which becomes a guard (:mod:`bridge.capture.symbolic_sizes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from bridge.base.errors import Unsupported, UnsupportedModule, line_of
from bridge.base.torch_internals import FakeTensorMode, aten
from bridge.base.torch_recording import no_python_kernels
from bridge.base.torch_shapes import expression, hint, is_decided, symbolic_fake
from bridge.capture.draw_recorder import DrawRecorder
from bridge.capture.dynamic_shapes import DynamicDim
from bridge.capture.observation import Draw
from bridge.capture.rows import Record, Row, Value, at_hints, mapped, renamed
from bridge.capture.size_formulas import FORMULAS

__all__ = ["Symbols", "symbolic_leaf"]

_SLICE = aten.slice.Tensor
_END = 2**63 - 1
_SHAPE_OF_NUMBERS = "the shape of what comes out depends on the numbers in a tensor, and sizes vary"


def symbolic_leaf(mode: FakeTensorMode, leaf: torch.Tensor, index: int, dims: Sequence[DynamicDim]) -> torch.Tensor:
    """A fake tensor for a leaf of the arguments, with a symbol of its own for each of its dimensions that varies."""
    varying = {each.dimension for each in dims if each.leaf == index}
    made = symbolic_fake(mode, leaf.detach(), varying, f"input_{index}") if varying else mode.from_tensor(leaf.detach())
    return made.requires_grad_(leaf.requires_grad)


class Symbols:
    """What a run on symbolic sizes knows of the run on real numbers, and what it writes down.

    Attributes:
        draws: with symbolic sizes.
        lines: by the place of a condition among torch's, the user's line that the operator is from which asked it.
    """

    def __init__(self, real: Record, mode: FakeTensorMode):
        self._real = real
        self._environment = mode.shape_env
        self.draws: list[Draw] = []
        self.lines: dict[int, str] = {}

    def recording(self, inputs: Sequence[torch.Tensor]) -> DrawRecorder:
        """While active, draws are recorded."""
        return DrawRecorder(self.draws, lambda op, reason: None, inputs)

    def is_whole_slice(self, op: Any, operands: tuple, args: tuple, record: Record, known: Row | None) -> bool:
        """Whether a call is a part that is the whole at the sample's sizes, and no row of the run on real numbers.

        ``x[:, None]`` and the like: torch's indexing leaves out what a static size shows to be the whole.
        """
        if op is not _SLICE or operands[1] or type(operands[0][0]) is not Value:
            return False
        x, dim, start, end, step = (*args, *(0, 0, _END, 1)[len(args) - 1 :])
        size = hint(x.shape[dim])
        if (start is not None and hint(start)) or hint(step) != 1 or (end is not None and hint(end) < size):
            return False
        if known is None:
            return True
        same = known.args[:1] == renamed(operands[0][:1], record)
        if known.op is _SLICE:
            return not (same and at_hints(operands[0][1:]) == known.args[1:])
        return not (known.op is aten.alias.default and same)

    def result(self, func: Any, args: tuple, kwargs: dict[str, Any], known: Row | None, where: Any) -> Any:
        """What an operator gives.

        Raises:
            UnsupportedModule: where numbers decide the shape.
        """
        before = len(self._environment.guards)
        forms = [] if known is None else [self._real.forms[v.number] for v in _values(known.results)]
        draws = known is not None and known.draws[0] != known.draws[1]
        formula = FORMULAS.get(func)
        with no_python_kernels() if draws else nullcontext():  # some take apart what draws as a whole
            result = NotImplemented if formula is None or known is None else formula(forms, *args, **kwargs)
            if result is NotImplemented:
                result = func(*args, **kwargs)
        if len(forms) == 1 and isinstance(result, torch.Tensor) and result.dtype is not forms[0].dtype:
            result = result.to(forms[0].dtype)  # torch's formula in Python passes autocast's cast by
        if where is not None:
            self.lines.update(dict.fromkeys(range(before, len(self._environment.guards)), line_of(where)))
        mapped(result, torch.Tensor, lambda tensor: self._is_decided(func, tensor, where))
        return result

    def fixed(self, size: int | torch.SymInt, line: str) -> int:
        """The sample's number for a size, which calls have to have from now on; where the user's code fixes it."""
        before = len(self._environment.guards)
        number = int(size)
        self.lines.update(dict.fromkeys(range(before, len(self._environment.guards)), line))
        return number

    def _is_decided(self, func: Any, tensor: torch.Tensor, where: Any) -> None:
        for size in tensor.shape:
            if isinstance(size, torch.SymInt) and not is_decided(self._environment, expression(size)):
                line = "forward" if where is None else line_of(where)
                raise UnsupportedModule("", [Unsupported(str(func), line, _SHAPE_OF_NUMBERS)])


def _values(tree: Any) -> list[Value]:
    found: list[Value] = []
    mapped(tree, Value, found.append)
    return found
