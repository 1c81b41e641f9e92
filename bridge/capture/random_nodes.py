"""Random nodes of the traced graph ↔ eager's draws: each node of the functional graph that draws gets its draw.

Every node remembers which training-IR node it came from (:func:`bridge.capture.passes.stop_gradient.origin_of`): that
is how a random draw in the functional graph finds its place among the draws that eager makes, unused ones included.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from bridge.base.errors import Unsupported, user_line
from bridge.base.torch_fakes import stand_in
from bridge.base.torch_internals import FakeTensor, FakeTensorMode, OpOverload, aten
from bridge.capture.draw_recorder import record_draws
from bridge.capture.fake_run import FakeRun
from bridge.capture.number_index import PositionsAreZero
from bridge.capture.observation import Draw
from bridge.capture.passes.attention_draws import attention_rate, is_attention
from bridge.capture.passes.call_kinds import is_of_sizes, kind_key
from bridge.capture.passes.preserved_ops import SLOPE_DRAWS
from bridge.capture.passes.stop_gradient import origin_of
from bridge.capture.symbolic_formulas import running

__all__ = ["draws_by_origin", "eager_draws", "match_draws"]


def draws_by_origin(exported: ExportedProgram, mode: FakeTensorMode) -> tuple[list[Draw], dict[str, list[int]]]:
    """The draws of a training-IR graph in order, and for each of its nodes that draws, their indices.

    Calls of one kind draw alike, so one of each runs; where that cannot be told, the whole graph.
    """
    of_nodes = _draws_of_kinds(exported.graph, mode)
    if of_nodes is None:
        return _draws_of_a_run(exported, mode)
    draws: list[Draw] = []
    by_origin: dict[str, list[int]] = {}
    for node, drawn in of_nodes.items():
        if drawn:
            by_origin[origin_of(node)] = list(range(len(draws), len(draws) + len(drawn)))
            draws += drawn
    return draws, by_origin


def _draws_of_kinds(graph: fx.Graph, mode: FakeTensorMode) -> dict[fx.Node, list[Draw]] | None:
    """What each call draws; ``None`` if one reads or gives something else than tensors of known layouts, and sizes."""
    known: dict[tuple, list[Draw]] = {}
    found: dict[fx.Node, list[Draw]] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or node.target is operator.getitem or is_of_sizes(node):
            continue
        sources = node.all_input_nodes
        if not isinstance(node.target, OpOverload) or node.target.overloadpacket in _BEYOND_A_VIEW:
            return None
        if not all(isinstance(source.meta.get("val"), FakeTensor) or is_of_sizes(source) for source in sources):
            return None
        if node.target in _READS or isinstance(node.meta.get("val"), _NUMBERS):  # known in a run of the graph alone
            return None
        key = kind_key(node)
        if key not in known:
            own = {source: source.meta["val"] for source in sources}
            own.update((source, stand_in(value, mode)) for source, value in own.items() if not is_of_sizes(source))
            args, kwargs = fx.map_arg((node.args, node.kwargs), own.__getitem__)
            known[key] = []
            with running(mode):
                record_draws(partial(node.target, *args, **kwargs), known[key])
        found[node] = known[key]
    return found


#: What reads a number off a tensor, and what it gives (in the graph ``None``, where the number was known when traced).
_READS = (aten.item.default, aten._local_scalar_dense.default)
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)

#: They reach memory that a stand-in for their argument does not have.
_BEYOND_A_VIEW = (aten.as_strided, aten.as_strided_, aten.set_, aten.resize_)


def _draws_of_a_run(exported: ExportedProgram, mode: FakeTensorMode) -> tuple[list[Draw], dict[str, list[int]]]:
    draws: list[Draw] = []
    by_origin: dict[str, list[int]] = {}

    class Counting(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            start = len(draws)
            result = record_draws(lambda: fx.Interpreter.run_node(self, node), draws)
            if len(draws) > start:
                by_origin[origin_of(node)] = list(range(start, len(draws)))
            return result

    fakes = [_fake_placeholder(mode, node) for node in exported.graph.nodes if node.op == "placeholder"]
    with running(mode), PositionsAreZero():
        Counting(exported.graph_module).run(*fakes)
    return draws, by_origin


def eager_draws(
    exported: ExportedProgram, run: FakeRun, forward: str, unsupported: list[Unsupported]
) -> dict[str, list[int]]:
    """Which eager draws each training-IR node makes, checked against what the fake run observed."""
    eager = run.observation
    if not eager.draws and not eager.unsupported:
        return {}
    draws, by_origin = draws_by_origin(exported, run.mode)
    if draws != eager.draws and not eager.unsupported:
        reason = f"eager draws {_draw_list(eager.draws)}; the exported graph {_draw_list(draws)}"
        unsupported.append(Unsupported("random draws", forward, reason))
    return by_origin


def _draw_list(draws: list[Draw]) -> str:
    return "[" + ", ".join(f"{draw.op}{list(draw.shape)}{draw.args}" for draw in draws) + "]"


def match_draws(
    graph: fx.Graph, by_origin: Mapping[str, Sequence[int]], forward: str
) -> tuple[dict[str, int], list[Unsupported]]:
    """The draw of every random node of the functional graph, by its name; unused draws stay without a node.

    Args:
        by_origin: from :func:`draws_by_origin`.
        forward: what to name where no source line is known, as in ``"Block.forward"``.
    """
    nodes_of: dict[str, list[fx.Node]] = {}
    first_of: dict[str, fx.Node] = {}
    for node in graph.nodes:
        first_of.setdefault(origin_of(node), node)
        if _is_random(node):
            nodes_of.setdefault(origin_of(node), []).append(node)
    # a call that draws and is still in the graph without its draws was decomposed wrongly
    nodes_of.update({origin: [] for origin in by_origin if origin in first_of and origin not in nodes_of})
    draw_of: dict[str, int] = {}
    problems = []
    for origin, nodes in nodes_of.items():
        draws = by_origin.get(origin, [])
        if len(draws) != len(nodes):
            first = nodes[0] if nodes else first_of[origin]
            where = user_line(first.meta.get("stack_trace")) or forward
            reason = f"{len(nodes)} random nodes in the graph for {len(draws)} draws of eager"
            problems.append(Unsupported(str(first.target) if nodes else origin, where, reason))
            continue
        draw_of.update((node.name, draw) for node, draw in zip(nodes, draws, strict=True))
    return draw_of, problems


def _is_random(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    if node.target is aten.native_dropout.default:
        value, rate, train = node.args
        return bool(train) and 0 < rate < 1 and value.meta["val"].numel() > 0
    if node.target in SLOPE_DRAWS:
        return any(node.args[4:5])
    return not is_attention(node.target) or attention_rate(node.target, node.args, node.kwargs) > 0


def _fake_placeholder(mode: FakeTensorMode, node: fx.Node) -> Any:
    value = node.meta["val"]
    return stand_in(value, mode) if isinstance(value, torch.Tensor) else value
