"""Complex arithmetic: nodes with complex operands or results → real operators on the parts, or torch's kernel.

A node is converted in the first applicable way: by a rule in this module; as the real operator on each of the parts,
where it is linear and treats them alike, or only moves elements; by torch's kernel on complex views of the joined
parts. The real operators fuse like all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx
from tvm import relax

from autodiff.ir import Expr, dtype
from bridge.aten.activations import times, where, with_derivative
from bridge.aten.any_operator import check_functional, whole
from bridge.aten.complex_value import Complex, as_complex, is_complex_form, joined, part_form, part_type, separated
from bridge.aten.pointwise import stop_gradient
from bridge.aten.registry import CONVERSIONS, UnsupportedUse, converts, relax_dtype
from bridge.base.torch_internals import aten
from bridge.capture import STOP_GRADIENT

op = relax.op

COMPLEX: dict[Any, Callable[..., Any]] = {}
"""ATen overload → ``convert(importer, node, *args, **kwargs)`` for a node with complex operands or results."""

SEES_COMPLEX = {aten._to_copy.default}
"""Overloads in ``COMPLEX`` whose rule gets the node itself; other rules get a copy with real metadata."""

_complex = partial(converts, table=COMPLEX)


def _add(importer: Any, a: Expr, b: Expr) -> Expr:
    return importer.emit(op.add(a, b))


def _subtract(importer: Any, a: Expr, b: Expr) -> Expr:
    return importer.emit(op.subtract(a, b))


def _multiply(importer: Any, a: Expr, b: Expr) -> Expr:
    return importer.emit(op.multiply(a, b))


def multiplied(
    importer: Any, a: Complex, b: Complex, product: Callable[[Any, Expr, Expr], Expr] = _multiply
) -> Complex:
    """``(ac - bd) + (ad + bc)i`` with any bilinear product."""
    real = _subtract(importer, product(importer, a.real, b.real), product(importer, a.imaginary, b.imaginary))
    imaginary = _add(importer, product(importer, a.real, b.imaginary), product(importer, a.imaginary, b.real))
    return Complex(real, imaginary)


def _operands(importer: Any, node: Any, *values: Any) -> list[Complex]:
    """The operands as complex values of the result's type; real ones get an imaginary 0, which times inf is nan."""
    return [as_complex(importer, value, importer.out_dtype(node)) for value in values]


@_complex(aten.mul.Tensor, aten.mul.Scalar)
def mul(importer, node, a, b):
    return multiplied(importer, *_operands(importer, node, a, b))


@_complex(aten.add.Tensor, aten.add.Scalar)
def add(importer, node, a, b, alpha=1, combine=_add):
    """``a + alpha b``, a complex product also where ``alpha`` is 1: an infinite part of ``b`` makes the other
    part nan, as in torch's kernels. The gradient, as in torch, is scaled only by an ``alpha`` other than 1."""
    factor = alpha if combine is _add else -alpha
    scaled = b if alpha == 1 else mul(importer, node, b, alpha)
    a, b, factor, scaled = _operands(importer, node, a, b, factor, scaled)
    found = (_add(importer, *parts) for parts in zip(a.parts, multiplied(importer, factor, b).parts, strict=True))
    linear = (combine(importer, *parts) for parts in zip(a.parts, scaled.parts, strict=True))
    return _derived(importer, Complex(*found), Complex(*linear))


@_complex(aten.sub.Tensor, aten.sub.Scalar)
def sub(importer, node, a, b, alpha=1):
    return add(importer, node, a, b, alpha, _subtract)


@_complex(aten.rsub.Scalar, aten.rsub.Tensor)
def rsub(importer, node, a, b, alpha=1):
    return add(importer, node, b, a, alpha, _subtract)


def _constants(importer: Any, *values: Expr) -> list[Expr]:
    return [importer.emit(op.grad.no_grad(value)) for value in values]


def _derived(importer: Any, values: Complex, linear: Complex) -> Complex:
    """``values`` with the gradients of ``linear``, part by part."""
    return Complex(*(with_derivative(importer, *each) for each in zip(values.parts, linear.parts, strict=True)))


def _quotient(importer: Any, a: Complex, b: Complex) -> Complex:
    """``a / b`` by Smith's algorithm, as eager divides; linear in ``a``, without a derivative with respect to ``b``.

    With the larger part of the divisor as ``p`` and the smaller as ``q``, ``r = q / p`` and ``1 / (p + q r)`` are
    finite where ``b`` is infinite in one part; a division by 0 divides each part by it.
    """
    c, d = _constants(importer, *b.parts)
    sizes = [importer.emit(op.abs(part)) for part in (c, d)]
    real_is_larger = importer.emit(op.greater_equal(*sizes))
    is_zero = _is_zero(importer, Complex(c, d))
    one, none = (importer.constant(number, dtype(c)) for number in (1, 0))

    def larger_first(x: Expr, y: Expr) -> tuple[Expr, Expr]:
        return tuple(importer.emit(op.where(real_is_larger, *pair)) for pair in ((x, y), (y, x)))

    p, q = larger_first(c, d)
    ratio = importer.emit(op.divide(q, importer.emit(op.where(is_zero, one, p))))
    below = importer.emit(op.where(is_zero, sizes[0], _add(importer, p, _multiply(importer, q, ratio))))
    scale = importer.emit(op.divide(one, below))
    u, v = larger_first(*a.parts)

    def crossed(x: Expr) -> Expr:
        return importer.emit(op.where(is_zero, none, _multiply(importer, x, ratio)))

    real, imaginary = _add(importer, u, crossed(v)), _subtract(importer, v, crossed(u))
    imaginary = importer.emit(op.where(real_is_larger, imaginary, importer.emit(op.negative(imaginary))))
    return Complex(*(_multiply(importer, part, scale) for part in (real, imaginary)))


@_complex(aten.div.Tensor, aten.div.Scalar)
def div(importer, node, a, b):
    """With torch's gradients: ``g / conj(b)``, and ``-g conj((a / b) / b)``."""
    a, b = _operands(importer, node, a, b)
    found = _quotient(importer, a, b)
    slope = _quotient(importer, Complex(*_constants(importer, *found.parts)), b)
    minus_slope = Complex(*_constants(importer, *(importer.emit(op.negative(part)) for part in slope.parts)))
    by_divisor = multiplied(importer, b, minus_slope)
    linear = Complex(*(_add(importer, x, y) for x, y in zip(found.parts, by_divisor.parts, strict=True)))
    return _derived(importer, found, linear)


@_complex(aten._conj.default, aten._conj_physical.default, aten.conj_physical.default)
def conj(importer, node, x):
    return Complex(x.real, importer.emit(op.negative(x.imaginary)))


COMPLEX |= {
    aten.reciprocal.default: lambda importer, node, x: div(importer, node, 1.0, x),
    aten.square.default: lambda importer, node, x: multiplied(importer, x, x),
    aten.view_as_real.default: lambda importer, node, x: joined(importer, x),
    aten.view_as_complex.default: lambda importer, node, x: separated(importer, x),
    aten.real.default: lambda importer, node, x: x.real,
    aten.imag.default: lambda importer, node, x: x.imaginary,
    **dict.fromkeys((aten.resolve_conj.default, aten.resolve_neg.default), lambda importer, node, x: x),
}


@_complex(aten.complex.default)
def complex_of(importer, node, real, imaginary):
    parts = (importer.cast(part, importer.out_dtype(node)) for part in (real, imaginary))
    return _broadcast(importer, node, Complex(*parts))


@_complex(aten.exp.default)
def exp(importer, node, x):
    """C's ``cexp`` where a part is not finite (a real number stays real, ``exp(-inf)`` is 0), with torch's gradient,
    ``g`` times the conjugate."""
    angle = x.imaginary
    none = importer.constant(0, dtype(angle))
    size = importer.emit(op.exp(x.real))
    real, imaginary = (_multiply(importer, size, importer.emit(turn(angle))) for turn in (op.cos, op.sin))
    nowhere = importer.emit(op.logical_not(importer.emit(op.isfinite(angle))))
    infinite = importer.emit(op.logical_and(importer.emit(op.isinf(x.real)), nowhere))
    is_real = importer.emit(op.equal(angle, none))
    vanishes = importer.emit(op.logical_and(infinite, importer.emit(op.less(x.real, none))))
    real = where(importer, infinite, size, where(importer, is_real, size, real))
    imaginary = where(importer, vanishes, none, where(importer, is_real, angle, imaginary))
    found = Complex(*_constants(importer, real, imaginary))
    return _derived(importer, found, multiplied(importer, x, found))


def _broadcast(importer: Any, node: Any, value: Complex) -> Complex:
    return Complex(*(importer.expand(part, importer.out(node).shape) for part in value.parts))


def _is_zero(importer: Any, x: Complex) -> Expr:
    zeros = [importer.emit(op.equal(part, importer.constant(0, dtype(part)))) for part in x.parts]
    return importer.emit(op.logical_and(*zeros))


@_complex(aten.abs.default)
def absolute(importer, node, x):
    """``|x|``; its gradient is that of ``a u + b v`` with ``u, v = a / |x|, b / |x|`` as numbers, and 0 at 0.

    Both parts are scaled by the larger one, so no square over- or underflows; the gradient does not contain that
    scale. Where a part is infinite, so is the result, and the gradient is nan.
    """
    zero = _is_zero(importer, x)
    a = importer.emit(op.where(zero, importer.constant(1, dtype(x.real)), x.real))
    sizes = [importer.emit(op.abs(part)) for part in (a, x.imaginary)]
    larger = importer.emit(op.maximum(*sizes))
    infinite = importer.emit(op.logical_or(*(importer.emit(op.isinf(part)) for part in sizes)))
    larger = importer.emit(op.where(infinite, importer.constant(1, dtype(a)), larger))
    scale = stop_gradient(importer, node, larger)
    c, d = (importer.emit(op.divide(part, scale)) for part in (a, x.imaginary))
    total = _add(importer, _multiply(importer, c, c), _multiply(importer, d, d))
    root = _multiply(importer, scale, importer.emit(op.sqrt(total)))
    none, infinity = (importer.constant(value, dtype(a)) for value in (math.nan, math.inf))
    size = stop_gradient(importer, node, where(importer, infinite, infinity, root))
    u, v = (where(importer, infinite, none, importer.emit(op.divide(part, size))) for part in (a, x.imaginary))
    turned = _add(importer, times(importer, a, u), times(importer, x.imaginary, v))
    found = with_derivative(importer, size, turned)
    return importer.emit(op.where(zero, importer.constant(0, dtype(x.real)), found))


@_complex(aten.sgn.default)
def sgn(importer, node, x):
    """``x / |x|``, and 0 at 0. The gradient is divided by ``|x|`` last, as in torch: a small one stays finite where
    ``1 / |x|`` overflows."""
    size = stop_gradient(importer, node, absolute(importer, node, x))
    zero = _is_zero(importer, x)
    below = importer.emit(op.where(zero, importer.constant(1, dtype(size)), size))
    none = importer.constant(0, dtype(size))
    p, q = (importer.emit(op.divide(part, below)) for part in x.parts)
    u, v = (stop_gradient(importer, node, part) for part in (p, q))
    along = _add(importer, times(importer, p, u), times(importer, q, v))
    across = (importer.emit(op.subtract(one, times(importer, along, n))) for one, n in ((p, u), (q, v)))
    found = (with_derivative(importer, n, slope) for n, slope in zip((u, v), across, strict=True))
    return Complex(*(importer.emit(op.where(zero, none, part)) for part in found))


_NUMBER = {aten.full.default: 1, aten.full_like.default: 1, aten.scalar_tensor.default: 0, aten.new_full.default: 2}
"""Index of the argument with the number that fills the tensor."""

_ONES = (aten.ones.default, aten.ones_like.default, aten.new_ones.default)
_ZEROS = (
    *(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default),
    *(aten.empty.memory_format, aten.empty_permuted.default, aten.empty_strided.default, aten.empty_like.default),
    *(aten.new_empty.default, aten.new_empty_strided.default),
)
"""Tensors that are uninitialized in eager are zeros, as in :mod:`bridge.aten.shape`."""


@_complex(*_NUMBER, *_ONES, *_ZEROS)
def created(importer, node, *args, **kwargs):
    number = args[_NUMBER[node.target]] if node.target in _NUMBER else int(node.target in _ONES)
    if isinstance(number, Expr | Complex):
        raise UnsupportedUse("a complex tensor full of a computed number")
    return _broadcast(importer, node, as_complex(importer, number, importer.out_dtype(node)))


@_complex(
    *(aten.normal.float_float, aten.normal_functional.default, aten.rand.default, aten.rand_like.default),
    *(aten.randn.default, aten.randn_like.default),
)
def draw(importer, node, *args, **kwargs):
    return separated(importer, importer.draw(node))


@_complex(aten.copy.default)
def copy(importer, node, x, source, non_blocking=False):
    """``source`` in the shape and the type of ``x``."""
    if not isinstance(x, Complex):
        return importer.expand(importer.cast(source.real, dtype(x)), importer.out(node).shape)
    return _broadcast(importer, node, as_complex(importer, source, importer.out_dtype(node)))


@_complex(aten._assert_tensor_metadata.default)
def assert_metadata(importer, node, x, *rest, **kwargs):
    """No operation: tracing has checked the type."""


@_complex(aten._to_copy.default)
def to_copy(importer, node, x, **kwargs):
    """A cast to another precision, from a real tensor, or to the real part alone, of which torch warns."""
    wanted = importer.out(node).dtype
    if wanted.is_complex:
        return as_complex(importer, x, relax_dtype(part_type(wanted)))
    return importer.cast(x.real, relax_dtype(wanted))


_PART_BY_PART = {
    *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.view_copy.default),
    *(aten.squeeze.dims, aten.squeeze.dim, aten.squeeze.default, aten.unsqueeze.default, aten.expand.default),
    *(aten.permute.default, aten.permute_copy.default, aten.transpose.int, aten.t.default, aten.narrow_copy.default),
    *(aten.slice.Tensor, aten.select.int, aten.split_with_sizes.default, aten.split.Tensor, aten.unbind.int),
    *(aten.flip.default, aten.repeat.default, aten.roll.default, aten.clone.default, aten.alias.default),
    *(aten.detach.default, aten.lift_fresh_copy.default, aten.unfold.default, aten.diagonal.default),
    *(aten.diagonal_copy.default, aten.unbind_copy.int, aten.as_strided.default, aten.as_strided_copy.default),
    *(aten.tril.default, aten.triu.default, aten.neg.default, aten.positive.default, aten._neg_view.default),
    *(aten.sum.dim_IntList, aten.sum.default, aten.cumsum.default),
    *(aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_select.default, aten.gather.default),
    *(aten.im2col.default, aten.col2im.default),
    *(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default),
    *(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default),
    STOP_GRADIENT,
}
"""Operators that act alike on the real and the imaginary part of their first operand."""

_ALL_OPERANDS = {
    *(aten.cat.default, aten.stack.default, aten.where.self, aten.slice_scatter.default, aten.select_scatter.default),
    *(aten.index_put.default, aten._unsafe_index_put.default, aten.index_add.default, aten.index_copy.default),
    *(aten.scatter.src, aten.scatter_add.default, aten.diagonal_scatter.default, aten.as_strided_scatter.default),
    *(aten.constant_pad_nd.default, aten.masked_fill.Scalar, aten.scatter.value),
}
"""Operators that act alike on the parts of several operands; real tensors and numbers get an imaginary part of 0."""

_NUMBERS = {aten.constant_pad_nd.default: 2, aten.masked_fill.Scalar: 2, aten.scatter.value: 3}
"""Index of the argument with the number to write."""

_PRODUCTS = {aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default}
"""Products of two complex tensors, made of four real ones."""


def is_complex(node: fx.Node, args: Any, kwargs: Any) -> bool:
    """Whether a node has a complex operand or result."""
    found: list[bool] = []
    fx.node.map_aggregate((args, kwargs), lambda value: found.append(isinstance(value, Complex | complex)))
    fx.node.map_aggregate(node.meta.get("val"), lambda value: found.append(is_complex_form(value)))
    return any(found)


def convert_complex(importer: Any, node: fx.Node, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The value(s) of a node with complex operands or results."""
    parts = _of_parts(node)
    if node.target in COMPLEX:
        made = COMPLEX[node.target](importer, node if node.target in SEES_COMPLEX else parts, *args, **kwargs)
        if made is not NotImplemented:
            return made
    if node.target in _PART_BY_PART and isinstance(args[0], Complex):
        return _part_by_part(importer, parts, args, kwargs)
    if node.target in _ALL_OPERANDS and is_complex_form(node.meta["val"]):
        element_type = importer.out_dtype(parts)
        return _part_by_part(importer, parts, _promoted(importer, node, args, element_type), kwargs)
    if node.target in _PRODUCTS and all(isinstance(arg, Complex) for arg in args):
        real = CONVERSIONS[node.target]
        return multiplied(importer, *args, lambda importer, a, b: real(importer, parts, a, b))
    return _whole(importer, node, args, kwargs)


def _of_parts(node: fx.Node) -> fx.Node:
    """A copy of the node with the metadata of real parts, for a real conversion."""
    graph = fx.Graph()

    def operand(arg: fx.Node) -> fx.Node:
        made = graph.placeholder(arg.name)
        made.meta = {**arg.meta, "val": part_form(arg.meta.get("val"))}
        return made

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), operand)
    made = graph.call_function(node.target, args, kwargs)
    made.name, made.meta = node.name, {**node.meta, "val": part_form(node.meta.get("val"))}
    return made


def _part_by_part(importer: Any, node: fx.Node, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The real operator on the real parts, then on the imaginary parts."""

    def side(index: int) -> Any:
        chosen = [
            fx.node.map_aggregate(
                each, lambda value: value.parts[index] if isinstance(value, Complex | _Number) else value
            )
            for each in (args, kwargs)
        ]
        return CONVERSIONS[node.target](importer, node, *chosen[0], **chosen[1])

    real, imaginary = side(0), side(1)
    if isinstance(real, tuple):
        return tuple(map(Complex, real, imaginary))
    return Complex(real, imaginary)


def _promoted(importer: Any, node: fx.Node, args: tuple, element_type: str) -> tuple:
    """Floating operands, and the numbers to write, as complex ones; integer and bool operands unchanged."""

    def promoted(value: Any, arg: Any) -> Any:
        if isinstance(value, Complex):
            return as_complex(importer, value, element_type)
        if isinstance(arg, fx.Node) and arg.meta["val"].dtype.is_floating_point:
            return as_complex(importer, value, element_type)
        return value

    found = [
        [promoted(value, each) for value, each in zip(arg, node.args[place], strict=True)]
        if isinstance(arg, list | tuple)
        else promoted(arg, node.args[place])
        for place, arg in enumerate(args)
    ]
    if node.target in _NUMBERS and len(found) > _NUMBERS[node.target]:
        place = _NUMBERS[node.target]
        number = complex(found[place])
        found[place] = _Number((number.real, number.imag))
    return tuple(found)


def _whole(importer: Any, node: fx.Node, args: tuple, kwargs: dict[str, Any]) -> Any:
    """torch's kernel on complex operands and results whose parts share a last axis."""
    check_functional(node)
    forms, made = node.meta["val"], whole(importer, node, *args, **kwargs)
    if not isinstance(forms, tuple | list):
        return separated(importer, made) if is_complex_form(forms) else made
    return tuple(
        separated(importer, each) if is_complex_form(form) else each for each, form in zip(made, forms, strict=True)
    )


@dataclass(frozen=True)
class _Number:
    """A number to write, in parts."""

    parts: tuple[float, float]
