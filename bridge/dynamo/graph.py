"""A graph of Dynamo's → a module with arguments and buffers, as :mod:`bridge.capture.record_call` takes it.

Dynamic sizes (:func:`sizes_of`): Dynamo makes a size symbolic when it sees a second value (``dynamic=None``) or at once
(``dynamic=True``), and passes it to the graph as a number beside the tensors. The module reads it from a tensor's shape
instead.

Dynamic scalars (:func:`numbers_of`): a number is a constant for Dynamo at first. Once it changes, a float becomes a 0-d
tensor that the graph reads with ``.item()``, an int a graph input. Here it stays a constant of the entry until a call
differs from an earlier one in nothing else (an annealed loss weight, a temperature). From then on it is a tensor input,
if the results are exactly the same: if it only scales or shifts tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from bridge.base.torch_higher_order import FLEX_ATTENTION, OUTPUT_ALONE
from bridge.base.torch_internals import enter_autocast, exit_autocast, get_data_attribute
from bridge.capture import ClosedFunction, DynamicDim, has_form

__all__ = [
    "DynamicScalars",
    "DynamoGraph",
    "GraphSizes",
    "graphs_in",
    "inline_checkpoints",
    "is_traceable",
    "numbers_of",
    "read_directly",
    "sizes_of",
]

_LEAST = 2


@dataclass(frozen=True)
class GraphSizes:
    """Dynamic sizes of a graph, by positions among its inputs.

    Attributes:
        dims: tensor, dynamic dimension, Dynamo's name of the size.
        numbers: position of a number that is a size → a tensor and its dimension of that size.
    """

    dims: tuple[tuple[int, int, str], ...]
    numbers: dict[int, tuple[int, int]]

    @property
    def tensors(self) -> frozenset[int]:
        """Positions of the tensors with a dynamic dimension."""
        return frozenset(position for position, *_ in self.dims)

    def dynamic_dims(self, inputs: Sequence[Any], arguments: Sequence[int]) -> tuple[DynamicDim, ...]:
        """The dynamic dimensions of the inputs at positions ``arguments``, except sizes 0 and 1 (special cases)."""
        leaves = {position: leaf for leaf, position in enumerate(arguments)}
        return tuple(
            DynamicDim(leaves[position], dimension, f"input {position}", name, name, _LEAST, None, required=False)
            for position, dimension, name in self.dims
            if inputs[position].shape[dimension] >= _LEAST
        )


def sizes_of(graph: fx.Graph) -> GraphSizes:
    """Finds the dynamic sizes among the inputs of a graph of Dynamo's."""
    values = [node.meta.get("example_value") for node in graph.find_nodes(op="placeholder")]
    dims = tuple(
        (position, dimension, _name(size, position, dimension))
        for position, value in enumerate(values)
        if isinstance(value, torch.Tensor)
        for dimension, size in enumerate(value.shape)
        if isinstance(size, torch.SymInt)
    )
    tells: dict[str, tuple[int, int]] = {}
    for position, dimension, _ in dims:
        tells.setdefault(str(values[position].shape[dimension]), (position, dimension))
    numbers = {
        position: tells[str(value)]
        for position, value in enumerate(values)
        if isinstance(value, torch.SymInt) and str(value) in tells
    }
    return GraphSizes(dims, numbers)


def _name(size: torch.SymInt, position: int, dimension: int) -> str:
    return str(size) if str(size).isidentifier() else f"input_{position}_{dimension}"


_CUSTOM = torch.ops.higher_order.autograd_function_apply
_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def inline_checkpoints(graph_module: fx.GraphModule) -> None:
    """Inlines the body of each ``torch.utils.checkpoint`` into its graph, in place, nested ones included.

    In Dynamo's graph a checkpoint is an operator that recomputes its body in the backward. Our partition decides about
    recomputation, so only the body matters. The operator must not remain even for eager runs of the graph: it would
    draw new dropout masks in the recomputation.
    """
    for graph in graphs_in(graph_module):
        if found := graph.graph.find_nodes(op="call_function", target=_CHECKPOINT):
            for node in found:
                _inline(graph.graph, node)
            graph.recompile()


def _inline(graph: fx.Graph, node: fx.Node) -> None:
    body, *arguments = node.args
    _, kwargs = _CHECKPOINT.divide_kwargs(node.kwargs)
    with graph.inserting_before(node):
        call = graph.call_module(body.target, tuple(arguments), kwargs)
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    graph.erase_node(node)
    if not body.users:
        graph.erase_node(body)


def graphs_in(graph_module: fx.GraphModule) -> list[fx.GraphModule]:
    """A graph and all graphs inside: bodies of checkpoints and functions of higher-order operators."""
    return [module for module in graph_module.modules() if isinstance(module, fx.GraphModule)]


def is_traceable(node: fx.Node) -> bool:
    """Whether a higher-order operator can be recorded: as Python, or as a custom Function that writes no operand."""
    return has_form(node.target) or (node.target is _CUSTOM and not node.kwargs.get("dirty_idx"))


class DynamoGraph(nn.Module):
    """A graph of Dynamo's as a module; its buffers are the inputs that the graph may change in place.

    Dense inputs that require no grad become buffers: their new values are outputs of the traced graph, and are written
    back. All other inputs are arguments, which must not be written.

    Args:
        sizes: dynamic sizes, if any. Tensors with a dynamic size are arguments; numbers that are sizes are read from a
            tensor's shape.
    """

    def __init__(self, graph_module: fx.GraphModule, inputs: Sequence[Any], sizes: GraphSizes | None = None):
        super().__init__()
        dynamic = sizes.tensors if sizes is not None else frozenset()
        self._numbers = sizes.numbers if sizes is not None else {}
        if _owns_tensors(graph_module):
            self.graph_module = graph_module
        self._graph = (graph_module,)  # not a submodule: each graph has a class of its own, which would prevent reuse
        self.input_of: dict[str, int] = {}
        for position, value in enumerate(inputs):
            if position not in dynamic and _may_be_buffer(value):
                self.input_of[f"input_{position}"] = position
                self.register_buffer(f"input_{position}", value.detach().clone())
        self._count = len(inputs)
        given = {*self.input_of.values(), *self._numbers}
        self.arguments = tuple(position for position in range(len(inputs)) if position not in given)

    def forward(self, *arguments: Any) -> Any:
        inputs: list[Any] = [None] * self._count
        for position, value in zip(self.arguments, arguments, strict=True):
            inputs[position] = value
        for name, position in self.input_of.items():
            inputs[position] = getattr(self, name)
        for position, (tensor, dimension) in self._numbers.items():
            inputs[position] = inputs[tensor].shape[dimension]
        return _Interpreter(self._graph[0]).run(*inputs)


class _Interpreter(fx.Interpreter):
    """Runs a graph node by node, so that a trace of the run has the user's source lines and autocast regions.

    Dynamo's own function for the begin of an autocast region casts nothing while the graph is traced.
    """

    def run_node(self, n: fx.Node) -> Any:
        if n.target is FLEX_ATTENTION and all(_takes_first(user) for user in n.users):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            return self.call_function(n.target, (*args[:6], {**args[6], OUTPUT_ALONE: True}, *args[7:]), kwargs)
        return super().run_node(n)

    def get_attr(self, target: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        value = super().get_attr(target, args, kwargs)
        if not _is_graph(value):
            return value
        first, *_, last = value.graph.nodes
        return ClosedFunction(lambda *given: _Interpreter(value).run(*given), last.args[0] in (first, (first,)))

    def call_module(self, target: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        body = self.fetch_attr(target)
        return (
            _Interpreter(body).run(*args)
            if _is_graph(body) and not kwargs
            else super().call_module(target, args, kwargs)
        )

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if target is enter_autocast:
            region = torch.autocast(*args, **kwargs)
            region.__enter__()
            return region
        if target is exit_autocast:
            return args[0].__exit__(None, None, None)
        if target is get_data_attribute:  # tensor.data cannot be traced
            return args[0].detach()
        if target is _CUSTOM:
            return _custom_function(*args[:2], **kwargs)(*args[2:])
        return super().call_function(target, args, kwargs)


def _custom_function(
    forward: Callable[..., Any], backward: Callable[..., Any], non_differentiable_idx: Sequence[int], **_: Any
) -> Callable[..., Any]:
    """Dynamo's two graphs of a custom ``autograd.Function`` → a function with that backward."""

    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            made, kept = forward(*args)
            is_tensor = [isinstance(each, torch.Tensor) for each in kept]
            ctx.save_for_backward(*(each if is_one else None for each, is_one in zip(kept, is_tensor, strict=True)))
            ctx.others = [None if is_one else each for each, is_one in zip(kept, is_tensor, strict=True)]
            outputs = made if isinstance(made, tuple | list) else (made,)
            ctx.mark_non_differentiable(*(outputs[place] for place in non_differentiable_idx))
            return made

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            kept = zip(ctx.saved_tensors, ctx.others, strict=True)
            return backward(*grads, *(other if tensor is None else tensor for tensor, other in kept))

    return Custom.apply


def _takes_first(user: fx.Node) -> bool:
    return user.target is operator.getitem and user.args[1] == 0


def _is_graph(value: Any) -> bool:
    return isinstance(value, fx.GraphModule)


def _owns_tensors(graph_module: fx.GraphModule) -> bool:
    """Whether the graph reads tensors that are attributes of the graph module, not inputs."""
    read = graph_module.graph.find_nodes(op="get_attr")
    attributes = (getattr(graph_module, node.target, None) for node in read)
    owned = (*graph_module.parameters(), *graph_module.buffers(), *attributes)
    return any(isinstance(value, torch.Tensor) for value in owned)


def _may_be_buffer(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and not value.requires_grad
        and value.layout is torch.strided
        and torch.ops.aten.is_non_overlapping_and_dense(value)
    )


_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.truediv)
# Eager rounds a number to the tensor's dtype before the operation; with half dtypes, it rounds only the result.
_EXACT = (torch.float32, torch.float64)


@dataclass(frozen=True)
class DynamicScalars:
    """Scalars of a graph, by positions among its inputs.

    Attributes:
        read: tensors of which only ``.item()`` is used.
        arithmetic: scalars, including ``read`` ones, that may exactly be replaced by 0-d tensors.
    """

    read: frozenset[int]
    arithmetic: frozenset[int]


def numbers_of(graph: fx.Graph) -> DynamicScalars:
    """Finds the scalars among the inputs of a graph of Dynamo's."""
    read, arithmetic = set(), set()
    for position, node in enumerate(graph.find_nodes(op="placeholder")):
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and node.users and all(map(_is_item, node.users)):
            read.add(position)
            if all(_only_arithmetic(item, value.dtype.is_floating_point) for item in node.users):
                arithmetic.add(position)
        elif isinstance(value, torch.SymInt) and node.users and _only_arithmetic(node, is_float=False):
            arithmetic.add(position)
    return DynamicScalars(frozenset(read), frozenset(arithmetic))


def read_directly(graph_module: fx.GraphModule, numbers: DynamicScalars) -> fx.GraphModule:
    """Rewrites a graph to take scalars directly: as numbers, or as tensors if :class:`DynamicScalars` allows that."""
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
    """Every use of a number, and of numbers computed from it: the using node, and the number."""
    for user in number.users:
        yield user, number
        if _is_item(user) or not isinstance(user.meta.get("example_value"), torch.Tensor):
            yield from _uses(user)


def _is_item(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target == "item"


def _only_arithmetic(number: fx.Node, is_float: bool) -> bool:
    """Whether a number only scales and shifts tensors, itself or after arithmetic with constants."""
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
    """Whether arithmetic of a number with ``other`` equals the tensors' arithmetic: same types, no division by zero."""
    if type(other) not in ((int, float) if is_float else (int,)):
        return False
    return user.target is not operator.truediv or (is_float and user.args[0] is number and other != 0)
