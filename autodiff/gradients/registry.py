"""The registry of gradient rules: an operator's name -> its rule; helpers of rules.

A rule is a function ``rule(call, y, grad, emit) -> partials``: the forward call (``call.args``, ``call.attrs``), the
variable it defines, the gradient of that variable, and ``emit(expr) -> Var`` to share a subexpression. It returns one
expression per argument of the call, of the argument's type, or ``None`` where no gradient flows (integer and shape
arguments). :func:`fit` sums the gradient of an operand that broadcasts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence

from tvm.relax import op

from autodiff.body import const
from autodiff.extents import Dim, Extent, same, same_shape
from autodiff.ir import Call, Expr, TensorType, Tuple, Var, axes_of, compute_type, dtype, library_name, op_name, shape
from autodiff.typed import TypedBuilder

__all__ = ["Emit", "GradientRule", "checks", "const", "differentiable", "fit", "gradient", "keep_axes"]
__all__ += ["padded", "partials", "sum_over", "unsupported", "zeros_like"]


Emit = Callable[[Expr], Var]
GradientRule = Callable[[Call, Var, Var, Emit], Sequence[Expr | None]]

Check = Callable[[Call, Collection[Var]], str | None]

RULES: dict[str, GradientRule] = {}
CHECKS: dict[str, Check] = {}

_HALF = ("float16", "bfloat16")


def gradient(*names: str, wide: bool = False) -> Callable[[GradientRule], GradientRule]:
    """Registers a rule for operators and library functions (``"library.embedding"``), for which ``call.args`` excludes
    the function's name. TVM's own rules, some of which are wrong, are not used.

    ``wide``: for half types the rule sees everything cast to float32 and its results are cast back, so that a formula
    of several operations is rounded once, as in the numerical libraries.
    """

    def add(rule: GradientRule) -> GradientRule:
        for name in names:
            RULES[name] = _in_float32(rule) if wide else rule
        return rule

    return add


def differentiable(value: Expr) -> bool:
    """Whether a call has a gradient rule."""
    return (library_name(value) or op_name(value)) in RULES


def unsupported(value: Call, active: Collection[Var]) -> str | None:
    """Why the operator's rule cannot give a required gradient, or ``None``; ``active``: variables with gradients."""
    check = CHECKS.get(library_name(value) or op_name(value))
    return None if check is None else check(value, active)


def checks(*names: str) -> Callable[[Check], Check]:
    """Registers the check that :func:`unsupported` runs for operators or library functions."""

    def add(check: Check) -> Check:
        CHECKS.update(dict.fromkeys(names, check))
        return check

    return add


def partials(var: Var, call: Call, gradient: Var, typed: TypedBuilder) -> list[tuple[Expr, Expr | None]]:
    """The arguments of a call, bound to ``var``, each with its gradient; ``None`` where no gradient flows."""
    name = library_name(call)
    rule = RULES[name or op_name(call)]
    if name is not None:  # a rule sees the arguments after the function's name
        call = Call(call.op, call.args[1:], call.attrs, ret_ty=var.ty)
    args = list(call.args)
    tensors = [arg for arg in args if isinstance(arg.ty, TensorType)]
    if name is None and (_is_empty(var) or (tensors and all(map(_is_empty, tensors)))):
        return [(arg, _nothing(arg)) for arg in args]
    found = rule(call, var, gradient, lambda value: value if isinstance(value, Var) else typed.emit(value))
    return list(zip(args, found, strict=True))


def _is_empty(value: Expr) -> bool:
    """Whether a tensor has no elements: Relax's reshape, which rules use, reads an extent of 0 as "copy the extent"."""
    return isinstance(value.ty, TensorType) and 0 in shape(value)


def _nothing(arg: Expr) -> Expr | None:
    """The gradient of an argument of an empty result: zeros for a float tensor, otherwise ``None``."""
    if isinstance(arg.ty, TensorType) and "float" in dtype(arg):
        return op.zeros(shape(arg), dtype(arg))
    return None


def _in_float32(rule: GradientRule) -> GradientRule:
    @functools.wraps(rule)
    def wide_rule(call: Call, y: Var, grad: Var, emit: Emit) -> list[Expr | None]:
        def widen(value: Expr) -> Expr:
            return emit(op.astype(value, "float32")) if _is_half(value) else value

        if not any(_is_half(value) for value in (*call.args, y)):
            return rule(call, y, grad, emit)
        wide_call = Call(call.op, [widen(arg) for arg in call.args], call.attrs, ret_ty=y.ty)
        partials = rule(wide_call, widen(y), widen(grad), emit)
        return [
            op.astype(emit(part), dtype(arg)) if part is not None and _is_half(arg) else part
            for arg, part in zip(call.args, partials, strict=True)
        ]

    return wide_rule


def _is_half(value: Expr) -> bool:
    return isinstance(value.ty, TensorType) and dtype(value) in _HALF


def fit(partial: Expr, like: Expr, emit: Emit) -> Expr:
    """``partial`` summed over the dimensions along which ``like`` was broadcast."""
    partial = emit(partial)
    extents, wanted = shape(partial), shape(like)
    if same_shape(extents, wanted):
        return partial
    extra = len(extents) - len(wanted)
    stretched = [not same(extent, own) and own == 1 for extent, own in zip(extents[extra:], wanted, strict=True)]
    axes = [*range(extra), *(extra + axis for axis, summed in enumerate(stretched) if summed)]
    summed = sum_over(partial, axes, emit, keepdims=not extra)
    return summed if same_shape(shape(summed), wanted) else op.reshape(summed, wanted)


def sum_over(value: Expr, axes: Sequence[int], emit: Emit, keepdims: bool = False) -> Expr:
    """The sum over ``axes``, accumulated in float32 for half types (TVM accumulates in the element type)."""
    element_type = dtype(value)
    wide = compute_type(element_type)
    if wide != element_type:
        value = emit(op.astype(value, wide))
    value = emit(op.sum(value, list(axes), keepdims=keepdims))
    return value if wide == element_type else emit(op.astype(value, element_type))


def keep_axes(value: Expr, call: Call, emit: Emit) -> Expr:
    """A reduction's result (or its gradient) with the reduced axes as size-1 dims, so that it broadcasts."""
    extents = [1 if axis in axes_of(call) else extent for axis, extent in enumerate(shape(call.args[0]))]
    return value if same_shape(shape(value), extents) else emit(op.reshape(value, extents))


def padded(value: Expr, axis: int, before: Dim, after: Dim, emit: Emit) -> Expr:
    """``value`` between zeros along an axis: ``relax.nn.pad``, or a concatenation with zeros for symbolic widths."""
    if not isinstance(before, Extent) and not isinstance(after, Extent):
        widths = [0] * (2 * len(shape(value)))
        widths[2 * axis : 2 * axis + 2] = before, after
        return op.nn.pad(value, widths)

    def zeros(width: Dim) -> list[Expr]:
        extents = list(shape(value))
        extents[axis] = width
        return [] if same(width, 0) else [emit(op.zeros(extents, dtype(value)))]

    return op.concat(Tuple([*zeros(before), value, *zeros(after)]), axis=axis)


def zeros_like(value: Expr) -> Expr:
    """Zeros of a tensor's shape and element type."""
    return op.zeros(shape(value), dtype(value))
