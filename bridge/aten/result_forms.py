"""Forms of results: a result's conversion and what eager returned → a refusal where they differ.

On some devices an operator's results are not what its formula says: those that batch normalization saves are not.
"""

from __future__ import annotations

from torch import fx

from autodiff.ir import Expr, dtype, shape
from bridge.aten.complex_value import joined_form
from bridge.aten.element_types import ELEMENT_TYPES
from bridge.base.errors import Unsupported
from bridge.capture import Output, TensorForm, where_is

__all__ = ["other_form"]


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
    operator = node.args[0] if isinstance(node.args[0], fx.Node) and "getitem" in str(node.target) else node
    return Unsupported(str(operator.target), where_is(operator) or "forward", reason)
