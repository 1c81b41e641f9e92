"""Graph record: a traced graph ↔ plain data: its nodes in order, their arguments, and what people are shown of them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from bridge.base.devices import device_named, name_of
from bridge.base.torch_fakes import fake_mode
from bridge.base.torch_internals import OpOverload
from bridge.capture import Operation, Place

__all__ = ["NotRecordedError", "graph_of", "operation_of", "operation_record", "record_of"]

_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


class NotRecordedError(TypeError):
    """A graph with something in it that has no plain form."""


def record_of(graph: fx.Graph) -> list[Any]:
    """The record of a traced graph; the GPU that this thread works for is any GPU there.

    Raises:
        NotRecordedError: it calls something else than operators, or holds an object that is no constant.
    """
    return [
        [node.op, node.name, _target(node), _plain(node.args), _plain(dict(node.kwargs)), _meta(node)]
        for node in graph.nodes
    ]


def graph_of(record: list[Any]) -> fx.Graph:
    """The graph of a record: equal nodes, with fake tensors of the same layouts for their values, on the GPU that this
    thread works for.

    Raises:
        NotRecordedError: this torch has not all of its operators.
    """
    graph, nodes, mode = fx.Graph(), {}, fake_mode()
    for op, name, target, args, kwargs, meta in record:
        given = _value(args, nodes.__getitem__), _value(kwargs, nodes.__getitem__)
        node = graph.create_node(op, _called(target) if op == "call_function" else target, *given, name=name)
        node.name = name  # torch.export gives names that a new node does not get, such as "input"
        nodes[name] = node
        node.meta.update({key: each for key, each in meta.items() if key != "val"})
        if "val" in meta:
            with mode:
                node.meta["val"] = _made(meta["val"])
    return graph


def operation_record(operation: Operation) -> list[Any]:
    """The record of an operation by which a call recomputes a number.

    Raises:
        NotRecordedError: it is given something that has no plain form.
    """
    return [operation.name, _plain(operation.args), _plain(operation.kwargs)]


def operation_of(record: list[Any]) -> Operation:
    """The operation of a record."""
    name, args, kwargs = record
    return Operation(name, _value(args, {}.__getitem__), _value(kwargs, {}.__getitem__))


def _target(node: fx.Node) -> str:
    if node.op in ("placeholder", "output"):
        return str(node.target)
    if node.op == "call_function" and node.target is operator.getitem:
        return "getitem"
    if node.op == "call_function" and isinstance(node.target, OpOverload):
        return str(node.target)
    raise NotRecordedError(f"{node.op} of {node.target}")


def _called(target: str) -> Callable[..., Any]:
    if target == "getitem":
        return operator.getitem
    try:
        namespace, name, overload = target.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except (ValueError, AttributeError) as error:
        raise NotRecordedError(f"operator {target}") from error


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return {"float": value.hex()}
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, Place):
        return {"place": value.index}
    if isinstance(value, _CONSTANTS):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": name_of(value)}
    if isinstance(value, list):
        return list(map(_plain, value))
    if isinstance(value, tuple):
        return {"tuple": list(map(_plain, value))}
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {"dict": [[key, _plain(each)] for key, each in value.items()]}
    raise NotRecordedError(f"{value!r} of {type(value)}")


def _value(plain: Any, node: Callable[[str], fx.Node]) -> Any:
    if isinstance(plain, list):
        return [_value(each, node) for each in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, inside),) = plain.items()
    match kind:
        case "float":
            return float.fromhex(inside)
        case "node":
            return node(inside)
        case "place":
            return Place(inside)
        case "torch":
            return getattr(torch, inside)
        case "device":
            return device_named(inside)
        case "tuple":
            return tuple(_value(each, node) for each in inside)
        case "dict":
            return {key: _value(each, node) for key, each in inside}
    raise NotRecordedError(f"{kind} in a record")


def _meta(node: fx.Node) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if isinstance(stack := node.meta.get("stack_trace"), str):
        found["stack_trace"] = stack
    if isinstance(where := (node.meta.get("custom") or {}).get("where"), str):
        found["custom"] = {"where": where}
    if modules := node.meta.get("nn_module_stack"):
        found["nn_module_stack"] = {str(key): [str(part) for part in each] for key, each in modules.items()}
    if "val" in node.meta:
        found["val"] = _described(node.meta["val"])
    return found


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        layout = tuple(value.shape), value.stride()
        if not all(type(each) is int for part in layout for each in part):
            raise NotRecordedError("a size that varies")
        return {"tensor": [list(layout[0]), list(layout[1]), _plain(value.dtype), name_of(value.device)]}
    if isinstance(value, tuple | list):
        return {"tuple": list(map(_described, value))}
    return _plain(value)


def _made(described: Any) -> Any:
    if isinstance(described, dict) and "tensor" in described:
        shape, stride, dtype, device = described["tensor"]
        return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype["torch"]), device=device_named(device))
    if isinstance(described, dict) and "tuple" in described:
        return tuple(map(_made, described["tuple"]))
    return _value(described, {}.__getitem__)
