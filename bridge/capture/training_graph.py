"""Training graph: the record of a run → an fx graph of its operators, with writes in place, views and ``detach``.

Grad modes and autocast are metadata of its nodes: what autograd does not follow, since it ran without grad mode, reads
through ``detach``; :mod:`bridge.capture.passes.autocast` makes nodes of the casts.
"""

from __future__ import annotations

import linecache
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from bridge.base.torch_internals import FakeTensorMode, OpOverload, aten
from bridge.base.torch_shapes import SYMBOLIC
from bridge.capture.passes.alias_analysis import is_view, written
from bridge.capture.passes.autocast import autocast_at
from bridge.capture.passes.kinds import stand_in
from bridge.capture.recorder import READS
from bridge.capture.rows import Record, Row, Value, mapped
from bridge.capture.size_formulas import has_symbols
from bridge.capture.size_nodes import SizeNodes

__all__ = ["TrainingGraph", "training_graph"]


@dataclass
class TrainingGraph:
    """A graph whose placeholders are the run's inputs that it reads, literals behind them.

    Attributes:
        graph: its output node returns the results, then what was read.
        placeholders: of each input that is read, its place among the run's inputs → the node.
        literals: numbers written in the code, by the name of their placeholder.
        node_of_row: the node of each row that has one.
        mode: of the fake tensors in ``meta["val"]``.
    """

    graph: fx.Graph
    placeholders: dict[int, fx.Node]
    literals: dict[str, torch.Tensor]
    node_of_row: dict[int, fx.Node] = field(default_factory=dict)
    mode: FakeTensorMode | None = None


def training_graph(
    record: Record,
    fakes: dict[int, torch.Tensor],
    mode: FakeTensorMode,
    names: Sequence[str],
    results: Sequence[Any],
    ambient: tuple[bool, tuple[torch.dtype | None, bool]],
) -> TrainingGraph:
    """The graph of a record.

    Args:
        fakes: of each value a fake tensor, in ``mode``.
        names: a name for each input of the run, for placeholders.
        results: values that are returned, :class:`Value` for tensors.
        ambient: grad mode and autocast around the call.
    """
    return _Builder(record, fakes, mode, names, ambient).build(results)


class _Builder:
    def __init__(self, record, fakes, mode, names, ambient):
        self.record, self.fakes, self.names = record, fakes, names
        self.grad, self.autocast = ambient
        self.mode = mode
        self.made = TrainingGraph(fx.Graph(), {}, {}, mode=mode)
        self.env: dict[int, fx.Node] = {}
        self.sizes = SizeNodes(self.made.graph)

    def build(self, results: Sequence[Any]) -> TrainingGraph:
        graph = self.made.graph
        used = {number for row in self.record.rows for number in _values((row.args, row.kwargs))}
        used |= {each.number for each in results if isinstance(each, Value)}
        for index in range(self.record.inputs):
            if index in used or has_symbols(self.fakes[index]):
                self.made.placeholders[index] = self.env[index] = self._placeholder(self.names[index], index)
        for count, number in enumerate(self.record.free):
            if number in used:
                self.made.placeholders[number] = self.env[number] = self._placeholder(f"c_free_{count}", number)
        for count, number in enumerate(self.record.literals):
            if number in used:
                node = self._placeholder(f"c_literal_{count}", number)
                self.made.literals[node.name] = self.record.literals[number]
                self.env[number] = node
        for number in self.record.literals:
            if number in self.env:
                node = self.env[number]
                copied = graph.call_function(aten.lift_fresh_copy.default, (node,))
                copied.meta["val"] = node.meta["val"]
                self.env[number] = copied
        for index, row in enumerate(self.record.rows):
            self._row(index, row)
        graph.output(tuple(self.env[each.number] if isinstance(each, Value) else each for each in results))
        return self.made

    def _placeholder(self, name: str, number: int) -> fx.Node:
        node = self.made.graph.placeholder(name)
        if name not in {each.name for each in self.made.graph.nodes}:
            node.name = name  # also "input", which fx takes for no name
        fake, form = self.fakes[number], self.record.forms[number]
        node.meta["val"] = stand_in(fake, self.mode).requires_grad_(form.requires_grad)
        self.sizes.read_from(node)
        return node

    def _row(self, index: int, row: Row) -> None:
        if row.op in READS:
            return
        args, kwargs = mapped((row.args, row.kwargs), Value, lambda value: self.env[value.number])
        args, kwargs = mapped((args, kwargs), SYMBOLIC, self.sizes.of)
        graph = self.made.graph
        name = row.op.overloadpacket.__name__ if isinstance(row.op, OpOverload) else str(row.op)
        node = graph.create_node("call_function", row.op, args, kwargs, name=name)
        node.meta.update(self._told(row))
        self.made.node_of_row[index] = node
        stopped = self.grad and not row.grad
        seen_as_view = is_view(node)
        if stopped and not seen_as_view:
            self._detach_reads(node)
        if isinstance(row.results, Value):
            node.meta["val"] = self.fakes[row.results.number]
            self._set(row.results.number, self._stopped(node) if stopped and seen_as_view else node)
            return
        if isinstance(row.results, tuple | list):
            node.meta["val"] = mapped(row.results, Value, lambda value: self.fakes[value.number])
            for place, each in enumerate(row.results):
                if isinstance(each, Value):
                    item = graph.call_function(operator.getitem, (node, place))
                    item.meta.update(self._told(row))
                    item.meta["val"] = self.fakes[each.number]
                    self._set(each.number, self._stopped(item) if stopped and seen_as_view else item)
            return
        node.meta["val"] = row.results

    def _set(self, number: int, node: fx.Node) -> None:
        self.env[number] = node

    def _told(self, row: Row) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if row.where is not None:
            file, line = row.where
            code = linecache.getline(file, line).strip()
            told["stack_trace"] = f'File "{file}", line {line}, in forward\n    {code}\n'
        told["nn_module_stack"] = {row.path: (row.path, "")} if row.path else {}
        if row.autocast != self.autocast:
            told.update(autocast_at(row.autocast[0]))
        return told

    def _detach_reads(self, node: fx.Node) -> None:
        """Passes what an operator reads through ``detach``; what it writes stays the memory that it is."""
        targets = written(node)
        with node.graph.inserting_before(node):
            seen = {each: each if each in targets else self._stopped(each) for each in node.all_input_nodes}
        node.args = fx.map_arg(node.args, seen.__getitem__)
        node.kwargs = fx.map_arg(node.kwargs, seen.__getitem__)

    def _stopped(self, node: fx.Node) -> fx.Node:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            return node
        detached = self.made.graph.call_function(aten.detach.default, (node,))
        detached.meta = {key: each for key, each in node.meta.items()}
        return detached


def _values(tree: Any) -> set[int]:
    found: set[int] = set()
    mapped(tree, Value, lambda value: found.add(value.number))
    return found
