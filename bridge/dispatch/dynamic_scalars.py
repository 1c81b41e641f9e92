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
    then, now = [values[each] for each in known], list(values.values())
    if not _is_same_graph(like.captured, lowered.captured, then, now):
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


def _is_same_graph(
    constant: Captured, inputs: Captured, then: Sequence[torch.Tensor], now: Sequence[torch.Tensor]
) -> bool:
    """Whether the second of two calls is the first one with inputs in place of constants, and sets the same places.

    Args:
        then, now: values of the scalars that are their first arguments.
    """
    owned, more = len(inputs.module_tensors), len(now) - len(then)
    theirs, ours = _computed(constant, dict(enumerate(then, owned))), _computed(inputs, dict(enumerate(now, owned)))
    twin_of: dict[fx.Node, fx.Node] = {}

    def is_same_node(then: fx.Node, now: fx.Node) -> bool:
        twin_of[then] = now
        if then.op != now.op:
            return False
        if then.op == "placeholder":
            return is_same_input(then, now)
        return (
            (then.op == "output" or then.target == now.target)
            and then.kwargs.keys() == now.kwargs.keys()
            and is_same_value(then.args, now.args)
            and all(is_same_value(value, now.kwargs[name]) for name, value in then.kwargs.items())
        )

    def is_same_input(then: fx.Node, now: fx.Node) -> bool:
        if then.name in constant.names.literals and now.name in inputs.names.literals:
            first, second = constant.names.literals[then.name], inputs.names.literals[now.name]
            return first.dtype == second.dtype and VF.equal(first, second)
        first, second = constant.names.placeholders.get(then.name), inputs.names.placeholders.get(now.name)
        return None not in (first, second) and second == first + (more if first >= owned else 0)

    def is_same_value(then: Any, now: Any) -> bool:
        if isinstance(now, fx.Node) and now in ours:
            value = theirs.get(then) if isinstance(then, fx.Node) else then
            if value is None or isinstance(value, bool) or not isinstance(value, int | float | torch.Tensor):
                return False
            expected = VF.as_tensor(value, dtype=torch.float64).to(ours[now].dtype)
            return repr(expected.item()) == repr(ours[now].item())  # zero has a sign
        if isinstance(then, fx.Node) or isinstance(now, fx.Node):
            return twin_of.get(then) is now
        if isinstance(then, list | tuple):
            return type(then) is type(now) and len(then) == len(now) and all(map(is_same_value, then, now))
        return same(now, then)

    if _set_by(constant) != _set_by(inputs):
        return False
    if [spec.names for spec in constant.module_tensors] != [spec.names for spec in inputs.module_tensors]:
        return False
    first, second = (
        [node for node in each.graph.nodes if node not in numbers and (node.op != "placeholder" or node.users)]
        for each, numbers in ((constant, theirs), (inputs, ours))
    )
    return len(first) == len(second) and all(map(is_same_node, first, second))
