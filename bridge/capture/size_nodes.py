"""Size nodes: torch's symbolic numbers → nodes of a graph that compute them from the sizes of its inputs."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import fx

from bridge.base.torch_internals import aten
from bridge.base.torch_shapes import SYMBOLIC, fixed

__all__ = ["NoSizeNodeError", "SizeNodes"]


class NoSizeNodeError(ValueError):
    """A number that the sizes of the graph's inputs do not give."""


class SizeNodes:
    """The size nodes of a graph that is being made: one for each expression, where it is first needed."""

    def __init__(self, graph: fx.Graph):
        self._graph = graph
        self._known: dict[Any, fx.Node] = {}
        self._places: list[tuple[torch.SymInt, fx.Node, int]] = []

    def read_from(self, placeholder: fx.Node) -> None:
        """Takes the sizes of an input for known."""
        value = placeholder.meta.get("val")
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt):
                self._places.append((size, placeholder, dim))

    def of(self, value: Any) -> fx.Node | float:
        """What computes a symbolic number; a number that is none stays. :class:`NoSizeNodeError` if nothing does."""
        made = self._node(fixed(value)) if isinstance(value, SYMBOLIC) else value
        return made

    def _node(self, expr: Any) -> Any:
        if expr.is_Integer:
            return int(expr)
        if expr.is_Float:
            return float(expr)
        if expr not in self._known:
            self._known[expr] = self._made(expr)
        return self._known[expr]

    def _made(self, expr: Any) -> fx.Node:
        for size, tensor, dim in self._places:
            if fixed(size) == expr:
                return self._call(aten.sym_size.int, tensor, dim)
        if expr.is_Symbol:  # of what is a multiple of it
            for size, tensor, dim in self._places:
                factor = fixed(size) / expr
                if factor.is_Integer:
                    return self._call(operator.floordiv, self._call(aten.sym_size.int, tensor, dim), int(factor))
        make = _OPERATORS.get(type(expr).__name__)
        if make is None:
            raise NoSizeNodeError(expr)
        args = [self._node(arg) for arg in expr.args]
        if len(args) > 1:
            return reduce(lambda a, b: self._call(make, a, b), args)
        return self._call(make, *args)

    def _call(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        made = self._graph.call_function(target, args)
        made.meta["val"] = target(*fx.map_arg(args, lambda arg: arg.meta["val"]))
        return made


_OPERATORS: dict[str, Callable[..., Any]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Pow": operator.pow,
    "PowByNatural": operator.pow,
    "FloatPow": operator.pow,
    "IntTrueDiv": operator.truediv,
    "FloatTrueDiv": operator.truediv,
    "ToFloat": torch.sym_float,
    "OpaqueUnaryFn_sqrt": math.sqrt,
    "FloorToInt": math.floor,
    "TruncToInt": math.trunc,
    "CeilToInt": math.ceil,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
}
