"""Gradients of layers: matrix products, convolutions, pooling, losses, a normalization as one step."""

from __future__ import annotations

import math
from collections.abc import Collection

from tvm import relax
from tvm.relax import op

from autodiff.body import ratio
from autodiff.extents import same, same_shape
from autodiff.gradients.registry import Emit, checks, const, fit, gradient, library_gradient, sum_over
from autodiff.ir import Call, Expr, ShapeExpr, Tuple, TupleGetItem, Var, dtype, shape
from autodiff.library import call as library_call


@gradient("relax.matmul")
def matmul(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """da = g b^T, db = a^T g; where b is a matrix, db is one product of two matrices, all rows of a batch together"""
    a, b = call.args
    if dtype(g) != dtype(a):  # a wider out_dtype
        g = emit(op.astype(g, dtype(a)))
    left = a if len(shape(a)) > 1 else emit(op.reshape(a, (1, *shape(a))))
    right = b if len(shape(b)) > 1 else emit(op.reshape(b, (*shape(b), 1)))
    batch = shape(g)[: max(len(shape(left)), len(shape(right))) - 2]
    product = emit(op.reshape(g, (*batch, shape(left)[-2], shape(right)[-1])))
    da = _of_shape(fit(op.matmul(product, _transposed(right, emit)), left, emit), a, emit)
    if len(shape(right)) > 2:
        return [da, _of_shape(fit(op.matmul(_transposed(left, emit), product), right, emit), b, emit)]
    db = op.matmul(_transposed(_as_matrix(left, emit), emit), _as_matrix(product, emit))
    # Not bound here: TVM folds the transpose of a weight into a product that it finds unbound.
    return [da, db if len(shape(b)) == 2 else op.reshape(emit(db), shape(b))]


def _of_shape(x: Expr, like: Expr, emit: Emit) -> Expr:
    x = emit(x)
    return x if same_shape(shape(x), shape(like)) else op.reshape(x, shape(like))


def _transposed(x: Expr, emit: Emit) -> Expr:
    rank = len(shape(x))
    return emit(op.permute_dims(x, [*range(rank - 2), rank - 1, rank - 2]))


def _as_matrix(x: Expr, emit: Emit) -> Expr:
    *rows, columns = shape(x)
    return x if len(rows) == 1 else emit(op.reshape(x, (math.prod(rows), columns)))


@gradient("relax.outer")
def outer(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """da = g b, db = g^T a"""
    a, b = call.args
    return [op.matmul(g, b), op.matmul(op.permute_dims(g, [1, 0]), a)]


@gradient("relax.einsum")
def einsum(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """da = einsum of g and the other operands, back to the subscripts of a; subscripts that only a has are broadcast"""
    operands = call.args[0]
    count = len(operands.ty.fields)
    values = [
        operands.fields[i] if isinstance(operands, Tuple) else emit(TupleGetItem(operands, i)) for i in range(count)
    ]
    inputs, output = _subscripts(str(call.attrs.subscripts))
    partials = []
    for index, (value, letters) in enumerate(zip(values, inputs, strict=True)):
        others = [*values[:index], *values[index + 1 :]]
        other_letters = [*inputs[:index], *inputs[index + 1 :]]
        known = set(output).union(*other_letters)
        common = "".join(letter for letter in letters if letter in known)
        part = emit(op.einsum([g, *others], f"{','.join([output, *other_letters])}->{common}"))
        spread = [extent if letter in known else 1 for letter, extent in zip(letters, shape(value), strict=True)]
        partials.append(emit(op.broadcast_to(op.reshape(part, spread), shape(value))))
    return [Tuple(partials)]


def _subscripts(text: str) -> tuple[list[str], str]:
    """``"ij,jk->ik"`` as ``(["ij", "jk"], "ik")``; an implicit output is spelled out."""
    text = text.replace(" ", "")
    left, arrow, output = text.partition("->")
    inputs = left.split(",")
    if not arrow:
        letters = left.replace(",", "")
        output = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    return inputs, output


@checks("relax.einsum")
def check_einsum(call: Call, active: Collection[Var]) -> str | None:
    """An ellipsis or a diagonal has no rule."""
    text = str(call.attrs.subscripts)
    inputs, _ = _subscripts(text)
    if "." in text or any(len(set(letters)) < len(letters) for letters in inputs):
        return f"wanted subscripts without ellipsis and without repetition in one operand, got {text!r}"
    return None


_LAYOUTS = {1: ("NCW", "OIW", "IOW"), 2: ("NCHW", "OIHW", "IOHW"), 3: ("NCDHW", "OIDHW", "IODHW")}


_CONVOLUTIONS = tuple(f"relax.nn.conv{rank}d{kind}" for rank in (1, 2, 3) for kind in ("", "_transpose"))


@gradient(*_CONVOLUTIONS)
def convolution(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = g convolved with the transposed kernel, dweight = x correlated with g, each a library call of its own"""
    x, weight = call.args
    geometry = _geometry(call)
    return [
        library_call("convolution_backward_input", [g, weight, ShapeExpr(shape(x)), *geometry], x.ty),
        library_call("convolution_backward_weight", [g, x, ShapeExpr(shape(weight)), *geometry], weight.ty),
    ]


@checks(*_CONVOLUTIONS)
def check_convolution(call: Call, active: Collection[Var]) -> str | None:
    """The library wants channels first and symmetric padding."""
    attrs = call.attrs
    rank = len(attrs.strides)
    data, kernel, kernel_transposed = _LAYOUTS[rank]
    given = (str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.out_layout))
    wanted = (data, kernel_transposed if _is_transposed(call) else kernel, data)
    if given != wanted:
        return f"wanted the layouts {wanted}, got {given}"
    padding = [int(width) for width in attrs.padding]
    return None if padding[:rank] == padding[rank:] else f"wanted as much padding before as after, got {padding}"


def _is_transposed(call: Call) -> bool:
    return call.op.name.endswith("_transpose")


def _geometry(call: Call) -> list[Expr]:
    """``strides``, ``padding``, ``dilation``, ``output_padding`` (shapes), ``transposed`` and ``groups`` (integers)."""
    attrs = call.attrs
    rank = len(attrs.strides)
    shapes = [attrs.strides, attrs.padding[:rank], attrs.dilation]
    shapes.append(attrs.output_padding if _is_transposed(call) else [0] * rank)
    return [
        *(ShapeExpr([int(size) for size in sizes]) for sizes in shapes),
        relax.prim_value(int(_is_transposed(call))),
        relax.prim_value(int(attrs.groups)),
    ]


@gradient("relax.nn.nll_loss", wide=True)
def nll_loss(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx[n, c, ..] = -g w[c] where c is the target, else 0; divided by the sum of the weights used for 'mean'.

    TVM's own rule reads the weight of a negative ``ignore_index`` (such as -100) out of bounds.
    """
    x, targets, *weights = call.args
    reduction = str(call.attrs.reduction)
    axis = 1 if len(shape(x)) > 1 else 0
    classes = shape(x)[axis]
    valid = emit(op.not_equal(targets, const(int(call.attrs.ignore_index), targets)))
    safe = emit(op.where(valid, targets, const(0, targets)))
    weight = emit(op.take(weights[0], safe, axis=0)) if weights else const(1, x)
    used = emit(op.where(valid, weight, const(0, x)))
    scaled = op.negative(g) * used
    if reduction == "mean":
        count = sum_over(used, range(len(shape(used))), emit) if shape(used) else used
        scaled = op.where(valid, scaled / count, const(0, x))
    scaled = emit(scaled)
    spread = [*shape(targets)[:axis], 1, *shape(targets)[axis:]]
    index = [classes] + [1] * (len(shape(x)) - axis - 1)
    labels = op.astype(emit(op.reshape(op.arange(0, classes, 1, "int64"), index)), dtype(targets))
    hit = op.equal(op.reshape(safe, spread), labels)
    return [op.where(hit, op.reshape(scaled, spread), const(0, x)), None] + [None] * len(weights)


@checks("relax.nn.nll_loss")
def check_nll_loss(call: Call, active: Collection[Var]) -> str | None:
    """Class weights are constants of the loss."""
    if any(arg in active for arg in call.args[2:] if isinstance(arg, Var)):
        return "the loss has no gradient with respect to its class weights"
    return None


_ADAPTIVE = tuple(f"relax.nn.adaptive_avg_pool{rank}d" for rank in (1, 2, 3))


@gradient(*_ADAPTIVE, wide=True)
def adaptive_avg_pool(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr]:
    """dx = g / n repeated over each window of n elements; windows of one size only"""
    (x,) = call.args
    extents, windows = shape(x)[2:], shape(y)[2:]
    sizes = [extent // count for extent, count in zip(extents, windows, strict=True)]
    narrow = [size for count in windows for size in (count, 1)]
    wide = [size for pair in zip(windows, sizes, strict=True) for size in pair]
    shared = emit(g * ratio(1, math.prod(sizes), g))
    spread = emit(op.broadcast_to(op.reshape(shared, [*shape(x)[:2], *narrow]), [*shape(x)[:2], *wide]))
    return [op.reshape(spread, shape(x))]


@checks(*_ADAPTIVE)
def check_adaptive_avg_pool(call: Call, active: Collection[Var]) -> str | None:
    """Overlapping windows have no rule."""
    layout = str(call.attrs.layout)
    if layout not in ("NCW", "NCHW", "NCDHW"):
        return f"wanted channels first, got the layout {layout}"
    extents = shape(call.args[0])[2:]
    counts = [int(size) for size in call.attrs.output_size] if call.attrs.output_size is not None else list(extents)
    if any(extent % count for extent, count in zip(extents, counts, strict=True)):
        return f"wanted windows of one size, got {counts} windows for {list(extents)} elements"
    return None


@checks("relax.nn.max_pool2d", "relax.nn.avg_pool2d")
def check_pool(call: Call, active: Collection[Var]) -> str | None:
    """TVM's backward operators know no dilation."""
    dilation = [int(step) for step in call.attrs.dilation]
    return None if set(dilation) == {1} else f"wanted dilation 1, got {dilation}"


@library_gradient("library.normalize", wide=True)
def normalize(call: Call, y: Var, g: Var, emit: Emit) -> list[Expr | None]:
    """dx = rstd (g - mean(g) - y mean(g y)), where y = (x - mean(x)) rstd; without mean(g) where y = x rstd

    ``rstd`` keeps the reduced axes as size 1, and may be summed over any other axis of that size.
    """
    _, rstd, centred = call.args
    axes = [axis for axis, extent in enumerate(shape(rstd)) if same(extent, 1)]
    slope = emit(op.mean(emit(g * y), axes, keepdims=True))
    if not int(centred.value):
        return [rstd * (g - y * slope), None, None]
    offset = emit(op.mean(g, axes, keepdims=True))
    return [rstd * (emit(g - offset) - y * slope), None, None]
