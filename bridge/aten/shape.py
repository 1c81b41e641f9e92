"""Shape operators → Relax: views, slices, concatenations, scatters of slices.

Creation operators (full, arange, …) → Relax constants and fills.
Size nodes: Python's arithmetic on sizes → extents (set by the trace), or 0-d tensors for non-integers: a quotient, a
root or a power of sizes is computed in float64, as in Python.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx
from tvm import relax

from autodiff.extents import Dim, Extent, maximum, same
from autodiff.ir import Expr, dtype, numel, shape
from bridge.aten.registry import UnsupportedUse, clamped, converts, dims, has_extents, numbers_only
from bridge.base.devices import HOST
from bridge.base.torch_internals import aten
from bridge.base.torch_shapes import SYMBOLIC

op = relax.op


@converts(
    *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.view_copy.default),
    *(aten.squeeze.dims, aten.squeeze.dim, aten.squeeze.default, aten.unsqueeze.default),
)
def view(importer, node, x, *target):
    return importer.reshape(x, importer.out(node).shape)


@converts(aten.expand.default)
def expand(importer, node, x, size, *, implicit=False):
    target = importer.out(node).shape
    padded = (1,) * (len(target) - len(shape(x))) + shape(x)
    return importer.expand(importer.reshape(x, padded), target)


@converts(aten.permute.default, aten.permute_copy.default)
def permute(importer, node, x, dims):
    dims = [d % len(dims) for d in dims]
    return x if dims == sorted(dims) else importer.emit(op.permute_dims(x, dims))


@converts(aten.transpose.int)
def transpose(importer, node, x, first, second):
    rank = len(shape(x))
    if rank == 0:
        return x
    dims = list(range(rank))
    dims[first], dims[second] = dims[second], dims[first]
    return permute(importer, node, x, dims)


@converts(aten.t.default)
def t(importer, node, x):
    return permute(importer, node, x, list(range(len(shape(x))))[::-1])


def slice_bounds(extent: Dim, start: Dim | None, end: Dim | None) -> tuple[Dim, Dim]:
    """Start and end of a slice with torch's clamping: ``0 <= start <= end <= extent``."""
    start = 0 if start is None else clamped(start, extent)
    end = extent if end is None else clamped(end, extent)
    return start, maximum(start, end)


@converts(aten.narrow_copy.default)
def narrow_copy(importer, node, x, dim, start, length):
    dim %= len(shape(x))
    start += shape(x)[dim] if start < 0 else 0
    return sliced(importer, x, dim, start, start + length)


def sliced(importer, x: Expr, dim: int, start: Dim, end: Dim, step: int = 1) -> Expr:
    """The slices ``start``, ``start + step``, … below ``end`` along ``dim``; ``x`` itself if these are all."""
    if step == 1 and same(start, 0) and same(end, shape(x)[dim]):
        return x
    return importer.slice(x, [dim], [start], [end], step)


@converts(aten.slice.Tensor)
def slice_(importer, node, x, dim=0, start=None, end=None, step=1):
    numbers_only("the step of a slice", step)
    dim %= len(shape(x))
    start, end = slice_bounds(shape(x)[dim], start, end)
    return sliced(importer, x, dim, start, end, step)


@converts(aten.select.int)
def select(importer, node, x, dim, index):
    dim %= len(shape(x))
    if isinstance(index, Expr):
        return importer.library("index", [x, [dim], [index]], importer.out(node))
    index += shape(x)[dim] if index < 0 else 0
    return importer.reshape(sliced(importer, x, dim, index, index + 1), importer.out(node).shape)


@converts(aten.cat.default)
def cat(importer, node, tensors, dim=0):
    # torch ignores 1-d empty tensors
    kept = [x for x in tensors if shape(x) != (0,) or len(importer.out(node).shape) == 1]
    kept = importer.operands(node, *kept)
    return kept[0] if len(kept) == 1 else importer.emit(op.concat(kept, dim % len(importer.out(node).shape)))


@converts(aten.split_with_sizes.default)
def split_with_sizes(importer, node, x, sizes, dim=0):
    dim %= len(shape(x))
    parts, start = [], 0
    for size in sizes:
        parts.append(sliced(importer, x, dim, start, start + size))
        start += size
    return tuple(parts)


@converts(aten.split.Tensor)
def split(importer, node, x, size, dim=0):
    return split_with_sizes(importer, node, x, [part.shape[dim] for part in importer.out(node)], dim)


@converts(aten.unbind.int, aten.unbind_copy.int)
def unbind(importer, node, x, dim=0):
    dim %= len(shape(x))
    rest = shape(x)[:dim] + shape(x)[dim + 1 :]
    return tuple(importer.reshape(sliced(importer, x, dim, i, i + 1), rest) for i in range(len(importer.out(node))))


@converts(aten.slice_scatter.default)
def slice_scatter(importer, node, x, source, dim=0, start=None, end=None, step=1):
    numbers_only("the step of a slice", step)
    dim %= len(shape(x))
    extent = shape(x)[dim]
    start, end = slice_bounds(extent, start, end)
    (source,) = importer.operands(node, source)
    if 0 in shape(source):
        return x
    if step == 1:
        pieces = [sliced(importer, x, dim, 0, start), source, sliced(importer, x, dim, end, extent)]
        pieces = [piece for piece in pieces if shape(piece)[dim] > 0]
        return pieces[0] if len(pieces) == 1 else importer.emit(op.concat(pieces, dim))
    if has_extents((extent, start, end)):
        count = shape(source)[dim]
        positions = importer.emit(op.arange(start, start + count * step, step, "int64"))
        return importer.library("index_put", [x, source, [dim], [positions], False], importer.out(node))
    rows = []  # one slice of width 1 per position: every `step`-th from the source, the rest from x
    for position in range(extent):
        inside = start <= position < end and (position - start) % step == 0
        taken, index = (source, (position - start) // step) if inside else (x, position)
        rows.append(sliced(importer, taken, dim, index, index + 1))
    return importer.emit(op.concat(rows, dim)) if len(rows) > 1 else rows[0]


@converts(aten.select_scatter.default)
def select_scatter(importer, node, x, source, dim, index):
    dim %= len(shape(x))
    if isinstance(index, Expr):
        return importer.library("index_put", [x, source, [dim], [index], False], importer.out(node))
    index += shape(x)[dim] if index < 0 else 0
    row = (*shape(x)[:dim], 1, *shape(x)[dim + 1 :])
    return slice_scatter(importer, node, x, importer.reshape(source, row), dim, index, index + 1)


@converts(aten.flip.default)
def flip(importer, node, x, dims):
    for dim in dims if shape(x) else ():
        x = importer.emit(op.flip(x, dim % len(shape(x))))
    return x


@converts(aten.repeat.default)
def repeat(importer, node, x, repeats):
    target = importer.out(node).shape
    padded = (1,) * (len(target) - len(shape(x))) + shape(x)
    spread = [extent for size in padded for extent in (1, size)]
    expanded = [extent for count, size in zip(repeats, padded, strict=True) for extent in (count, size)]
    return importer.reshape(importer.expand(importer.reshape(x, spread), expanded), target)


@converts(aten.roll.default)
def roll(importer, node, x, shifts, dims=()):
    """Exchanges the two parts of each rolled axis; the gradient is an exchange as well."""
    if not dims:
        return importer.reshape(_rolled(importer, importer.reshape(x, (numel(x),)), shifts[0], 0), shape(x))
    for shift, dim in zip(shifts, dims, strict=True):
        x = _rolled(importer, x, shift, dim % max(len(shape(x)), 1))
    return x


def _rolled(importer, x, shift, dim):
    if same(numel(x), 0) or not shape(x):
        return x
    extent = shape(x)[dim]
    place = -shift % extent
    if same(place, 0):
        return x
    parts = sliced(importer, x, dim, place, extent), sliced(importer, x, dim, 0, place)
    return importer.emit(op.concat(parts, dim))


@converts(aten.constant_pad_nd.default)
def constant_pad_nd(importer, node, x, widths, value=0):
    rank = len(shape(x))
    before, after = [0] * rank, [0] * rank
    for pair in range(len(widths) // 2):  # torch lists the last axis first
        before[rank - 1 - pair], after[rank - 1 - pair] = widths[2 * pair], widths[2 * pair + 1]
    for axis in range(rank):  # negative widths cut
        start, end = maximum(-before[axis], 0), shape(x)[axis] - maximum(-after[axis], 0)
        x = sliced(importer, x, axis, start, end)
    widths = [max(width, 0) for pair in zip(before, after, strict=True) for width in pair]
    if "float" in dtype(x) and not has_extents((shape(x), widths, value)) and math.isfinite(value):
        return importer.emit(op.nn.pad(x, widths, "constant", float(value))) if any(widths) else x
    for axis in range(rank):
        pieces = [x]
        for width, position in ((before[axis], 0), (after[axis], len(pieces) + 1)):
            if width > 0:
                extents = (*shape(x)[:axis], width, *shape(x)[axis + 1 :])
                fill = relax.op.full(extents, importer.constant(value, dtype(x)), dtype(x))
                pieces.insert(position, importer.emit(fill))
        x = importer.emit(op.concat(pieces, axis)) if len(pieces) > 1 else x
    return x


@converts(aten.full.default, aten.full_like.default)
def full(importer, node, size_or_tensor, value, **layout):
    return importer.filled(importer.out(node), value)


@converts(aten.scalar_tensor.default)
def scalar_tensor(importer, node, value, **layout):
    return importer.constant(value, importer.out_dtype(node))


@converts(
    *(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default),
    *(aten.empty.memory_format, aten.empty_permuted.default, aten.empty_strided.default, aten.empty_like.default),
    *(aten.new_empty.default, aten.new_empty_strided.default),
)
def zeros(importer, node, *args, **layout):
    """Also for eager's uninitialized memory: any value is right, this one is reproducible."""
    return importer.filled(importer.out(node), 0)


@converts(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def ones(importer, node, *args, **layout):
    return importer.filled(importer.out(node), 1)


@converts(aten.arange.start_step, aten.arange.start, aten.arange.default)
def arange(importer, node, *bounds, **layout):
    start, _, step = (0, bounds[0], 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    element_type = importer.out_dtype(node)
    ints = "float" not in element_type
    (extent,) = dims(importer.out(node).shape)
    if not has_extents((start, step)):
        start, step = (int(b) if ints else float(b) for b in (start, step))
    elif not ints:
        numbers_only("arange of floating point numbers", start, step)
    if ints and step > 0:  # relax infers a wrong extent for a negative step
        return importer.emit(relax.op.arange(start, start + extent * step, step, element_type))
    index = importer.emit(relax.op.arange(0, extent, 1, "int64"))
    scaled = relax.op.multiply(importer.cast(index, element_type), importer.constant(step, element_type))
    return importer.emit(relax.op.add(importer.emit(scaled), importer.constant(start, element_type)))


_WINDOWS = ("bartlett", "blackman", "hamming", "hann", "kaiser")


@converts(
    *(getattr(aten, name).default for name in ("tril_indices", "triu_indices", "fft_fftfreq", "fft_rfftfreq")),
    *(getattr(aten, f"{name}_window").default for name in _WINDOWS),
    *(getattr(aten, f"{name}_window").periodic for name in _WINDOWS),
    aten.hamming_window.periodic_alpha,
    aten.hamming_window.periodic_alpha_beta,
    aten.kaiser_window.beta,
)
def constant_table(importer, node, *args, **layout):
    # depends on numbers alone: torch's kernel runs once, and its result is the same in every call
    numbers_only(str(node.target), *args)
    table = node.target(*args, **{**layout, "dtype": importer.out(node).dtype, "device": HOST})
    return relax.const(np.asarray(table.numpy()), importer.out_dtype(node))


_FLOATS: dict[Any, Callable[..., Any]] = {
    operator.truediv: op.divide,
    operator.mul: op.multiply,
    operator.add: op.add,
    operator.sub: op.subtract,
    operator.pow: op.power,
    operator.neg: op.negative,
    torch.sym_float: lambda x: x,
    torch.sym_sqrt: op.sqrt,
    math.sqrt: op.sqrt,
}


def is_size(node: fx.Node) -> bool:
    """Whether a node is a number computed from the arguments' sizes."""
    return isinstance(node.meta.get("val"), (bool, int, Extent, *SYMBOLIC))


def size(importer: Any, node: fx.Node, args: tuple) -> bool | int | Extent | Expr:
    """The number: an extent if it is an integer, otherwise a 0-d float64 tensor."""
    value = node.meta["val"]
    if not isinstance(value, SYMBOLIC):
        return value
    make = _FLOATS.get(node.target)
    if make is None or not isinstance(value, torch.SymFloat):
        raise UnsupportedUse("a number that is made of sizes which vary")
    return importer.emit(make(*(importer.cast(arg, "float64") for arg in args)))


@converts(aten._assert_scalar.default)
def assert_scalar(importer, node, condition, message):
    """A condition on sizes, as a guard of their scope."""
    if condition is not True:
        raise UnsupportedUse("an assertion on a number that a tensor gives")
