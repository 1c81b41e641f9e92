"""A graph of Dynamo's → a module with arguments and buffers, as :mod:`bridge.capture.record_call` takes it.

Dynamic sizes (:func:`sizes_of`): Dynamo makes a size symbolic when it sees a second value (``dynamic=None``) or at once
(``dynamic=True``), and passes it to the graph as a number beside the tensors. The module reads it from a tensor's shape
instead.

A float that changes becomes a 0-d tensor, of which the graph reads the number: the module gets the number itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from bridge.base.errors import Unsupported, user_line
from bridge.base.torch_higher_order import FLEX_ATTENTION, OUTPUT_ALONE
from bridge.base.torch_internals import (
    TRANSFORM_MODULES,
    HigherOrderOperator,
    enter_autocast,
    exit_autocast,
    get_data_attribute,
)
from bridge.capture import ClosedFunction, DynamicDim, has_form

__all__ = ["DynamoGraph", "GraphSizes", "graphs_in", "inline_checkpoints", "problems_of", "sizes_of"]

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


class DynamoGraph(nn.Module):
    """A graph of Dynamo's as a module; its arguments are the graph's inputs, except numbers that are sizes.

    A size is read from a tensor's shape. A 0-d tensor of which the graph only reads the number is given as the
    number.

    Attributes:
        arguments: positions of the arguments among the graph's inputs.
        sizes: dynamic sizes among the inputs.
    """

    def __init__(self, graph_module: fx.GraphModule):
        super().__init__()
        if _owns_tensors(graph_module):
            self.graph_module = graph_module
        self._graph = (graph_module,)  # not a submodule: each graph has a class of its own, which would prevent reuse
        inputs = graph_module.graph.find_nodes(op="placeholder")
        self.sizes = sizes_of(graph_module.graph)
        self._count = len(inputs)
        self.arguments = tuple(position for position in range(self._count) if position not in self.sizes.numbers)
        self._read = [place for place, position in enumerate(self.arguments) if is_read(inputs[position])]

    def given(self, inputs: Sequence[Any]) -> tuple:
        """The graph's inputs → the module's arguments."""
        if not self._read and len(self.arguments) == len(inputs):
            return tuple(inputs)
        found = [inputs[position] for position in self.arguments]
        for place in self._read:
            found[place] = found[place].item()
        return tuple(found)

    def dynamic_dims(self, arguments: Sequence[Any]) -> tuple[DynamicDim, ...]:
        """The dynamic dimensions of the arguments, except sizes 0 and 1 (special cases)."""
        leaves = {position: leaf for leaf, position in enumerate(self.arguments)}
        return tuple(
            DynamicDim(leaves[position], dimension, f"input {position}", name, name, _LEAST, None, required=False)
            for position, dimension, name in self.sizes.dims
            if arguments[leaves[position]].shape[dimension] >= _LEAST
        )

    def forward(self, *arguments: Any) -> Any:
        inputs: list[Any] = [None] * self._count
        for position, value in zip(self.arguments, arguments, strict=True):
            inputs[position] = value
        for position, (tensor, dimension) in self.sizes.numbers.items():
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
        if _is_item(n) and is_read(n.args[0]):
            return self.env[n.args[0]]  # the number itself
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


def is_read(node: fx.Node) -> bool:
    """Whether a node is an input of which the graph only reads the number."""
    return node.op == "placeholder" and bool(node.users) and all(map(_is_item, node.users))


def is_traceable(node: fx.Node) -> bool:
    """Whether a higher-order operator can be recorded: as Python, or as a custom Function that writes no operand."""
    return has_form(node.target) or (node.target is _CUSTOM and not node.kwargs.get("dirty_idx"))


def _is_item(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target == "item"


#: Dynamo's functions for torch.vmap, whose operators are traced on whole batches, and for Tensor.requires_grad_.
_TRACEABLE = (
    "set_inplace_requires_grad_allowed",
    "_set_tensor_requires_grad",
    "lazy_load_decompositions",
    "_vmap_increment_nesting",
    "_vmap_decrement_nesting",
    "_add_batch_dim",
    "_remove_batch_dim",
)


def problems_of(graph_module: fx.GraphModule) -> list[Unsupported]:
    """The nodes of a graph that cannot be traced, with reasons."""
    return [
        Unsupported(_target_name(node.target), user_line(node.meta.get("stack_trace")) or node.name, reason)
        for graph in graphs_in(graph_module)
        for node in graph.graph.nodes
        if (reason := _objection(node))
    ]


def _objection(node: fx.Node) -> str | None:
    """The reason why a node cannot be traced, or ``None``."""
    if isinstance(node.target, HigherOrderOperator) and not is_traceable(node):
        return "a higher-order operator"
    if (
        node.op == "call_method"
        and node.target in ("item", "tolist")
        and not (_is_item(node) and is_read(node.args[0]))
    ):
        return "reads numbers from a tensor that the graph computes"
    home = getattr(node.target, "__module__", None) or ""
    if home.startswith(TRANSFORM_MODULES) and _target_name(node.target) not in _TRACEABLE:
        return "a torch.func transform, or its like: it changes the interpreter's state as it is traced"
    return None


def _target_name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))
