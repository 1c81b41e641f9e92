"""Windows, folded windows and mirrored pads → slices, whose gradients are sums of slices.

torch's formulas of these operators are gathers at computed positions: their gradients would add number by number at
positions that repeat, in no order on a GPU. As slices, the gradient of each number is a sum of the few that it went to.

One axis after the other: windows of ``k`` positions along each of two axes are ``2 k`` slices instead of ``k * k``.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax

from autodiff.extents import Dim, maximum, same
from autodiff.gradients.registry import padded
from autodiff.ir import Expr, shape
from bridge.aten.registry import converts, numbers_only, rounds_once
from bridge.base.torch_internals import aten

op = relax.op


def _pieces(size: int, step: int, dilation: int) -> list[tuple[int, int, int]]:
    """A window as pieces, each of which lies without overlap in all windows together.

    Returns:
        of each piece its first position inside the window, the one behind its last, and where it begins in the tensor,
        counted from where the window does.
    """
    if dilation > 1:
        return [(place, place + 1, place * dilation) for place in range(size)]
    return [(first, min(first + step, size), first) for first in range(0, size, step)]


def _changed(x: Expr, dim: int, *extents: Dim) -> tuple[Dim, ...]:
    """The shape of ``x`` with other extents in the place of that of an axis."""
    return (*shape(x)[:dim], *extents, *shape(x)[dim + 1 :])


def _pad(importer, x: Expr, dim: int, before: Dim, after: Dim) -> Expr:
    """``x`` between zeros."""
    return x if same(before, 0) and same(after, 0) else importer.emit(padded(x, dim, before, after, importer.emit))


def _slice(importer, x: Expr, dim: int, begin: Dim, end: Dim, step: int = 1) -> Expr:
    whole = step == 1 and same(begin, 0) and same(end, shape(x)[dim])
    return x if whole else importer.slice(x, [dim], [begin], [end], step)


def _joined(importer, parts: Sequence[Expr], dim: int) -> Expr:
    return parts[0] if len(parts) == 1 else importer.emit(op.concat(list(parts), dim))


def _windows(importer, x: Expr, dim: int, count: Dim, size: int, step: int, dilation: int = 1) -> Expr:
    """``x`` with two axes in the place of one: the windows, and the positions inside each."""
    parts = []
    for first, last, begin in _pieces(size, step, dilation):
        width = last - first
        end = begin + (count - 1) * step + width
        if width == 1:
            rows = _slice(importer, x, dim, begin, end, step)
            parts.append(importer.reshape(rows, _changed(x, dim, count, 1)))
        else:
            rows = _pad(importer, _slice(importer, x, dim, begin, end), dim, 0, step - width)
            rows = importer.reshape(rows, _changed(x, dim, count, step))
            parts.append(_slice(importer, rows, dim + 1, 0, width))
    return _joined(importer, parts, dim + 1)


def _folded(importer, x: Expr, dim: int, extent: Dim, step: int, dilation: int) -> Expr:
    """Windows, an axis of them and behind it that of the positions inside each → their sum, each where it was cut."""
    count, size = shape(x)[dim], shape(x)[dim + 1]
    total = None
    for first, last, begin in _pieces(size, step, dilation):
        rows = _pad(importer, _slice(importer, x, dim + 1, first, last), dim + 1, 0, step - (last - first))
        line = importer.reshape(rows, (*shape(x)[:dim], count * step, *shape(x)[dim + 2 :]))
        length = (count - 1) * step + last - first
        line = _pad(importer, _slice(importer, line, dim, 0, length), dim, begin, extent - begin - length)
        total = line if total is None else importer.emit(op.add(total, line))
    return total


@converts(aten.im2col.default)
@rounds_once
def im2col(importer, node, x, kernel, dilation, padding, stride):
    numbers_only("windows", kernel, dilation, padding, stride)
    rank = len(shape(x))
    for axis, dim in ((0, rank - 2), (1, rank)):  # behind the windows along the first one
        x = _pad(importer, x, dim, padding[axis], padding[axis])
        count = _count(shape(x)[dim], kernel[axis], stride[axis], dilation[axis])
        x = _windows(importer, x, dim, count, kernel[axis], stride[axis], dilation[axis])
    *others, rows, in_row, columns, in_column = range(rank + 2)
    x = importer.emit(op.permute_dims(x, [*others, in_row, in_column, rows, columns]))
    return importer.reshape(x, importer.out(node).shape)


def _count(extent: Dim, size: int, step: int, dilation: int) -> Dim:
    return (extent - dilation * (size - 1) - 1) // step + 1


@converts(aten.col2im.default)
@rounds_once
def col2im(importer, node, x, output_size, kernel, dilation, padding, stride):
    numbers_only("windows", kernel, dilation, padding, stride)
    *others, channels, height, width = importer.out(node).shape
    extents = [extent + 2 * pad for extent, pad in zip((height, width), padding, strict=True)]
    counts = [_count(*each) for each in zip(extents, kernel, stride, dilation, strict=True)]
    x = importer.reshape(x, (*others, channels, *kernel, *counts))
    *others, in_row, in_column, rows, columns = range(len(shape(x)))
    x = importer.emit(op.permute_dims(x, [*others, rows, in_row, columns, in_column]))
    for axis, dim in ((1, len(others) + 2), (0, len(others))):
        x = _folded(importer, x, dim, extents[axis], stride[axis], dilation[axis])
        x = _slice(importer, x, dim, padding[axis], extents[axis] - padding[axis])
    return x


@converts(aten.unfold.default)
def unfold(importer, node, x, dim, size, step):
    numbers_only("windows", size, step)
    if not shape(x) or size == 0:
        return importer.reshape(_slice(importer, x, 0, 0, size) if shape(x) else x, importer.out(node).shape)
    dim %= len(shape(x))
    x = _windows(importer, x, dim, _count(shape(x)[dim], size, step, 1), size, step)
    order = [axis for axis in range(len(shape(x))) if axis != dim + 1]
    return x if order[-1] == dim else importer.emit(op.permute_dims(x, [*order, dim + 1]))


@converts(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default)
def reflection_pad(importer, node, x, widths):
    def reflected(x, dim, begin, end):
        return importer.emit(op.flip(_slice(importer, x, dim, begin, end), dim))

    for dim, before, after in _by_axis(x, widths):
        extent = shape(x)[dim]
        left = [reflected(x, dim, 1, before + 1)] if before > 0 else []
        right = [reflected(x, dim, extent - 1 - after, extent - 1)] if after > 0 else []
        x = _between(importer, x, dim, before, after, left, right)
    return x


@converts(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default)
def replication_pad(importer, node, x, widths):
    def repeated(x, dim, place, width):
        row = _slice(importer, x, dim, place, place + 1)
        return importer.expand(row, _changed(x, dim, width))

    for dim, before, after in _by_axis(x, widths):
        left = [repeated(x, dim, 0, before)] if before > 0 else []
        right = [repeated(x, dim, shape(x)[dim] - 1, after)] if after > 0 else []
        x = _between(importer, x, dim, before, after, left, right)
    return x


def _by_axis(x: Expr, widths: Sequence[Dim]) -> list[tuple[int, Dim, Dim]]:
    """Axes with the widths before and behind them: torch counts from the last one."""
    last = len(shape(x)) - 1
    return [(last - pair, *widths[2 * pair : 2 * pair + 2]) for pair in range(len(widths) // 2)]


def _between(importer, x: Expr, dim: int, before: Dim, after: Dim, left: list[Expr], right: list[Expr]) -> Expr:
    """``x`` with what was made of it before and behind it; a negative width cuts."""
    x = _joined(importer, [*left, x, *right], dim)
    return _slice(importer, x, dim, maximum(-before, 0), shape(x)[dim] - maximum(-after, 0))
