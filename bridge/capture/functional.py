"""Functionalization: a training graph → core ATen operators that write nothing, with composite ones decomposed.

Each operator of the training graph runs once on fake tensors, under torch's functionalization, which emits the
operators that it calls. Some operators stay whole (:mod:`bridge.capture.passes.decompositions`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from operator import getitem
from typing import Any

import torch
from torch import fx

from bridge.base.devices import current_device
from bridge.base.errors import Unsupported, UnsupportedModule, swallowed
from bridge.base.modes import while_active
from bridge.base.pytrees import tensor_leaves
from bridge.base.torch_internals import (
    FakeTensor,
    FunctionalTensor,
    OpOverload,
    aten,
    autograd_key,
    has_own_kernel,
    implements_composite,
    python_kernels,
    pytree,
    schema,
    storage_id,
)
from bridge.base.torch_recording import (
    DispatchMode,
    FunctionalTensorMode,
    below_autograd,
    composite_kernel,
    functional_of,
    in_functional,
    is_written,
    own_operator,
)
from bridge.base.torch_shapes import SYMBOLIC
from bridge.capture.custom_functions import OWN
from bridge.capture.draws import draws_at
from bridge.capture.loops.operators import MARKS
from bridge.capture.passes.alias_analysis import OF, PATH, ROW, WHERE, aliased, memory_at, refused_at, written
from bridge.capture.passes.decompositions import composite_formulas, formulas, may_raise, whole_operators
from bridge.capture.passes.stop_gradient import PART_OF
from bridge.capture.refusals import explain_error
from bridge.capture.select_at import AS_STRIDED
from bridge.capture.symbolic_run import POOLINGS
from bridge.capture.training_graph import SizeNodes, TrainingGraph
from bridge.capture.whole_functions import SHAPES

_HANDED_ON = (WHERE, PATH, ROW, OWN, PART_OF)


@dataclass(frozen=True)
class FunctionalGraph:
    """A functional graph without an output.

    Attributes:
        results: the node of each result of the training graph; a result that is no node stays.
        written: name of each placeholder that is written → the node of its new value.
        drawing: the nodes that draw, in order.
    """

    graph: fx.Graph
    results: Sequence[Any]
    written: dict[str, fx.Node]
    drawing: Sequence[fx.Node]


def functional_graph(training: TrainingGraph) -> FunctionalGraph:
    """Functionalizes a training graph; the new nodes inherit the origins of its nodes.

    Raises:
        UnsupportedModule: an operator differs on fake tensors from eager, or cannot run on them.
    """
    emitter = _Emitter(training.mode)
    values: dict[fx.Node, Any] = {}
    memory = {each for node in training.graph.nodes for target in written(node) for each in memory_at(target)}
    inputs: dict[str, Any] = {}
    results: list[Any] = []
    emits = while_active(training.mode, through=emitter.called)
    with torch.no_grad(), below_autograd(), training.mode, emits, _Functional(emitter.symbolic):
        for node in training.graph.nodes:
            emitter.current = node
            if node.op == "placeholder":
                inputs[node.name] = values[node] = FunctionalTensor.to_functional(emitter.placeholder(node))
            elif node.op == "output":
                results = [_inner(values[each]) if isinstance(each, fx.Node) else each for each in node.args[0]]
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                try:
                    made = node.target(*args, **kwargs)
                except Exception as error:  # noqa: BLE001 - a formula of torch's may raise any error
                    swallowed(error)
                    raise UnsupportedModule("", [_not_made(node, error, emitter.symbolic)], error) from None
                if not emitter.symbolic:
                    _check_strides(node, args)
                    if node.meta.get(OF) is node.target and not _writes(node):
                        _compare_with_eager(node, made, args, kwargs, memory)
                values[node] = made
        last = {name: emitter.node_of(_inner(value)) for name, value in inputs.items() if is_written(value)}
    results = [emitter.node_of(each) if isinstance(each, torch.Tensor) else each for each in results]
    return FunctionalGraph(emitter.graph, results, last, [node for node in emitter.graph.nodes if draws_at(node)])


def _not_made(node: fx.Node, error: Exception, symbolic: bool) -> Unsupported:
    if type(error) is not RuntimeError:
        return explain_error(error, node.meta.get(WHERE))
    taken = [each.meta.get("val") for each in node.all_input_nodes]
    for each in taken:
        if isinstance(each, torch.Tensor) and each.layout is not torch.strided:
            return refused_at(node, f"takes a tensor of layout {each.layout}")
    dynamic, told = " for sizes that vary" * symbolic, str(error).partition(".  ")[0]
    return refused_at(node, f"torch cannot make it functional{dynamic}: {told}")


def _compare_with_eager(node: fx.Node, made: Any, args: tuple, kwargs: dict[str, Any], memory: set[int]) -> None:
    """Refuses an operator whose results on fake tensors have other shapes or dtypes than eager's, or of which one is a
    view and the other a copy of written memory: ``reshape`` decides by strides, which fakes may have otherwise."""
    ours, found, here = tensor_leaves(node.meta["val"]), tensor_leaves(made), memory_at(node)
    if type(made) is tuple and len(ours) == len(found) == len(here) == len(made):  # oneDNN adds an unread workspace
        read = {user.args[1] for user in node.users if user.target is getitem and user.users}
        ours, found, here = ([each for place, each in enumerate(kind) if place in read] for kind in (ours, found, here))
    if [(each.shape, each.dtype) for each in ours] != [(each.shape, each.dtype) for each in found]:
        words = [", ".join(f"{each.dtype} of shape {list(each.shape)}" for each in forms) for forms in (ours, found)]
        reason = f"on the sample eager gives {words[0]}, and torch's formula {words[1]}"
        raise UnsupportedModule("", [refused_at(node, reason)])
    there = [each for source in node.all_input_nodes for each in memory_at(source)]
    if memory.isdisjoint((*there, *here)) or (aliased(node) is None and _is_given_away(node, there)):
        return
    operands = {storage_id(each.elem) for each in tensor_leaves((args, kwargs))}
    if [each in there for each in here] != [storage_id(each.elem) in operands for each in found]:
        reason = "copies in eager what it views on fake tensors, or the reverse, and one of the two is written"
        raise UnsupportedModule("", [refused_at(node, reason, "clone before the write")])


def _check_strides(node: fx.Node, args: tuple) -> None:
    """Refuses an ``as_strided`` that finds its tensor's elements at other places than in eager."""
    if node.target not in AS_STRIDED:
        return
    (eager, start), (ours, at) = (
        (each.stride(), each.storage_offset()) for each in (node.args[0].meta["val"], args[0])
    )
    hint = "call contiguous() before it"
    if eager != ours:
        raise UnsupportedModule("", [refused_at(node, "its tensor has other strides after functionalization", hint)])
    if start != at or (start and len(node.args) >= 4):
        raise UnsupportedModule("", [refused_at(node, "its tensor begins inside another", hint)])


def _is_given_away(node: fx.Node, memory: Sequence[int | None]) -> bool:
    """Whether only an operator's results still use ``memory``, as after ``unsafe_chunk``, which returns views."""
    before = takewhile(lambda each: each is not node, node.graph.nodes)
    owners = {each for each in before if not set(memory).isdisjoint(memory_at(each))}
    return all(each.op == "call_function" and owners.issuperset({*each.users} - {node}) for each in owners)


def _writes(node: fx.Node) -> bool:
    """Whether a call may write in place, or read memory outside of its tensors' elements."""
    if node.op != "call_function" or node.target is getitem:
        return False
    op = node.target
    return not isinstance(op, OpOverload) or schema(op).is_mutable or op.overloadpacket in _UNTOLD


_UNTOLD = (aten.batch_norm, aten.instance_norm, aten.as_strided, aten._assert_async)
"""Operators with effects that their schema does not state: running statistics, memory by strides, assertions."""


def _inner(value: Any) -> Any:
    return in_functional(value) if isinstance(value, FunctionalTensor) else value


def drop_unused(graph: fx.Graph, before: Collection[fx.Node]) -> None:
    """Erases calls without users and effects; one that may raise stays, with an assertion that it has run, unless a
    call computes it ``before`` its forward."""
    for node in reversed(graph.nodes):  # unused draws go, as in torch: bridge.rng draws for them at each call
        if node.op == "call_function" and not node.users and node.target not in MARKS:
            if isinstance(node.target, OpOverload) and node.target in _EFFECTS:
                continue
            if node not in before and is_for_errors(node.target, node.args, node.meta.get("val")):
                _assert_ran(graph, node)
            else:
                graph.erase_node(node)


_EFFECTS = (aten._assert_async.msg,)
RAN = own_operator("ran(Tensor x) -> Tensor", lambda x: torch.ones((), dtype=torch.bool, device=x.device))
"""Tensor → a true scalar, which is available once the tensor has been computed."""


def is_for_errors(op: Any, args: Sequence[Any], value: Any) -> bool:
    """Whether a call without users must stay because it may raise an error, as in eager."""
    tensors = tensor_leaves(value)
    if not tensors:
        return False
    return may_raise(op, tensors[0].dtype, len(args) > 1 and isinstance(args[1], int | float) and args[1] != 0)


def _assert_ran(graph: fx.Graph, node: fx.Node) -> None:
    result, value = node, node.meta["val"]
    with graph.inserting_after(node):
        if not isinstance(value, torch.Tensor):
            place = next(place for place, each in enumerate(value) if isinstance(each, torch.Tensor))
            result, value = graph.call_function(getitem, (node, place)), value[place]
            result.meta.update(node.meta, val=value)
    with graph.inserting_after(result):
        ran = graph.call_function(RAN, (result,))
    with graph.inserting_after(ran):
        graph.call_function(aten._assert_async.msg, (ran, "what nobody reads")).meta.update(node.meta, val=None)
    ran.meta.update(node.meta, val=RAN(value))


_DEVICE = torch.ops.prim.device.default


class _Functional(DispatchMode, FunctionalTensorMode):
    """Functionalization that decomposes composite operators unless they stay whole."""

    def __init__(self, symbolic: bool) -> None:
        super().__init__()
        self.symbolic = symbolic

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _DEVICE and type(args[0]) is FakeTensor and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # a frequent query
        kwargs = kwargs or {}
        if _is_whole(func):
            args, kwargs = pytree.tree_map_only(FunctionalTensor, in_functional, (args, kwargs))
            return pytree.tree_map_only(torch.Tensor, partial(functional_of, mode=self), func(*args, **kwargs))
        for formula in (POOLINGS.get(func), composite_formulas().get(func) or func.py_kernels.get(autograd_key)):
            if formula is not None:
                with self:
                    made = formula(*args, **kwargs)
                if made is not NotImplemented:
                    return made
        with python_kernels() if self.symbolic else nullcontext():
            return super().__torch_dispatch__(func, types, args, kwargs)

    def _can_decompose(self, func, args, kwargs):
        return implements_composite(func)


def _is_whole(func: Any) -> bool:
    """Whether an operator stays whole (and its results have new memory): it is listed in
    :mod:`bridge.capture.passes.decompositions`, or it is composite and has its own kernel on the device."""
    if func in whole_operators():
        return True
    if func.namespace != "aten" or func in formulas():
        return False
    return implements_composite(func) and has_own_kernel(func, current_device())


class _Emitter:
    """Emits functional operators as nodes; an operator with a decomposition emits the operators that it calls.

    Args:
        mode: of the fake tensors, whose operators pass :meth:`called`.
    """

    def __init__(self, mode: Any) -> None:
        self.mode, self.symbolic = mode, mode.shape_env is not None
        self.graph = fx.Graph()
        self.sizes = SizeNodes(self.graph)
        self.current: fx.Node | None = None
        self._nodes: dict[int, tuple[torch.Tensor, fx.Node]] = {}

    def placeholder(self, node: fx.Node) -> torch.Tensor:
        made = self.graph.create_node("placeholder", node.target, name=node.name)
        made.name, made.meta = node.name, dict(node.meta)
        self.sizes.read_from(made)
        return self.noted(node.meta["val"], made)

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        return self._nodes[id(tensor)][1]

    def noted(self, tensor: torch.Tensor, node: fx.Node) -> torch.Tensor:
        self._nodes[id(tensor)] = tensor, node
        return tensor

    def called(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs an operator on fake tensors → its result."""
        if func.namespace == "prim" or func.name().startswith("aten::sym_"):
            return self.mode.alone(func, *args, **kwargs)
        is_whole = _is_whole(func)
        formula = None if is_whole else formulas().get(func)
        if formula is None and not is_whole and implements_composite(func):
            formula = partial(composite_kernel, func)
        if formula is not None:
            with self.mode:
                made = formula(*args, **kwargs)
            if made is not NotImplemented:
                return made
        result = self.mode.alone(SHAPES[func], *args, **kwargs) if func in SHAPES else NotImplemented
        if result is NotImplemented:
            with python_kernels() if self.symbolic else nullcontext():  # some in C++ take symbolic sizes for numbers
                result = self.mode.alone(func, *args, **kwargs)
        given_args, given_kwargs = pytree.tree_map_only((torch.Tensor, *SYMBOLIC), self._operand, (args, kwargs))
        node = self.emitted(func, given_args, given_kwargs, result)
        if isinstance(result, torch.Tensor):
            self.noted(result, node)
        elif isinstance(result, list | tuple):
            for place, each in enumerate(result):
                if isinstance(each, torch.Tensor):
                    self.noted(each, self.emitted(getitem, (node, place), {}, each))
        return result

    def emitted(self, func: Any, args: Any, kwargs: Any, value: Any) -> fx.Node:
        """A node for a call of an operator or for an item of its result, with the current node's origin."""
        name = None if func is getitem else func.overloadpacket.__name__
        node = self.graph.create_node("call_function", func, args, kwargs, name=name)
        told = {} if self.current is None else self.current.meta
        node.meta = {key: told[key] for key in _HANDED_ON if key in told}
        node.meta["val"] = value
        return node

    def _operand(self, value: Any) -> Any:
        return self._nodes[id(value)][1] if isinstance(value, torch.Tensor) else self.sizes.of(value)
