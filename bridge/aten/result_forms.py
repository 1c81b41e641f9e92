"""Forms of results: a result's conversion and what eager returned → a refusal where they differ.

On some devices an operator's results are not what its formula says: those that batch normalization saves are not.
"""

from __future__ import annotations

import operator

from torch import fx

from autodiff.ir import Expr, dtype, shape
from bridge.aten.complex_value import joined_form
from bridge.aten.dims import ELEMENT_TYPES
from bridge.base.errors import Unsupported
from bridge.capture import Output, TensorForm, where_is

__all__ = ["made_by", "other_form"]


def made_by(node: fx.Node) -> fx.Node:
    """The node of the operator that computes a value: of one of several results, not the one that picks it."""
    return node.args[0] if node.target is operator.getitem else node


def other_form(output: Output, node: fx.Node, result: Expr) -> Unsupported | None:
    """Says so, if a result has another shape or element type than eager's on the sample; extents are not compared.

    Args:
        node: whose value is returned.
        result: its conversion, with the parts of complex numbers in a last dimension.
    """
    eagers = joined_form(TensorForm(output.shape, output.dtype))
    wanted, made = (tuple(eagers.shape), ELEMENT_TYPES[eagers.dtype]), (shape(result), dtype(result))
    extents = zip(made[0], wanted[0], strict=False)
    is_same = len(made[0]) == len(wanted[0]) and wanted[1] in (made[1], "bool")  # masks are numbers up to the end
    if is_same and not any(isinstance(one, int) and one != other for one, other in extents):
        return None
    reason = f"eager returns {wanted[1]}{list(wanted[0])}, its conversion makes {made[1]}{list(made[0])}"
    maker = made_by(node)
    return Unsupported(str(maker.target), where_is(maker) or "forward", reason)
