"""Training graph: the record of a run → an fx graph of its operators, with writes in place, views and ``detach``.

Grad modes are metadata of nodes (:func:`bridge.capture.passes.alias_analysis.told`); later passes make nodes of them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import fx

from bridge.base.errors import Unsupported, UnsupportedModule, line_of
from bridge.base.torch_fakes import stand_in
from bridge.base.torch_internals import FakeTensorMode, OpOverload, aten, storage_id
from bridge.base.torch_shapes import SYMBOLIC, fixed
from bridge.capture.passes.alias_analysis import MEMORY, OF, PATH, ROW, STOPPED, WHERE
from bridge.capture.passes.decompositions import formulas
from bridge.capture.recorder import READS
from bridge.capture.rows import Record, Row, ValueRef, mapped, may_write, values_in
from bridge.capture.symbolic_sizes import NotTranslatedError

_OTHER_FORMULA = "is decomposed, and has another derivative then than autograd's formula"


@dataclass
class TrainingGraph:
    """A graph whose placeholders are inputs of the run, free tensors and literals.

    Attributes:
        graph: its output node returns the results.
        placeholders: name of each placeholder but the literals' → its value.
        literals: tensors of numbers written in the code, by the name of their placeholder.
        mode: the mode of the fake tensors in ``meta["val"]``.
    """

    graph: fx.Graph
    placeholders: dict[str, int]
    literals: dict[str, torch.Tensor]
    mode: FakeTensorMode


def training_graph(
    record: Record,
    fakes: dict[int, torch.Tensor],
    mode: FakeTensorMode,
    names: Mapping[int, str],
    order: tuple[Sequence[int], Sequence[int]],
    results: Sequence[Any],
    grad: bool,
) -> TrainingGraph:
    """Builds the training graph of a record.

    Args:
        fakes: a fake tensor for each value, in ``mode``.
        names: a placeholder name for each input of the run, by its value.
        order: the values that get a placeholder, in order: (values before the literals, values after them).
        results: the leaves of the result, with :class:`ValueRef` for tensors.
        grad: whether grad mode is on around the call.
    """
    return _Builder(record, fakes, mode, grad).build(names, order, results)


class _Builder:
    def __init__(self, record: Record, fakes: dict[int, torch.Tensor], mode: FakeTensorMode, grad: bool):
        self.record, self.fakes, self.grad = record, fakes, grad
        self.made = TrainingGraph(fx.Graph(), {}, {}, mode)
        self.env: dict[int, fx.Node] = {}
        self.literals: dict[int, fx.Node] = {}
        self.untracked: set[int] = set()
        self.names: set[str] = set()
        self.sizes = SizeNodes(self.made.graph)

    def build(self, names: Mapping[int, str], order: Any, results: Sequence[Any]) -> TrainingGraph:
        before, behind = order
        free = {number: f"c_free_{count}" for count, number in enumerate(self.record.free)}
        for number in before:
            self._input(free[number] if number in free else names[number], number)
        used = {number for row in self.record.rows for number in values_in((row.args, row.kwargs))}
        for count, number in enumerate(each for each in self.record.literals if each in used | set(values_in(results))):
            node = self.literals[number] = self._placeholder(f"c_lifted_tensor_{count}", number)
            self.made.literals[node.name] = self.record.literals[number]
        for number in behind:
            self._input(names[number], number)
        for index, row in enumerate(self.record.rows):
            self._row(index, row)
        self.made.graph.output(tuple(self._node(each) if isinstance(each, ValueRef) else None for each in results))
        return self.made

    def _input(self, name: str, number: int) -> None:
        node = self.env[number] = self._placeholder(name, number)
        self.made.placeholders[node.name] = number

    def _placeholder(self, name: str, number: int) -> fx.Node:
        node = self.made.graph.placeholder(name)
        if name not in self.names:
            node.name = name  # also "input", which fx takes for no name
        self.names.add(node.name)
        node.meta["val"] = stand_in(self.fakes[number], self.made.mode)
        node.meta["val"].requires_grad_(self.record.forms[number].requires_grad)
        node.meta[MEMORY] = [storage_id(self.fakes[number])]
        self.sizes.read_from(node)
        return node

    def _node(self, value: ValueRef) -> fx.Node:
        if value.number not in self.env:  # a literal: each call has a tensor of its own
            literal = self.literals[value.number]
            self.env[value.number] = made = self.made.graph.call_function(aten.lift_fresh_copy.default, (literal,))
            made.meta["val"] = literal.meta["val"]
        return self.env[value.number]

    def _row(self, index: int, row: Row) -> None:
        operands = () if may_write(row.op) else set(values_in((row.args, row.kwargs)))
        if row.op in READS or (isinstance(row.results, ValueRef) and row.results.number in operands):
            return  # it gives a number, or does nothing: it returns its operand
        args, kwargs = mapped((row.args, row.kwargs), ValueRef, self._node)
        args, kwargs = mapped((args, kwargs), SYMBOLIC, self.sizes.of)
        name = row.op.overloadpacket.__name__ if isinstance(row.op, OpOverload) else str(row.op)
        if name.endswith("_backward") and row.op in formulas():
            if not self.untracked.isdisjoint(values_in((row.args, row.kwargs))):
                raise UnsupportedModule("", [Unsupported(str(row.op), line_of(row.where), _OTHER_FORMULA)])
        node = self.made.graph.create_node("call_function", row.op, args, kwargs, name=name)
        node.meta.update(self._told(index, row))
        node.meta[OF] = row.op
        if self.grad and not row.grad:
            node.meta[STOPPED] = True
        if isinstance(row.results, ValueRef):
            node.meta["val"] = self.fakes[row.results.number]
            self.env[row.results.number] = node
        elif isinstance(row.results, tuple | list):
            node.meta["val"] = mapped(row.results, ValueRef, lambda value: self.fakes[value.number])
            follows = self.grad and any(self.record.forms[number].requires_grad for number in values_in(row.results))
            for place, each in enumerate(row.results):
                if isinstance(each, ValueRef) and each.number not in operands:
                    self.env[each.number] = item = self.made.graph.call_function(operator.getitem, (node, place))
                    item.meta.update(node.meta, val=self.fakes[each.number])
                    form = self.record.forms[each.number]
                    if follows and form.dtype.is_floating_point and not form.requires_grad:  # a mean, a buffer
                        self.untracked.add(each.number)
                        self.env[each.number] = detached = self.made.graph.call_function(aten.detach.default, (item,))
                        detached.meta.update(item.meta)
        else:
            node.meta["val"] = row.results

    def _told(self, index: int, row: Row) -> dict[str, Any]:
        told = {ROW: index, PATH: row.path, WHERE: row.where and line_of(row.where)}
        return {key: value for key, value in told.items() if value not in (None, "")}


# Size nodes: torch's symbolic numbers → nodes of a graph that compute them from the sizes of its inputs.


class SizeNodes:
    """The size nodes of a graph under construction: one for each expression, inserted at its first use."""

    def __init__(self, graph: fx.Graph):
        self._graph = graph
        self._known: dict[Any, fx.Node] = {}
        self._places: list[tuple[torch.SymInt, fx.Node, int]] = []

    def read_from(self, placeholder: fx.Node) -> None:
        """Makes the sizes of an input available to expressions."""
        value = placeholder.meta.get("val")
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt):
                self._places.append((size, placeholder, dim))

    def of(self, value: Any) -> fx.Node | float:
        """Symbolic number → the node that computes it, or :class:`NotTranslatedError`; other numbers are returned."""
        return self._node(fixed(value)) if isinstance(value, SYMBOLIC) else value

    def _node(self, expr: Any) -> Any:
        if expr.is_Integer:
            return int(expr)
        if expr.is_Float:
            return float(expr)
        if expr not in self._known:
            self._known[expr] = self._made(expr)
        return self._known[expr]

    def _made(self, expr: Any) -> fx.Node:
        for place, (size, tensor, dim) in enumerate(self._places):
            if fixed(size) == expr and (expr.is_Symbol or place <= self._latest(expr)):
                return self._call(aten.sym_size.int, tensor, dim)
        if expr.is_Symbol:  # from a size that is a multiple of it
            for size, tensor, dim in self._places:
                factor = fixed(size) / expr
                if factor.is_Integer:
                    return self._call(operator.floordiv, self._call(aten.sym_size.int, tensor, dim), int(factor))
        make = _OPERATORS.get(type(expr).__name__)
        if make is None:
            raise NotTranslatedError(expr)
        args = [self._node(arg) for arg in expr.args]
        if len(args) > 1:
            return reduce(lambda a, b: self._call(make, a, b), args)
        return self._call(make, *args)

    def _latest(self, expr: Any) -> int:
        """The index in ``_places`` of the size that makes the last symbol of an expression known."""
        known = {fixed(size): place for place, (size, *_) in reversed([*enumerate(self._places)])}
        return max(known.get(symbol, len(self._places)) for symbol in expr.free_symbols)

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
