"""Size nodes: expressions of sizes → nodes of a graph that compute them from the sizes of its inputs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import fx

from bridge.base.torch_internals import aten
from bridge.base.torch_shapes import fixed
from bridge.capture.passes.call_kinds import is_of_sizes

__all__ = ["NoSizeNodeError", "SizeNodes", "is_of_sizes"]


class NoSizeNodeError(ValueError):
    """A size that the extents of the graph's inputs do not give."""


class SizeNodes:
    """The size nodes of a graph that is being made: one for each expression, where it is first needed."""

    def __init__(self, graph: fx.Graph):
        self._graph = graph
        self._known: dict[Any, fx.Node] = {}
        self._places: dict[Any, tuple[fx.Node, int]] = {}

    def read_from(self, placeholder: fx.Node) -> None:
        """Takes the extents of an input for sizes."""
        value = placeholder.meta.get("val")
        for dim, extent in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(extent, torch.SymInt):
                self._places.setdefault(fixed(extent), (placeholder, dim))

    def node(self, expr: Any) -> fx.Node | int:
        """What computes an integer expression. :class:`NoSizeNodeError` if nothing does."""
        if expr.is_Integer:
            return int(expr)
        if expr not in self._known:
            if expr in self._places:
                tensor, dim = self._places[expr]
                self._known[expr] = self._call(aten.sym_size.int, tensor, dim)
            else:
                make = _OPERATORS.get(type(expr).__name__)
                if make is None:
                    raise NoSizeNodeError(expr)
                args = [self.node(arg) for arg in expr.args]
                self._known[expr] = reduce(lambda a, b: self._call(make, a, b), args)
        return self._known[expr]

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
    "Max": torch.sym_max,
    "Min": torch.sym_min,
}
