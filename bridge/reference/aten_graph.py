"""ATen interpreter: a traced graph and tensors → results and values, by torch's own kernels and autograd."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autodiff.dropout import keep_scale
from bridge.aten import Imported, described_draw
from bridge.base.generators import at_state, default_generator
from bridge.base.torch_internals import aten
from bridge.capture import RECURRENT_LAYERS, STOP_GRADIENT, Captured, Draw, Parameter
from bridge.library import FUNCTIONS
from bridge.reference.draws import Drawn
from bridge.reference.relax import Run

__all__ = ["interpret_graph", "run_graph"]


def interpret_graph(captured: Captured, imported: Imported, primals: Sequence[torch.Tensor]) -> Run:
    """Runs the graph; results and values as the imported function has them.

    ``primals``: module tensors, arguments, random draws, dropout masks, as for the Relax stages. What the graph draws
    is taken from there.
    """
    given = len(captured.module_tensors) + len(captured.arguments)
    wanted = given + len(imported.input_draws) + len(imported.dropout_draws)
    if len(primals) != wanted:
        raise ValueError(f"wanted {wanted} primals (module tensors, arguments, draws, masks), got {len(primals)}")
    drawn = Drawn(
        captured.draws, dict(zip((*imported.input_draws, *imported.dropout_draws), primals[given:], strict=True))
    )
    env: dict[fx.Node, Any] = {}
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            env[node] = _placeholder(captured, node, primals)
        elif node.op == "call_function":
            env[node] = _call(captured, node, env, drawn)
    nodes = [node for node, position in _results(captured, imported) if position is not None]
    nodes += [node for _, node in captured.mutated]
    return Run([env[node] for node in nodes], {node.name: value for node, value in env.items()})


def run_graph(captured: Captured, imported: Imported, primals: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of :func:`interpret_graph` alone. ``ValueError`` if there are not as many primals as wanted."""
    return interpret_graph(captured, imported, primals).results


def _results(captured: Captured, imported: Imported) -> list[tuple[fx.Node, int | None]]:
    return list(zip(captured.results, imported.output_of, strict=True))


def _placeholder(captured: Captured, node: fx.Node, primals: Sequence[torch.Tensor]) -> Any:
    if node.name in captured.placeholders:
        return primals[captured.placeholders[node.name]]
    if node.name in captured.literals:
        return captured.literals[node.name].detach().clone()
    return node.meta.get("val")


def _call(captured: Captured, node: fx.Node, env: Mapping[fx.Node, Any], drawn: Drawn) -> Any:
    args = fx.node.map_arg(node.args, env.__getitem__)
    kwargs = fx.node.map_arg(node.kwargs, env.__getitem__)
    if node.target is operator.getitem:
        return args[0][args[1]]
    if node.target is STOP_GRADIENT:
        return args[0].detach().clone()
    if node.target is aten.copy.default:  # torch has no derivative of its functional form
        return args[1].to(args[0].dtype).expand(args[0].shape)
    if node.target is RECURRENT_LAYERS:  # an operator without a kernel: torch's of that name
        cell, x, states, weights, biases, layers, both_ways, batch_first = args
        layered = getattr(aten, cell).input
        first = states if cell == "lstm" else states[0]
        return layered(x, first, weights, biases, layers, 0.0, False, both_ways, batch_first)
    if node.name in captured.draw_of:
        index = captured.draw_of[node.name]
        count = len([arg for arg in captured.draws[index].args if isinstance(arg, Parameter)])
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)] if count else []
        parameters = tensors[len(tensors) - count :]  # what is only filled comes before them
        draw = drawn.at(index, parameters)
        if captured.draws[index].is_placed:
            return _placed(node, captured.draws[index], args, kwargs, parameters, draw)
        if node.target is aten.native_dropout.default and draw is not None:
            x, rate = args[:2]
            scale = keep_scale(float(rate), str(x.dtype).removeprefix("torch."))
            return x * (draw.to(x.dtype) * scale).to(x.dtype), draw
        if draw is not None:
            return draw.to(node.meta["val"].dtype)
    return node.target(*args, **kwargs)


def _placed(
    node: fx.Node, draw: Draw, args: tuple, kwargs: dict[str, Any], parameters: list[torch.Tensor], state: torch.Tensor
) -> Any:
    """What is drawn inside of the program, from the generator's state at its place."""
    if parameters:
        made = FUNCTIONS["placed_draw"](draw.op, described_draw(draw)[0], draw.advance, state, *parameters)
        return made.to(node.meta["val"].dtype)
    with at_state(default_generator(draw.device), *state.tolist()):
        return node.target(*args, **kwargs)
