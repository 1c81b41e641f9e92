"""ATen interpreter: a traced graph and tensors → results and values, by torch's own kernels and autograd.

Draws of the graph are replayed: inputs of the imported function → eager's draw at each node.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from autodiff.dropout import keep_scale
from bridge.aten import Imported, described_draw
from bridge.base.generators import at_state, default_generator
from bridge.base.tensor_properties import as_complex, as_parts
from bridge.base.torch_internals import OpOverload, aten
from bridge.capture import (
    APPLY,
    BACKWARD,
    COLLECTIVE,
    CUSTOM_GRADIENT,
    LOOP_MARKS,
    OVERWRITTEN,
    PACKED_LAYERS,
    RECURRENT_LAYERS,
    SLOPE_DRAWS,
    STOP_GRADIENT,
    TANGENT,
    WHOLE,
    WITH_GRADIENT,
    Captured,
    Draw,
    Parameter,
    packed_layers,
)
from bridge.library import FUNCTIONS
from bridge.reference.custom_functions import OwnCall, own_calls, with_own_gradient
from bridge.reference.relax import InterpretedRun


class Drawn:
    """The random draws of one run.

    Args:
        draws: eager's draws, in order.
        given: by index: the tensor of a draw that is made before the program; the generator's state of an in-kernel
            draw at an offset; the state of the first draw with computed parameters, from which the run makes it and all
            later ones (:mod:`bridge.aten.draws`).
    """

    def __init__(self, draws: Sequence[Draw], given: Mapping[int, torch.Tensor]):
        self._draws, self._given = draws, given
        self._next = next((index for index, draw in enumerate(draws) if draw.is_computed), len(draws))
        self._first, self._state = self._next, given.get(self._next)

    def at(self, index: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """A draw; a computed one with these parameters; ``None`` if it is no input of the function."""
        if index < self._first:
            return self._given.get(index)
        for unused in range(self._next, index):
            self._make(unused, ())
        self._next = index + 1
        return self._make(index, tensors)

    def _make(self, index: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        draw = self._draws[index]
        description, _ = described_draw(draw)
        made, self._state = FUNCTIONS["draw"](draw.op, description, self._state, *tensors)
        return made


_FIRST, _PART, _LAST, _STEPS = LOOP_MARKS


class MarkedLoop:
    """A loop: its marks and body, in order; ``depending``: nodes that depend on a step; ``marks``: all its marks."""

    def __init__(self, nodes: list[fx.Node], number: int):
        self.marks = own = [node for node in nodes if _number(node) == number]
        self.first, self.part, self.last, self.steps = ([n for n in own if n.target is mark] for mark in LOOP_MARKS)
        given, self.made = {*self.first, *self.part}, [*self.last, *self.steps]
        needed = {node.args[0] for node in self.made}
        self.depending = depends = set(given)
        for node in nodes:
            if node not in self.made and any(source in depends for source in node.all_input_nodes):
                depends.add(node)
        for node in reversed(nodes):
            if node in needed and node in depends and node not in given:
                needed.update(node.all_input_nodes)
        self.body = [node for node in nodes if node in depends and node in needed and node not in given]
        *_, self.length, self.reverse = self.first[0].args

    def run(self, env: Mapping[fx.Node, Any], call: Callable[[fx.Node, Mapping], Any]) -> dict[fx.Node, Any]:
        """The values of the final marks and of the body, after the last step."""
        inner = dict(env)
        inner.update((node, env[node.args[0]]) for node in self.first)
        after: dict[fx.Node, fx.Node] = {
            node: next(last.args[0] for last in self.last if last.args[2] == node.args[3]) for node in self.first
        }
        ys: dict[fx.Node, list[torch.Tensor]] = {node: [] for node in self.steps}
        length = env[self.length] if isinstance(self.length, fx.Node) else self.length
        for step in reversed(range(length)) if self.reverse else range(length):
            inner.update((node, env[node.args[0]][step]) for node in self.part)
            for node in self.body:
                inner[node] = call(node, inner)
            for node, values in ys.items():
                values.append(inner[node.args[0]])
            made = {node: inner[node.args[0]] for node in self.last}
            inner.update([(node, inner[source]) for node, source in after.items()])
        found = {node: torch.stack(values[::-1] if self.reverse else values) for node, values in ys.items()}
        return {**made, **found, **{node: inner[node] for node in self.body}}


def marked_loops(graph: fx.Graph) -> list[MarkedLoop]:
    """The loops of a graph, in order."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    return [MarkedLoop(nodes, number) for number in sorted({_number(node) for node in nodes} - {None})]


def _number(node: fx.Node) -> int | None:
    """The number of the loop that a mark belongs to."""
    return node.args[2 if node.target is _FIRST else 1] if node.target in LOOP_MARKS else None


_BATCH_NORM = aten._native_batch_norm_legit_functional.default
_ATTENTION = (aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default)
"""Operators whose fifth argument tells whether they compute the tensors for their backward."""
_SCATTERS = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
}
"""Functional writes into a part of a tensor → the view of that part."""
_VIEWS = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    aten.view_as_complex.default: lambda x: aten.view_as_complex.default(x.contiguous()),
    aten.view.dtype: lambda x, dtype: aten.view.dtype(x.contiguous(), dtype),
}
"""Views that torch supports only for some strides → functions with the same numbers for any strides."""
_OURS = "tvm_dispatch"
_LAYERS = (RECURRENT_LAYERS, PACKED_LAYERS)
_TORCH_HAS = (STOP_GRADIENT, OVERWRITTEN, CUSTOM_GRADIENT, TANGENT, WITH_GRADIENT)
_TORCH_HAS += (APPLY, BACKWARD, COLLECTIVE, *_LAYERS, *WHOLE, *LOOP_MARKS)
"""Operators of this package that run as torch's own."""
_RUNNING = 3, 4
"""Positions of the running statistics among the arguments, and of the new ones among the results."""


def interpret_graph(captured: Captured, imported: Imported, primals: Sequence[torch.Tensor]) -> InterpretedRun:
    """Runs the graph; returns the results and values of the imported function.

    ``primals``: module tensors, arguments, random draws, dropout masks, as for the Relax stages; the graph's draws are
    taken from them.
    """
    env = _run(captured, imported, primals, captured.graph.nodes, own_calls(captured.graph.nodes))
    _overwrite(captured, env, {index: as_parts(env[captured.mutated[at][1]]) for at, index in captured.left.items()})
    nodes = [node for node, position in _results(captured, imported) if position is not None]
    nodes += [node for _, node in captured.mutated]
    return InterpretedRun([as_parts(env[node]) for node in nodes], {node.name: value for node, value in env.items()})


def run_graph(captured: Captured, imported: Imported, primals: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of :func:`interpret_graph`. ``ValueError`` for a wrong number of primals."""
    return interpret_graph(captured, imported, primals).results


def outputs_at(
    captured: Captured,
    imported: Imported,
    primals: Sequence[torch.Tensor | None],
    places: Sequence[int],
    cut: Mapping[int, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType({}),
    now: Mapping[int, torch.Tensor] = MappingProxyType({}),
) -> list[torch.Tensor]:
    """Some results of :func:`run_graph`, which autograd follows; computes no others. Complex tensors stay complex.

    Args:
        primals: as there; ``None`` allowed where :func:`needed_nodes` has no use of one.
        places: positions among the imported function's outputs.
        cut: by position of an output: a function applied to it, whose result the other outputs are computed from.
        now: by input that forward overwrites behind autograd's back: the memory's contents that a backward reads.

    Raises:
        RuntimeError: they are computed with an operator of this package that torch has no counterpart of.
    """
    node_of = {position: node for node, position in _results(captured, imported) if position is not None}
    roots = [node_of[place] for place in places]
    nodes = needed_nodes(captured, roots)
    for node in nodes:
        if isinstance(node.target, OpOverload) and node.target.namespace == _OURS and node.target not in _TORCH_HAS:
            raise RuntimeError(f"derivatives through {node.target}, which torch has no derivative of")
    env = _run(
        captured, imported, primals, nodes, own_calls(nodes), {node_of[place]: made for place, made in cut.items()}
    )
    _overwrite(captured, env, now)
    return [env[root] for root in roots]


def _overwrite(captured: Captured, env: Mapping[fx.Node, Any], now: Mapping[int, torch.Tensor]) -> None:
    """Copies the present contents of overwritten memory into the values that autograd has saved."""
    for node, value in env.items():
        name = node.args[1] if node.target is OVERWRITTEN else node.name
        if (memory := now.get(captured.names.placeholders.get(name))) is not None:
            value.data.copy_(as_complex(memory) if value.is_complex() else memory)


def needed_nodes(captured: Captured, roots: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes that ``roots`` are computed from, in order; all draws as well, if one is computed from generator state.

    A batch normalization with the batch's own statistics does not depend on the running ones.
    """
    marked: set[fx.Node] = set()
    if any(draw.is_computed for draw in captured.draws):
        marked.update(node for node in captured.graph.nodes if node.name in captured.names.draws)
    marked.update(roots)
    for loop in marked_loops(captured.graph):  # a loop runs as a whole
        marked.update(loop.marks)
    for node in reversed(captured.graph.nodes):
        if node in marked:
            skipped = [node.args[place] for place in _RUNNING] if _leaves_running_alone(node, marked) else []
            marked.update(source for source in node.all_input_nodes if source not in skipped)
    return [node for node in captured.graph.nodes if node in marked]


def _leaves_running_alone(node: fx.Node, marked: Collection[fx.Node]) -> bool:
    if node.target is not _BATCH_NORM or not node.args[5]:
        return False
    new = [user for user in node.users if user.target is operator.getitem and user.args[1] in _RUNNING]
    return not any(user in marked for user in new)


def _run(
    captured: Captured,
    imported: Imported,
    primals: Sequence[torch.Tensor | None],
    nodes: Iterable[fx.Node],
    functions: Iterable[OwnCall] = (),
    cut: Mapping[fx.Node, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType({}),
) -> dict[fx.Node, Any]:
    """The values of nodes. ``functions``: custom autograd Functions whose backward autograd follows; ``cut``: functions
    applied to the values of some nodes."""
    given = len(captured.module_tensors) + len(captured.given.tensors)
    wanted = given + len(imported.input_draws) + len(imported.dropout_draws)
    if len(primals) != wanted:
        raise ValueError(f"wanted {wanted} primals (module tensors, arguments, draws, masks), got {len(primals)}")
    drawn = Drawn(
        captured.draws, dict(zip((*imported.input_draws, *imported.dropout_draws), primals[given:], strict=True))
    )
    env: dict[fx.Node, Any] = {}
    loops = marked_loops(captured.graph)
    inside = {node for loop in loops for node in loop.depending}
    made = {node: loop for loop in loops for node in loop.made}
    unfollowed = {node for each in functions for node in each.forward}
    later = {node for each in functions for node in each.backward}
    outputs = {node: each for each in functions for node in each.outputs}
    for node in nodes:
        if node.op == "placeholder":
            env[node] = _placeholder(captured, node, primals)
        elif node in made:
            if node not in env:
                env.update(made[node].run(env, partial(_call, captured, drawn=drawn)))
        elif node in outputs:
            if node not in env:
                env.update(outputs[node].run(env, partial(_call, captured, drawn=drawn)))
        elif node.op == "call_function" and node not in inside and node not in later:
            with torch.no_grad() if node in unfollowed else nullcontext():
                env[node] = _call(captured, node, env, drawn)
        if node in cut:
            env[node] = cut[node](env[node])
    return env


def _results(captured: Captured, imported: Imported) -> list[tuple[fx.Node, int | None]]:
    return list(zip(captured.results, imported.output_of, strict=True))


def _placeholder(captured: Captured, node: fx.Node, primals: Sequence[torch.Tensor]) -> Any:
    if node.name in captured.names.placeholders:
        given = primals[captured.names.placeholders[node.name]]
        if captured.names.placeholders[node.name] in captured.observation.overwritten:
            given = given.clone()  # autograd saves the copy, which ``_overwrite`` updates
        return as_complex(given) if node.meta["val"].dtype.is_complex else given
    if node.name in captured.names.literals:
        return captured.names.literals[node.name].detach().clone()
    return node.meta.get("val")


def _call(captured: Captured, node: fx.Node, env: Mapping[fx.Node, Any], drawn: Drawn) -> Any:
    args = fx.node.map_arg(node.args, env.get)
    kwargs = fx.node.map_arg(node.kwargs, env.__getitem__)
    if node.target is operator.getitem:
        return args[0][args[1]]
    if node.target is STOP_GRADIENT:
        return args[0].detach().clone()
    if node.target is OVERWRITTEN:
        return args[0].clone()
    if node.target is WITH_GRADIENT:
        return with_own_gradient(*args)
    if node.target is aten._embedding_bag_forward_only.default:  # traced without a backward, as attention is
        return aten._embedding_bag.default(*args, **kwargs)
    if node.target in _ATTENTION:
        args = (*args[:4], True, *args[5:])
    if node.target is aten.copy.default:  # torch has no derivative of its functional form
        return args[1].to(args[0].device, args[0].dtype).expand(args[0].shape)
    if node.target is aten.as_strided_scatter.default:  # torch's derivative lets the overwritten elements through
        written = args[0].clone(memory_format=torch.preserve_format)
        if written.stride() == args[0].stride():
            written.as_strided(*args[2:]).copy_(args[1])
            return written
    if node.target in _SCATTERS and args[0].is_complex():  # torch has no derivative of their functional form
        written = args[0].clone()
        _SCATTERS[node.target](written, *args[2:], **kwargs).copy_(args[1])
        return written
    if node.target is _BATCH_NORM and args[3] is None:
        return (*aten.native_batch_norm.default(*args[:3], None, None, *args[5:]), None, None)
    if node.target is PACKED_LAYERS:
        return packed_layers(*args)
    if node.target is RECURRENT_LAYERS:  # an operator without a kernel: torch's of that name
        cell, x, states, weights, biases, layers, both_ways, batch_first = args
        layered = getattr(aten, cell).input
        first = states if cell == "lstm" else states[0]
        # without dropout, training only makes cuDNN keep the tensors for a backward
        return layered(x, first, weights, biases, layers, 0.0, True, both_ways, batch_first)
    if node.name in captured.names.draws:
        index = captured.names.draws[node.name]
        count = len([arg for arg in captured.draws[index].args if isinstance(arg, Parameter)])
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)] if count else []
        if node.target in SLOPE_DRAWS:  # a tensor to be filled follows the parameter; elsewhere it precedes it
            tensors = tensors[:1]
        parameters = tensors[len(tensors) - count :]
        draw = drawn.at(index, parameters)
        if captured.draws[index].is_attention_mask:
            return _attention(args, kwargs, draw), None
        if captured.draws[index].is_placed:
            return _placed(node, captured.draws[index], args, kwargs, parameters, draw)
        if node.target is aten.native_dropout.default and draw is not None:
            x, rate = args[:2]
            scale = keep_scale(float(rate), str(x.dtype).removeprefix("torch."))
            return x * (draw.to(x.dtype) * scale).to(x.dtype), draw
        if draw is not None:
            return _as_drawn(node, args, draw)
    if node.target in _VIEWS:  # layouts may differ from the trace's, behind custom autograd Functions
        return _VIEWS[node.target](*args, **kwargs)
    return node.target(*args, **kwargs)


def _as_drawn(node: fx.Node, args: tuple, draw: torch.Tensor) -> Any:
    """The result of a node that makes this draw."""
    if node.target in SLOPE_DRAWS:
        slopes = draw.to(args[0].dtype)
        return args[0] * slopes, slopes
    wanted = node.meta["val"].dtype
    return as_complex(draw) if wanted.is_complex and not draw.is_complex() else draw.to(wanted)


def _attention(args: tuple, kwargs: dict[str, Any], kept: torch.Tensor) -> torch.Tensor:
    """The efficient kernel's result, with the weights kept by its mask: see its conversion."""
    query, key, value, mask, _, rate, is_causal = (*args, False)[:7]
    scale = kwargs.get("scale")
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if mask is None else scores + mask
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    nothing = (scores * math.log2(math.e)).amax(-1, keepdim=True) == -torch.inf
    weights = scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
    result = (weights * kept / (1 - rate)) @ value
    return result.transpose(1, 2).contiguous().transpose(1, 2)  # eager's layout


def _placed(
    node: fx.Node, draw: Draw, args: tuple, kwargs: dict[str, Any], parameters: list[torch.Tensor], state: torch.Tensor
) -> Any:
    """The result of a draw inside the program, from the generator's state at its place."""
    if parameters:
        made = FUNCTIONS["draw_at_offset"](draw.op, described_draw(draw)[0], draw.advance, state, *parameters)
        return _as_drawn(node, args, made)
    with at_state(default_generator(draw.device), *state.tolist()):
        return node.target(*args, **kwargs)
