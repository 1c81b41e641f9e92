"""Number inputs of Dynamo's graphs: a graph → which of its inputs are numbers, and which may become 0-d tensors.

Dynamo makes a constant of a number when it first sees it. When the number changes, a float becomes a 0-d tensor that
the graph reads with ``.item()``, an int an input of its own. Here such a number is a constant of the entry that is
compiled for it, until a call differs from an earlier one by nothing else (the weight of a loss that is annealed, a
temperature). From then on it is a tensor, where that gives the same numbers: where it only scales or shifts tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

__all__ = ["NumberInputs", "numbers_of", "read_directly"]

_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.truediv)
# A number is rounded to a tensor's type before it is used; with half types, only after the operation.
_EXACT = (torch.float32, torch.float64)


@dataclass(frozen=True)
class NumberInputs:
    """Positions among a graph's inputs.

    Attributes:
        read: tensors of which only ``.item()`` is used.
        arithmetic: numbers, those that are read among them, that may as well be 0-d tensors.
    """

    read: frozenset[int]
    arithmetic: frozenset[int]


def numbers_of(graph: fx.Graph) -> NumberInputs:
    """Finds the numbers among the inputs of a graph of Dynamo's."""
    read, arithmetic = set(), set()
    for position, node in enumerate(graph.find_nodes(op="placeholder")):
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and node.users and all(map(_is_item, node.users)):
            read.add(position)
            if all(_only_arithmetic(item, value.dtype.is_floating_point) for item in node.users):
                arithmetic.add(position)
        elif isinstance(value, torch.SymInt) and node.users and _only_arithmetic(node, is_float=False):
            arithmetic.add(position)
    return NumberInputs(frozenset(read), frozenset(arithmetic))


def read_directly(graph_module: fx.GraphModule, numbers: NumberInputs) -> fx.GraphModule:
    """The graph for inputs that are the numbers themselves, or tensors where :class:`NumberInputs` allows that."""
    if not numbers.read | numbers.arithmetic:
        return graph_module
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    placeholders = graph.find_nodes(op="placeholder")
    for position in sorted(numbers.arithmetic):
        for user, number in list(_uses(placeholders[position])):
            (tensor,) = [arg for arg in user.args if arg is not number] or [None]
            if _exact_tensor(tensor):
                with graph.inserting_before(user):
                    user.replace_input_with(number, graph.call_function(_of_type, (number, tensor)))
    for position in sorted(numbers.read):
        for item in list(placeholders[position].users):
            item.replace_all_uses_with(placeholders[position])
            graph.erase_node(item)
    return fx.GraphModule(graph_module, graph)


def _of_type(number: Any, tensor: torch.Tensor) -> Any:
    return number.to(tensor.dtype) if isinstance(number, torch.Tensor) else number


def _uses(number: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Every use of a number and of what is computed of it: the user, and the number that it uses."""
    for user in number.users:
        yield user, number
        if _is_item(user) or not isinstance(user.meta.get("example_value"), torch.Tensor):
            yield from _uses(user)


def _is_item(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target == "item"


def _only_arithmetic(number: fx.Node, is_float: bool) -> bool:
    """Whether a number does nothing but scale and shift tensors, itself or after arithmetic with constants."""
    for user in number.users:
        if user.op != "call_function" or user.target not in _ARITHMETIC or user.kwargs or len(user.args) != 2:
            return False
        (other,) = [arg for arg in user.args if arg is not number] or [None]
        if _exact_tensor(other):
            if user.meta.get("example_value").dtype is not other.meta["example_value"].dtype:
                return False
        elif not _is_constant(other, is_float, user, number) or not _only_arithmetic(user, is_float):
            return False
    return True


def _exact_tensor(value: Any) -> bool:
    seen = value.meta.get("example_value") if isinstance(value, fx.Node) else None
    return isinstance(seen, torch.Tensor) and seen.dtype in _EXACT


def _is_constant(other: Any, is_float: bool, user: fx.Node, number: fx.Node) -> bool:
    """Whether arithmetic of a number with ``other`` is the same on tensors: of one kind, no division by zero."""
    if type(other) not in ((int, float) if is_float else (int,)):
        return False
    return user.target is not operator.truediv or (is_float and user.args[0] is number and other != 0)
