"""Gradients of library functions; their calling conventions are tabulated in :mod:`autodiff.library`."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Sequence

import numpy as np
from tvm import relax
from tvm.relax import op

from autodiff.extents import Dim, Extent
from autodiff.gradients.registry import Emit, checks, const, fit, gradient, zeros_like
from autodiff.ir import (
    Call,
    Constant,
    Expr,
    ShapeExpr,
    StringImm,
    TensorType,
    TupleGetItem,
    TupleType,
    Var,
    dtype,
    is_float,
    numpy_value,
    shape,
)
from autodiff.library import LEARNED
from autodiff.library import call as library_call
from autodiff.scan.operator import NAME, scan_of
from autodiff.scan.reverse import partials as partials_of_scan

_TO_FRONT, _TO_BACK = (0, 3, 1, 2), (0, 2, 3, 1)
"""Axis orders: channels from the last to the second place, and back."""


@gradient("library.embedding")
def embedding(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dweight[v] = sum of g over the positions where indices = v, but padding_idx"""
    weight, indices, padding_idx, scale_grad_by_freq = call.args
    args = [g, indices, relax.prim_value(shape(weight)[0]), padding_idx, scale_grad_by_freq]
    return [library_call("embedding_backward", args, weight.ty), None, None, None]


@gradient("library.scaled_dot_product_flash_attention")
def scaled_dot_product_flash_attention(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dq, dk, dv of out = dropout(softmax(q k^T scale + mask)) v (Dao et al., 2022); only ``out`` has a gradient."""
    q, k, v, *rest = call.args
    out, logsumexp = emit(TupleGetItem(y, 0)), emit(TupleGetItem(y, 1))
    grad_out = emit(TupleGetItem(g, 0))
    backward = library_call(
        "scaled_dot_product_flash_attention_backward",
        [grad_out, q, k, v, out, logsumexp, *rest],
        TupleType([q.ty, k.ty, v.ty]),
    )
    grads = emit(backward)
    return [TupleGetItem(grads, 0), TupleGetItem(grads, 1), TupleGetItem(grads, 2)] + [None] * len(rest)


@gradient("library.attention")
def attention(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dq, dk, dv for a kernel chosen by name; ``out`` and all gradients are [batch, row, head, column]."""
    return _attention("attention_backward", call, y, g, emit)


@gradient("library.dropping_attention")
def dropping_attention(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dq, dk, dv as for ``attention``; the backward kernel repeats the forward's dropout from the generator's state"""
    return _attention("dropping_attention_backward", call, y, g, emit)


_ROWS_BEFORE_HEADS = [0, 2, 1, 3]
"""Axis order: rows before heads; its own inverse."""


def _attention(backward: str, call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    kernel, q, k, v, *rest = call.args
    out, logsumexp = emit(TupleGetItem(y, 0)), emit(TupleGetItem(y, 1))
    args = [kernel, emit(TupleGetItem(g, 0)), q, k, v, out, logsumexp, *rest]
    types = [emit(op.permute_dims(x, _ROWS_BEFORE_HEADS)).ty for x in (q, k, v)]
    learned = _has_learned_mask(rest)
    grads = emit(library_call(backward, args, TupleType([*types, rest[1].ty] if learned else types)))
    found = [op.permute_dims(emit(TupleGetItem(grads, index)), _ROWS_BEFORE_HEADS) for index in range(3)]
    of_rest: list[Expr | None] = [None] * len(rest)
    if learned:
        of_rest[1] = TupleGetItem(grads, 3)
    return [None, *found, *of_rest]


def _has_learned_mask(rest: Sequence[Expr]) -> bool:
    """Whether the mask has a gradient; ``rest``: the arguments after queries, keys and values."""
    return int(rest[0].value) == LEARNED


@checks("library.scaled_dot_product_flash_attention", "library.attention", "library.dropping_attention")
def check_attention_mask(call: Call, active: Collection[Var]) -> str | None:
    """Only one fused kernel computes the gradient of an additive mask."""
    given = [arg for arg in call.args if not isinstance(arg, StringImm)]
    if any(arg in active for arg in given[4:] if isinstance(arg, Var)) and not _has_learned_mask(given[4:]):
        return "the fused kernel has no gradient with respect to attn_mask"
    return None


def _of_images(name: str, args: list[Expr], like: Expr, emit: Emit) -> Expr:
    """The gradient of ``like`` by a library function; one of channels last is permuted so that they are second."""
    if "_last" not in name:
        return library_call(name, args, like.ty)
    behind = TensorType([shape(like)[axis] for axis in _TO_BACK], dtype(like))
    return op.permute_dims(emit(library_call(name, args, behind)), list(_TO_FRONT))


def _as_given(name: str, value: Expr, emit: Emit) -> Expr:
    """A tensor in the order of axes that the library function reads."""
    return emit(op.permute_dims(value, list(_TO_FRONT))) if name.endswith("_last") else value


_GEOMETRY = 6
"""Arguments of a convolution between the weight and the bias."""


def _convolution(name: str) -> None:
    @gradient(f"library.{name}")
    def rule(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
        """dx and dweight, each a library call of its own, so that one can be had without the other; dbias sums g"""
        x, weight, *geometry = call.args
        geometry, bias = geometry[:_GEOMETRY], geometry[_GEOMETRY:]
        channels = len(shape(g)) - 1 if name.endswith("_last") else 1
        dbias = [op.sum(g, [axis for axis in range(len(shape(g))) if axis != channels]) for _ in bias]
        g = _as_given(name, g, emit)
        dx = _of_images(f"{name}_backward_input", [g, weight, ShapeExpr(shape(x)), *geometry], x, emit)
        args = [g, x, ShapeExpr(shape(weight)), *geometry]
        return [dx, _of_images(f"{name}_backward_weight", args, weight, emit)] + [None] * len(geometry) + dbias


@gradient("library.matmul_bias")
def matmul_bias(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = g w^T, dw = x^T g, of g as a matrix, db = the sum of its rows"""
    x, w, bias, _ = call.args
    rows = emit(op.reshape(g, (shape(x)[0], shape(w)[1])))
    dx = op.matmul(rows, emit(op.permute_dims(w, [1, 0])))
    # Not bound here: TVM folds the transpose of a weight into a product that it finds unbound.
    dw = op.matmul(emit(op.permute_dims(x, [1, 0])), rows)
    return [dx, dw, fit(g, bias, emit), None]


def _max_pool(name: str) -> None:
    @gradient(f"library.{name}")
    def rule(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
        """dx = zeros with g added at the positions of the maxima, which are the second result"""
        x, *geometry = call.args
        grad, positions = (_as_given(name, emit(TupleGetItem(*each)), emit) for each in ((g, 0), (y, 1)))
        args = [grad, positions, ShapeExpr(shape(x)), *geometry]
        return [_of_images(f"{name}_backward", args, x, emit)] + [None] * len(geometry)


def _weighted(name: str) -> None:
    @gradient(f"library.{name}")
    def rule(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
        """dx = g shared among the elements of each window, or summed with the interpolation's weights"""
        x, *options = call.args
        args = [_as_given(name, g, emit), ShapeExpr(shape(x)), *options]
        return [_of_images(f"{name}_backward", args, x, emit)] + [None] * len(options)


for _name in ("convolution", "convolution_last"):
    _convolution(_name)
for _name in ("max_pool", "max_pool_last", "adaptive_max_pool"):
    _max_pool(_name)
for _name in ("avg_pool", "adaptive_avg_pool", "upsample"):
    _weighted(_name)
    _weighted(f"{_name}_last")


@gradient("library.index")
def index(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = zeros with g added at the indices"""
    x, dims, indices = call.args
    return [library_call("index_backward", [g, ShapeExpr(shape(x)), dims, indices], x.ty), None, None]


@gradient("library.index_select")
def index_select(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = zeros with the slices of g added at the indices; as a sum of few slices where the indices are known"""
    x, axis, index = call.args
    known = _slices_of(shape(x)[int(axis.value)], index)
    if known:
        return [_sum_of_slices(x, int(axis.value), known, g, emit), None, None]
    return [library_call("index_add", [emit(zeros_like(x)), axis, index, g], x.ty), None, None]


_MOST_ROOM = 4
"""The largest ratio of slices read, padding included, to slices of the gradient."""


def _slices_of(extent: Dim, index: Expr) -> list[tuple[np.ndarray, np.ndarray]]:
    """The slices of a gather's gradient grouped by repetition: each position's first slice, then its second, and so on.

    Returns:
        per repetition, the slices' indices and a mask of the positions that have one; empty where the gather's indices
        are unknown, or a few of them repeat far more than the other ones.
    """
    if not isinstance(index, Constant) or isinstance(extent, Extent):
        return []
    taken = numpy_value(index)
    counts = np.bincount(taken, minlength=extent)
    most = max(counts, default=0)
    if most * extent > _MOST_ROOM * len(taken):
        return []
    order, first = np.argsort(taken, kind="stable"), np.cumsum(counts) - counts
    return [(order[np.where(counts > turn, first + turn, 0)], counts > turn) for turn in range(most)]


def _sum_of_slices(x: Expr, axis: int, slices: list[tuple[np.ndarray, np.ndarray]], g: Expr, emit: Emit) -> Expr:
    along = [len(slices[0][0]) if place == axis else 1 for place in range(len(shape(x)))]
    parts: list[Expr] = []
    for places, exist in slices:
        given = [g, relax.prim_value(axis), relax.const(places, "int64")]
        part = emit(library_call("index_select", given, x.ty))
        if not exist.all():
            part = emit(op.where(relax.const(exist.reshape(along), "bool"), part, const(0, g)))
        parts.append(part)
    return functools.reduce(lambda total, part: emit(op.add(total, part)), parts)


@gradient("library.index_add")
def index_add(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = g; dsource = the slices of g at the indices"""
    _, axis, index, source = call.args
    return [g, None, None, library_call("index_select", [g, axis, index], source.ty)]


@gradient("library.index_copy")
def index_copy(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = g, zero where overwritten; dsource = the slices of g at the indices"""
    x, axis, index, source = call.args
    dx = library_call("index_copy", [g, axis, index, emit(zeros_like(source))], x.ty)
    return [dx, None, None, library_call("index_select", [g, axis, index], source.ty)]


def _recurrent(name: str) -> None:
    @gradient(f"library.{name}")
    def rule(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
        """dx, the gradients of weights and states: backpropagation through time gives all at once"""
        options, states, *tensors = call.args
        results = [emit(TupleGetItem(y, index)) for index in range(len(y.ty.fields))]
        grads = [emit(TupleGetItem(g, index)) for index in range(1 + int(states.value))]
        types = TupleType([tensor.ty for tensor in tensors])
        count = relax.prim_value(len(tensors))
        backward = emit(library_call(f"{name}_backward", [options, count, *tensors, *results, *grads], types))
        return [None, None, *(TupleGetItem(backward, index) for index in range(len(tensors)))]


_recurrent("recurrent_layer")
_recurrent("recurrent_layers")


@gradient("library.draw")
def draw(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """No gradient, except for a standard gamma (implicit reparameterization: Figurnov et al., 2018)"""
    return _gamma(call, emit(TupleGetItem(y, 0)), emit(TupleGetItem(g, 0)), 3, emit)


@gradient("library.draw_at_offset")
def draw_at_offset(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """The gradient of :func:`draw`, for a draw that returns no next state"""
    return _gamma(call, y, g, 4, emit)


def _gamma(call: Call, value: Expr, grad: Expr, first: int, emit: Emit) -> list[Expr | None]:
    """The gradient of a standard gamma's parameter; ``first``: the place of the draw's first parameter."""
    found: list[Expr | None] = [None] * len(call.args)
    if str(call.args[0].value) == "aten._standard_gamma.default":
        concentration = call.args[first]
        operands = [{"$tensor": 0}, {"$tensor": 1}]
        slope = _operator("_standard_gamma_grad", operands, [concentration, value], concentration.ty)
        found[first] = grad * emit(slope)
    return found


def _operator(name: str, arguments: Sequence[object], tensors: Sequence[Expr], ty: TensorType) -> Call:
    """A call of torch's operator of that name, whose derivative reads no result; arguments: as of ``operator``."""
    text = json.dumps([arguments, {}, []])
    return library_call("operator", [StringImm(f"aten.{name}.default"), StringImm(text), *tensors], ty)


@gradient("library.index_put")
def index_put(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = g, zero where overwritten; dvalues = g at the indices"""
    x, values, dims, indices, accumulate = call.args
    dvalues = library_call("index", [g, dims, indices], values.ty)
    if int(accumulate.value):
        return [g, dvalues, None, None, None]
    zeros = emit(op.zeros(shape(values), dtype(values)))
    dx = library_call("index_put", [g, zeros, dims, indices, relax.prim_value(0)], x.ty)
    return [dx, dvalues, None, None, None]


_PICKING = ("sort", "topk", "kthvalue", "cummax", "cummin")
_PICKING_ALONG = ("max_dim", "min_dim", "median_dim", "nanmedian_dim", "mode_dim")


@gradient(*(f"library.{name}" for name in (*_PICKING, *_PICKING_ALONG)))
def picking(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = zeros with g added where each value came from, which is the second result"""
    x, axis, *rest = call.args
    zeros = emit(op.zeros(shape(x), dtype(x)))
    grad, positions = emit(TupleGetItem(g, 0)), emit(TupleGetItem(y, 1))
    return [op.scatter_elements(zeros, positions, grad, int(axis.value), "add"), None, *[None] * len(rest)]


@gradient("library.atan2")
def atan2(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """da = g b / (a^2 + b^2); db = -g a / (a^2 + b^2); 0 where both are 0"""
    a, b = call.args
    square = emit(emit(a * a) + emit(b * b))
    inverse = emit(op.where(op.equal(square, const(0, a)), const(0, a), const(1, a) / square))
    return [emit(g * b) * inverse, emit(g * op.negative(a)) * inverse]


def _modulo(name: str, quotient: str) -> None:
    @gradient(f"library.{name}")
    def rule(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
        """da = g; db = -g q, where q is the quotient, rounded towards zero or down"""
        return [g, op.negative(g) * emit(library_call(quotient, list(call.args), y.ty))]


_modulo("fmod", "divide_trunc")
_modulo("remainder", "divide_floor")


@gradient("library.binary_cross_entropy")
def binary_cross_entropy(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = g (x - t) / max(x (1 - x), 1e-12); dt = g (log(1 - x) - log(x))"""
    x, target = call.args
    rest = emit(const(1, x) - x)
    bounded = emit(op.maximum(emit(x * rest), const(1e-12, x)))
    difference = emit(emit(op.log(rest)) - emit(op.log(x)))
    return [emit(g * emit(x - target)) / bounded, g * difference]


@gradient("library.collective")
def collective(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = the collective that undoes it, on the gradient"""
    x, does, undoes, *group = call.args
    return [library_call("collective", [g, undoes, does, *group], x.ty), None, None, None, None]


@gradient("library.operator")
def operator(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx_i = the library's vector-Jacobian product, one call per tensor, so that unused ones can be dropped"""
    name, arguments, *tensors = call.args
    given, _, saved = json.loads(arguments.value)
    transform = _FOURIER.get(name.value)
    if transform is not None and (gradient := transform(given, tensors[0], g, emit)) is not None:
        return [None, None, gradient]
    results = [emit(TupleGetItem(y, index)) if isinstance(y.ty, TupleType) else y for index in saved]
    if isinstance(y.ty, TupleType):
        outputs = [index for index, field in enumerate(y.ty.fields) if "float" in str(field.dtype)]
        grads = [emit(TupleGetItem(g, index)) for index in outputs]
    else:
        outputs, grads = [0], [g]
    partials = []
    for index, tensor in enumerate(tensors):
        args = [name, arguments, relax.prim_value(index), ShapeExpr(outputs), *tensors, *results, *grads]
        is_followed = isinstance(tensor.ty, TensorType) and is_float(tensor)
        partials.append(library_call("operator_vjp", args, tensor.ty) if is_followed else None)
    return [None, None, *partials]


def _real_parts(packed: Expr, like: Expr, emit: Emit) -> Expr:
    part = emit(op.strided_slice(packed, axes=[len(shape(like))], begin=[0], end=[1]))
    return op.reshape(part, shape(like))


def _of_c2c(given: list, x: Expr, g: Var, emit: Emit) -> Expr:
    """dx = the transform of g in the other direction"""
    operand, axes, norm, forward = given
    made = _operator("_fft_c2c", [{"$complex": 0}, axes, norm, not forward], [g], g.ty)
    return _real_parts(emit(made), x, emit) if "$real" in operand else made


def _of_r2c(given: list, x: Expr, g: Var, emit: Emit) -> Expr | None:
    """dx = the real part of the inverse transform of g, with zeros for the half that the operator left out"""
    _, axes, norm, onesided = given
    axis = axes[-1] % len(shape(x))
    if onesided:
        missing = shape(x)[axis] - shape(g)[axis]
        if not isinstance(missing, int):
            return None
        widths = [0] * (2 * len(shape(g)))
        widths[2 * axis + 1] = missing
        g = emit(op.nn.pad(g, widths)) if missing else g
    made = emit(_operator("_fft_c2c", [{"$complex": 0}, axes, norm, False], [g], g.ty))
    return _real_parts(made, x, emit)


def _of_c2r(given: list, x: Expr, g: Var, emit: Emit) -> Expr | None:
    """dx = the half transform of g, twice where an element stands for two"""
    operand, axes, norm, _ = given
    axis = axes[-1] % len(shape(g))
    whole, half = shape(g)[axis], shape(x)[axis]
    if "$complex" not in operand or not isinstance(whole, int) or half != whole // 2 + 1:
        return None
    made = emit(_operator("_fft_r2c", [{"$tensor": 0}, axes, norm, True], [g], x.ty))
    factors = np.ones(half, dtype(x))
    factors[1 : 1 + whole - half] = 2
    return made * relax.const(factors.reshape([-1, *[1] * (len(shape(x)) - axis - 1)]), dtype(x))


_FOURIER = {"aten._fft_c2c.default": _of_c2c, "aten._fft_r2c.default": _of_r2c, "aten._fft_c2r.default": _of_c2r}
"""Linear operators whose gradient is another transform, with torch's formulas."""


@gradient("library.custom_gradient")
def custom_gradient(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx_i = the user's own gradient of input i, given the gradients of the outputs (:mod:`autodiff.differentiate`)"""
    count, *rest = call.args
    inputs, rest = rest[: int(count.value)], rest[int(count.value) :]
    gradients, tangents = rest[: len(inputs)], rest[len(inputs) :]
    upstream = [emit(TupleGetItem(g, index)) for index in range(len(tangents))]
    partials = [library_call("given", [gradient, *tangents, *upstream], gradient.ty) for gradient in gradients]
    return [None, *partials, *[None] * (len(gradients) + len(tangents))]


@gradient("library.overwritten")
def overwritten(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = g"""
    return [g, None, None]


@gradient("library.with_derivative")
def with_derivative(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = 0, dlinear = g: the value of the first with the derivative of the second"""
    return [None, g]


@gradient(NAME)
def scan(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """Backpropagation through time: a scan in the opposite order"""
    found = partials_of_scan(call, y, g, emit)
    return [*[None] * (len(call.args) - len(found)), *found]


@checks(NAME)
def check_gradient(call: Call, active: Collection[Var]) -> str | None:
    """A scan's gradient is attached when the scan is built for training; it must cover every active float tensor."""
    scanned, tensors = scan_of(call)
    if scanned.gradient is None:
        return "the scan has no gradient"
    wanted = [*scanned.gradient["wanted"], *scanned.gradient["zero"]]
    missing = [place for place, tensor in enumerate(tensors) if tensor in active and is_float(tensor)]
    missing = [place for place in missing if place not in wanted]
    return f"the scan has no gradient with respect to its tensors {missing}" if missing else None
