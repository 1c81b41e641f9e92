"""Draws of a record: each node of the functional graph that draws → which of eager's draws it makes.

The nodes that come from one row draw in the order in which that row drew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from bridge.base.errors import Unsupported, line_of
from bridge.base.torch_internals import OpOverload, aten
from bridge.base.torch_shapes import hint
from bridge.capture.observation import Draw
from bridge.capture.passes.attention_draws import attention_rate, is_attention
from bridge.capture.passes.preserved_ops import SLOPE_DRAWS
from bridge.capture.passes.told import ROW
from bridge.capture.rows import Row, form_of

__all__ = ["draws", "match_draws"]


def match_draws(
    drawing: Sequence[fx.Node], rows: Sequence[Row], made: Sequence[Draw], forward: str
) -> tuple[dict[str, int], list[Unsupported]]:
    """The draw of every node that draws, by its name; and what was drawn otherwise.

    Args:
        drawing: the nodes, in order, those among them whose numbers nobody reads.
        made: eager's draws.
        forward: what to name where no source line is known, as in ``"Block.forward"``.
    """
    nodes_of: dict[int, list[fx.Node]] = {}
    for node in drawing:
        nodes_of.setdefault(node.meta[ROW], []).append(node)
    draw_of: dict[str, int] = {}
    problems = []
    for index, row in enumerate(rows):
        nodes, own = nodes_of.get(index, []), range(*row.draws)
        if len(nodes) != len(own) or not all(map(_may_be, nodes, (made[draw] for draw in own))):
            where = forward if row.where is None else line_of(row.where)
            eager = [made[draw] for draw in own]
            reason = f"{len(nodes)} random nodes in the graph for what eager draws: {eager}"
            problems.append(Unsupported(str(row.op), where, reason))
        draw_of.update((node.name, draw) for node, draw in zip(nodes, own, strict=False))
    return draw_of, problems


def _may_be(node: fx.Node, draw: Draw) -> bool:
    """Whether a node may make a draw: it gives as many numbers."""
    value: Any = node.meta["val"]
    return not isinstance(value, torch.Tensor) or form_of(value).shape == tuple(map(hint, draw.shape))


def draws(node: fx.Node) -> bool:
    """Whether a node draws."""
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
