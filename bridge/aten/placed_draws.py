"""Placed draws: draws inside of kernels, a GPU's draws with computed parameters → library calls, each from a state.

How far such a draw moves a GPU's generator depends on no number: the eager run measures it; where sizes vary, a rule
tells it for attention. So the state before each is known before the program runs, and is an input of the program; all
other draws are made before it, in eager's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx
from tvm import relax

from autodiff.extents import Dim
from autodiff.ir import Expr, StringImm, TensorType, Var
from autodiff.library import GENERATOR_STATE
from autodiff.library import call as library_call
from bridge.aten.draws import check_parameters, described_draw, drawn_type
from bridge.aten.registry import UnsupportedUse
from bridge.base.errors import Unsupported
from bridge.capture import Captured

__all__ = ["placed_draw", "state_before", "unplaced"]


def unplaced(captured: Captured) -> list[Unsupported]:
    """Draws whose place among all others cannot be known ahead, used or not."""
    draws, reason = [draw for draw in captured.draws if draw.is_placed], None
    if any(draw.is_computed for draw in captured.draws):
        reason = "draws inside of the program, as does one on the host whose distribution is computed"
    else:
        draws = [draw for draw in captured.draws if draw.is_placed or draw.is_attention_mask]
        draws = [draw for draw in draws if draw.advance is None]
        reason = "draws inside of a kernel that does not tell how far it moves the generator"
        if captured.extents is not None:
            reason = (
                "draws inside of a kernel, and how far that moves the generator is known for the sample's sizes alone"
            )
    return [
        Unsupported(op, f"{captured.module_name}.forward", reason) for op in dict.fromkeys(each.op for each in draws)
    ]


def state_before(importer: Any, node: fx.Node) -> tuple[Var, Dim]:
    """The input that carries the generator's state before the placed draw at a node, and how far that moves it.

    Raises:
        UnsupportedUse: eager did not draw there.
    """
    index = importer.captured.draw_of.get(node.name)
    if index is None or not importer.captured.draws[index].is_placed:
        raise UnsupportedUse("a random draw that was not observed in eager")
    state = importer.draw_params.setdefault(index, Var(f"draw_{index}", TensorType(*GENERATOR_STATE)))
    advance = importer.captured.draws[index].advance
    return state, 0 if advance is None else advance


def placed_draw(importer: Any, node: fx.Node, tensors: Sequence[Expr]) -> Expr:
    """A GPU's draw with computed parameters, of the type in which eager draws it.

    Raises:
        UnsupportedUse: it cannot be made in eager's layout.
    """
    state, advance = state_before(importer, node)
    draw = importer.captured.draws[importer.captured.draw_of[node.name]]
    check_parameters(draw, tensors)
    description, _ = described_draw(draw)
    args = [StringImm(draw.op), StringImm(description), relax.prim_value(advance), state, *tensors]
    return importer.emit(library_call("placed_draw", args, drawn_type(draw)))
