"""Dynamic scalars: a call that differs from an entry in scalars only → a lowered call with the scalars as inputs.

With a scalar as a constant, each new value of an annealed ``self.beta`` or of ``model(x, temperature)`` needs an entry.
From the second value on it is an input, if forward only scales and shifts tensors with it
(:mod:`bridge.capture.numbers`). Proof of exactness: the new graph, evaluated at the earlier value, equals the graph
compiled for that value, node by node, with the input in place of the constant. Dynamic sizes stay dynamic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from bridge.base.errors import CompilationError, swallowed
from bridge.base.log import channel
from bridge.base.torch_internals import VF, pytree
from bridge.capture import Captured, CapturedArguments, NumberPlace, device_of_call, number_tensor, with_dynamic_scalars
from bridge.lowering import LoweredCall, lower_once
from bridge.state import SampleCall, same

__all__ = ["as_called", "lower_with_numbers"]

log = channel("dispatch")

#: An arbitrary value to compare two graphs that both have a scalar as an input.
_ANY = 0.8125


def lower_with_numbers(
    call: SampleCall,
    partition: Any,
    changed: Mapping[NumberPlace, Any],
    like: LoweredCall,
    known: Sequence[NumberPlace],
) -> tuple[LoweredCall, list[NumberPlace]] | None:
    """Lowers a call with scalars as its first arguments → the lowered call and their places; ``None``: not exact.

    Args:
        changed: the places of the new scalars, with the values that ``like`` was lowered for.
        like: the lowered call from which this one differs in the scalars.
        known: the places of scalars that are inputs of ``like`` already.
    """
    call, places = call.as_pytree(), sorted({*changed, *known}, key=_order)
    try:
        twin, args = with_dynamic_scalars(call.module, call.args, call.kwargs, places, device_of_call(call))
        behind = [replace(each, leaf=each.leaf + len(places)) for each in call.dims]
        lowered = lower_once(SampleCall(twin, args, call.kwargs, tuple(behind)), partition)
    except CompilationError:
        raise
    except Exception as error:  # noqa: BLE001 - forward's own error for a tensor in place of a number
        swallowed(error)
        log.info("%s: %s cannot be inputs: %s", call.name, _names(changed), error)
        return None
    if (lowered.captured.sizes.scope is None) != (like.captured.sizes.scope is None):
        log.info("%s: %s cannot be inputs beside sizes that vary", call.name, _names(changed))
        return None
    device = lowered.captured.device
    values = {place: number_tensor(changed.get(place, _ANY), device) for place in places}
    compared = _Comparison(like.captured, lowered.captured, [values[each] for each in known], list(values.values()))
    if not compared.holds():
        log.info("%s: %s cannot be inputs: another graph", call.name, _names(changed))
        return None
    return lowered, places


def _order(place: NumberPlace) -> tuple:
    """Sort key: attributes first, then arguments."""
    return place.leaf is not None, place.leaf or 0, place.path, place.name


def as_called(captured: Captured, call: SampleCall, count: int) -> Captured:
    """A twin's captured call → the module's: without the first ``count`` arguments, which are scalars."""
    call = call.as_pytree()
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    plain = tuple(None if tensor else leaf for leaf, tensor in zip(leaves, is_tensor, strict=True))
    followed = frozenset(place - count for place in captured.given.followed)
    given = CapturedArguments(captured.given.tensors[count:], plain, tuple(is_tensor), spec, followed)
    sizes = captured.sizes._replace(shapes=captured.sizes.shapes[count:], strides=captured.sizes.strides[count:])
    return replace(captured, given=given, sizes=sizes)


def _names(numbers: Mapping[NumberPlace, Any]) -> list[str]:
    return [place.name or f"argument {place.leaf}" for place in numbers]


def _computed(captured: Captured, inputs: Mapping[int, torch.Tensor]) -> dict[fx.Node, torch.Tensor]:
    """The values of nodes that depend on scalar inputs alone."""
    found: dict[fx.Node, torch.Tensor] = {}
    for node in captured.graph.nodes:
        if node.op == "placeholder" and captured.names.placeholders.get(node.name) in inputs:
            found[node] = inputs[captured.names.placeholders[node.name]]
        elif node.op == "call_function" and node.all_input_nodes and found.keys() >= set(node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), found.__getitem__)
            found[node] = node.target(*args, **kwargs)
    return found


def _set_by(captured: Captured) -> tuple[Any, list[tuple]]:
    """The counters and the places that a call sets: attributes of modules by their paths, others by their holders."""
    holders = [(each, id(each.original) if each.path is None else each.path) for each in captured.state.kept]
    return captured.state.counters, [(of, each.key, each.is_read, each.appends) for each, of in holders]


class _Comparison:
    """Compares two graphs node by node: whether the second is the first with inputs in place of constants.

    Args:
        constant, inputs: the two captured calls.
        then, now: values of the scalars that are their first arguments.
    """

    def __init__(self, constant: Captured, inputs: Captured, then: Sequence[torch.Tensor], now: Sequence[torch.Tensor]):
        self._captured = constant, inputs
        self._owned = len(inputs.module_tensors)
        self._theirs = _computed(constant, dict(enumerate(then, self._owned)))
        self._ours = _computed(inputs, dict(enumerate(now, self._owned)))
        self._more = len(now) - len(then)
        self._twin_of: dict[fx.Node, fx.Node] = {}

    def holds(self) -> bool:
        """Whether the graphs are equal up to these constants, and the places that the calls set are the same."""
        constant, inputs = self._captured
        if _set_by(constant) != _set_by(inputs):
            return False
        if [spec.names for spec in constant.module_tensors] != [spec.names for spec in inputs.module_tensors]:
            return False
        first, second = self._nodes(constant, self._theirs), self._nodes(inputs, self._ours)
        return len(first) == len(second) and all(map(self._same_node, first, second))

    @staticmethod
    def _nodes(captured: Captured, numbers: Mapping[fx.Node, torch.Tensor]) -> list[fx.Node]:
        return [
            node
            for node in captured.graph.nodes
            if node not in numbers and not (node.op == "placeholder" and not node.users)
        ]

    def _same_node(self, then: fx.Node, now: fx.Node) -> bool:
        self._twin_of[then] = now
        if then.op != now.op:
            return False
        if then.op == "placeholder":
            return self._same_input(then, now)
        return (
            (then.op == "output" or then.target == now.target)
            and then.kwargs.keys() == now.kwargs.keys()
            and self._same_value(then.args, now.args)
            and all(self._same_value(value, now.kwargs[name]) for name, value in then.kwargs.items())
        )

    def _same_input(self, then: fx.Node, now: fx.Node) -> bool:
        constant, inputs = self._captured
        if then.name in constant.names.literals and now.name in inputs.names.literals:
            first, second = constant.names.literals[then.name], inputs.names.literals[now.name]
            return first.dtype == second.dtype and VF.equal(first, second)
        first, second = constant.names.placeholders.get(then.name), inputs.names.placeholders.get(now.name)
        if first is None or second is None:
            return False
        return second == first + (self._more if first >= self._owned else 0)

    def _same_value(self, then: Any, now: Any) -> bool:
        if isinstance(now, fx.Node) and now in self._ours:
            value = self._theirs.get(then) if isinstance(then, fx.Node) else then
            if value is None or isinstance(value, bool) or not isinstance(value, int | float | torch.Tensor):
                return False
            expected, found = VF.as_tensor(value, dtype=torch.float64), self._ours[now]
            expected = expected.to(found.dtype)
            return repr(expected.item()) == repr(found.item())  # zero has a sign
        if isinstance(then, fx.Node) or isinstance(now, fx.Node):
            return self._twin_of.get(then) is now
        if isinstance(then, list | tuple):
            return type(then) is type(now) and len(then) == len(now) and all(map(self._same_value, then, now))
        return same(now, then)
