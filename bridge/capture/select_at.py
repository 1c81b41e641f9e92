"""Select at a tensor position: ``x[t]``, ``x[t] = v`` with a 0-d integer tensor ``t`` → an operator with ``t`` as data.

Eager reads the number and takes a view there. An entry that recorded the view would serve only the sample's number.
Here forward calls ``tvm_dispatch::select_at(x, dim, t)``: this view on real tensors, the view at position 0 on fake
ones. In the training graph it becomes ``index(x, t)``, a copy; later writes to the view or to ``x`` are copied to the
other. Results that would depend on the view's position are refused (:func:`shared_views`).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from bridge.base.errors import Unsupported
from bridge.base.torch_internals import FakeTensor, TensorBase, aten, storage_id
from bridge.base.torch_recording import own_operator
from bridge.capture.inplace_rules import overlaps_itself
from bridge.capture.observation import Output
from bridge.capture.passes.alias_analysis import WHERE, aliased, memory_at, written
from bridge.capture.scalar_guards import FORMS


def _select_at(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    return x.select(dim, 0 if isinstance(index, FakeTensor) else int(index))


SELECT_AT = own_operator("select_at(Tensor(a) x, int dim, Tensor index) -> Tensor(a)", _select_at, is_composite=True)

_INDEX_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8)
"""Dtypes of positions; a uint8 or bool index is a mask."""
_NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat)
_PLACES = (int, torch.SymInt, slice, type(None), type(...))
"""Types of the items of an index that selects a view."""
_GETITEM = operator.getitem
AS_STRIDED = (aten.as_strided.default, aten.as_strided_.default, aten.as_strided_scatter.default)


def at_numbers(run: Any, x: torch.Tensor, index: Any, *value: Any) -> Any:
    """``x[t]`` and ``x[t] = v``: masks are counted, tensors as slice bounds are read, integer tensors stay data.

    ``run``: the :class:`~bridge.capture.functions.Functions` of the run.
    """
    items = index if isinstance(index, tuple) else (index,)
    if any(isinstance(each, slice) and any(map(_is_integer, (each.start, each.stop, each.step))) for each in items):
        bounded = tuple(_bounded(run, each) for each in items)
        made = at_numbers(run, x, bounded, *value)
        if made is not NotImplemented:
            return made
        return x.__setitem__(bounded, *value) if value else x[bounded]
    form = FORMS[TensorBase.__setitem__ if value else TensorBase.__getitem__]
    if value and overlaps_itself(x):
        return form(run.count, x, index, *value)
    if value and type(value[0]) in _NUMBERS and all(type(each) in _PLACES for each in items):
        x[index].fill_(value[0])  # torch makes a tensor of a symbolic number by another operator than of an integer
        return None
    part, rest = selected(x, index)
    if part is x:
        return form(run.count, x, index, *value)
    run.bases.add(storage_id(x))
    if value:
        part[rest] = value[0]
        return None
    return part[rest] if rest else part


def _bounded(run: Any, item: Any) -> Any:
    """An item of an index, with numbers for slice bounds that are tensors, which torch reads in C++."""
    if not isinstance(item, slice):
        return item
    bounds = item.start, item.stop, item.step
    return slice(*[run.numbers(each.reshape(())) if _is_integer(each) else each for each in bounds])


def _is_integer(value: Any) -> bool:
    is_one = isinstance(value, torch.Tensor) and value.numel() == 1 and value.dtype is not torch.bool
    return is_one and not (value.is_floating_point() or value.is_complex())


def selected(x: torch.Tensor, index: Any) -> tuple[torch.Tensor, tuple]:
    """A tensor and an index → (the view at the index's 0-d integer tensors, the index without them)."""
    rest = index if isinstance(index, tuple) else (index,)
    while (found := _last_number(x, rest)) is not None:
        dim, number, rest = found
        x = SELECT_AT(x, dim, number)
    return x, rest


def _is_number(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.dim() == 0 and item.dtype in _INDEX_TYPES


def _last_number(x: torch.Tensor, items: tuple) -> tuple[int, torch.Tensor, tuple] | None:
    """The last 0-d integer tensor of an index, as (its axis, the tensor, the rest of the index)."""
    place = max((place for place, item in enumerate(items) if _is_number(item)), default=None)
    if place is None:
        return None
    before, rest = sum(map(_axes, items[:place])), items[:place] + items[place + 1 :]
    if any(item is Ellipsis for item in items[:place]):
        before += x.dim() - sum(map(_axes, items))
    return (before, items[place], rest) if 0 <= before < x.dim() else None


def _axes(item: Any) -> int:
    """The number of axes that an item of an index consumes; 0 for an ellipsis, which takes the axes left over."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    is_mask = isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8)
    return item.dim() if is_mask else 1


def shared_views(bases: Collection[int], results: Sequence[tuple[torch.Tensor, Output]]) -> list[Unsupported]:
    """Refusals of returned views at tensor positions in memory that the caller sees otherwise as well.

    ``bases``: the memory in which positions were selected.
    """
    own = Counter(storage_id(leaf) for leaf, output in results if not output.alias_of)
    for leaf, output in results:
        is_view = output.alias_of is not None and not output.is_same_object
        if storage_id(leaf) in bases and (is_view or own[storage_id(leaf)] > 1):
            reason = "returns a view, at a position that a tensor gives, of memory that the caller sees too"
            return [Unsupported("Tensor.__getitem__", "the module's result", reason, "return a clone of it")]
    return []


def spell_selections(graph: fx.Graph) -> list[Unsupported]:
    """Selections in a training graph → copies, and copies back after writes; changes the graph in place.

    Exact: between two writes a view and a copy have the same numbers, and their derivatives are equal.
    """
    problems: list[Unsupported] = []
    for node in reversed(graph.nodes):  # a selection inside another one first
        if node.target is SELECT_AT:
            problems += _spell(graph, node)
    return problems


def _spell(graph: fx.Graph, node: fx.Node) -> Iterator[Unsupported]:
    x, dim, index = node.args
    (memory,) = memory_at(node)
    nodes = list(graph.nodes)
    views, later = {node}, nodes[nodes.index(node) + 1 :]
    for each in later:
        source = _source(each, memory)
        if source in views:
            views.add(each)
    last = max((place for place, each in enumerate(later) if views.intersection(each.all_input_nodes)), default=-1)
    where = node.meta.get(WHERE, "forward")
    with graph.inserting_before(node):
        at = index
        if index.meta["val"].dtype != torch.int64:
            at = _call(graph, aten.to.dtype, (index, torch.int64), index.meta["val"].to(torch.int64), node)
        place = [None] * dim + [at]
        copied = _call(graph, aten.index.Tensor, (x, place), node.meta["val"], node)
    changed = False
    for position, each in enumerate(later[: last + 1]):
        if each.target in AS_STRIDED and views.intersection(each.all_input_nodes):
            yield Unsupported(str(each.target), where, "looks at memory around a position that a tensor gives")
        elif aliased(each) in views and each not in views and not written(each):
            with graph.inserting_after(each):  # it copied a strided view, and would return the copy itself
                own = graph.call_function(aten.clone.default, (each,))
                own.meta = dict(each.meta)
            each.replace_all_uses_with(own, delete_user_cb=lambda user, own=own: user is not own)
        targets = [target for target in written(each) if memory in memory_at(target)]
        if not targets:
            continue
        changed = True
        with graph.inserting_after(_with_items(each)):
            if any(target in views for target in targets):
                _call(graph, aten.index_put_.default, (x, place, copied), x.meta["val"], each)
            elif position < last:
                now = _call(graph, aten.index.Tensor, (x, place), node.meta["val"], each)
                with graph.inserting_after(now):
                    _call(graph, aten.copy_.default, (copied, now), node.meta["val"], each)
    if changed and overlaps_itself(x.meta["val"]):
        yield Unsupported("Tensor.__setitem__", where, "writes in place through a view of a tensor that is expanded")
    node.replace_all_uses_with(copied)
    graph.erase_node(node)


def _source(node: fx.Node, memory: int | None) -> fx.Node | None:
    """The argument in ``memory`` that a node makes another view of, or ``None``."""
    if node.op != "call_function" or memory not in memory_at(node):
        return None
    there = [each for each in node.all_input_nodes if memory in memory_at(each)]
    source = aliased(node)
    return source if source in there else there[0] if there else None


def _with_items(node: fx.Node) -> fx.Node:
    """The last node of an operator's call, including the items of its results."""
    while node.next.target is _GETITEM:
        node = node.next
    return node


def _call(graph: fx.Graph, op: Any, args: tuple, value: torch.Tensor, like: fx.Node) -> fx.Node:
    made = graph.call_function(op, args)
    made.meta = {**like.meta, "val": value}
    return made
