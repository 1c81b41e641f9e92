"""Strided views: shape operations as functions from view to view, over a dense tensor.

A :class:`View` has ``torch.as_strided``'s arguments (shape, strides, offset, in elements), always over a dense
row-major base. Every shape operation of Relax is a function from a view to a view, so a chain of them costs nothing: a
kernel turns the final view into index expressions, a library call into one strided torch tensor. Only ``reshape`` can
fail (``None``): the caller then makes the view dense first.

Extents, strides and offsets may be symbolic. Results hold for all sizes: a function proves its assumptions, or takes
the general case (an extent that may be 1 stays). Only an operation's validity or a slice's end may become a guard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autodiff.extents import Dim, below, divides, same, sample_of

__all__ = ["View", "box", "broadcast", "compose", "cut_out", "dense", "dense_strides", "expand", "is_dense"]
__all__ += ["merged", "permute", "reshape", "slice_view", "without_broadcast"]


@dataclass(frozen=True)
class View:
    """A strided window on a dense base: element ``(i, j, …)`` is ``base[offset + i*strides[0] + j*strides[1] + …]``."""

    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    offset: Dim = 0

    @property
    def numel(self) -> Dim:
        return math.prod(self.shape)


def broadcast(*shapes: Sequence[Dim]) -> tuple[Dim, ...]:
    """The common shape of all by numpy's broadcasting rule. ``ValueError`` if there is none."""
    wide = list(max(shapes, key=len, default=()))
    for shape in shapes:
        for axis in range(-1, -len(shape) - 1, -1):
            have, want = wide[axis], shape[axis]
            if have is want or same(want, 1):
                continue
            if same(have, 1):
                wide[axis] = want
            elif have != want:
                raise ValueError(f"cannot broadcast {', '.join(map(str, shapes))} to one shape")
    return tuple(wide)


def dense_strides(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """Row-major strides of a dense tensor."""
    if len(shape) < 2:
        return (1,) * len(shape)
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= (extent or 1) if type(extent) is int else 1 if same(extent, 0) else extent
    return tuple(reversed(strides))


def dense(shape: Sequence[Dim]) -> View:
    """The view of a whole dense base."""
    return View(tuple(shape), dense_strides(shape))


def is_dense(view: View) -> bool:
    """Whether the view's elements are contiguous from its offset on."""
    step: Dim = 1
    for extent, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if same(extent, 0):
            return True
        if not same(extent, 1) and not same(stride, step):
            return False
        step *= extent
    return True


def merged(view: View) -> list[tuple[Dim, Dim]]:
    """``(extent, stride)`` of the fewest dimensions with the view's enumeration of elements."""
    dims: list[tuple[Dim, Dim]] = []
    for extent, stride in zip(view.shape, view.strides, strict=True):
        if same(extent, 1):
            continue
        if dims and same(dims[-1][1], stride * extent):
            dims[-1] = (dims[-1][0] * extent, stride)
        else:
            dims.append((extent, stride))
    return dims


def permute(view: View, axes: Sequence[int] | None) -> View:
    """Permutes dimensions; ``None`` reverses them."""
    rank = len(view.shape)
    order = list(reversed(range(rank))) if axes is None else [axis % rank for axis in axes]
    return View(tuple(view.shape[a] for a in order), tuple(view.strides[a] for a in order), view.offset)


def expand(view: View, shape: Sequence[Dim]) -> View:
    """Broadcast to ``shape`` by numpy's rule. ``ValueError`` if the shapes do not broadcast."""
    shape = tuple(shape)
    missing = len(shape) - len(view.shape)
    if missing < 0:
        raise ValueError(f"cannot broadcast {view.shape} to {shape}")
    strides: list[Dim] = [0] * missing
    for have, stride, want in zip(view.shape, view.strides, shape[missing:], strict=True):
        if same(have, want):
            strides.append(stride)
        elif same(have, 1):
            strides.append(0)
        elif have == want:
            strides.append(stride)
        else:
            raise ValueError(f"cannot broadcast {view.shape} to {shape}")
    return View(shape, tuple(strides), view.offset)


def without_broadcast(view: View, rank: int) -> View | None:
    """Inverse of :func:`expand`: the view of ``rank`` dimensions with each element once; ``None`` if there is none."""
    missing = len(view.shape) - rank
    dims = list(zip(view.shape, view.strides, strict=True))
    if missing < 0 or any(not same(extent, 1) and not same(stride, 0) for extent, stride in dims[:missing]):
        return None
    shape = tuple(min(extent, 1) if same(stride, 0) else extent for extent, stride in dims[missing:])
    return View(shape, view.strides[missing:], view.offset)


def slice_view(view: View, axis: int, begin: Dim, end: Dim, step: int) -> View:
    """``view[..., begin:end:step, ...]`` with ``0 <= begin`` and ``step > 0``."""
    axis %= len(view.shape)
    end = min(end, view.shape[axis])
    extent = max(0, -(-(end - begin) // step))
    shape, strides = list(view.shape), list(view.strides)
    offset = view.offset + (0 if same(extent, 0) else begin * strides[axis])
    shape[axis], strides[axis] = extent, strides[axis] * step
    return View(tuple(shape), tuple(strides), offset)


def box(view: View, shape: Sequence[Dim]) -> tuple[Dim, ...] | None:
    """The corner of the box that a view cuts out of a dense tensor of ``shape``; ``None`` if it cuts out no box."""
    strides = dense_strides(shape)
    if len(view.shape) != len(strides) or same(view.numel, 0):
        return None
    corner, left = [], view.offset
    for have, extent, stride, want in zip(view.shape, shape, view.strides, strides, strict=True):
        begin, left = divmod(left, want)
        if not below(begin + have - extent, 1) or not (same(have, 1) or same(stride, want)):
            return None
        corner.append(begin)
    return tuple(corner)


def cut_out(view: View, corner: Sequence[Dim], shape: Sequence[Dim]) -> View:
    """The box of ``shape`` at ``corner`` in a view."""
    offset = view.offset + sum(begin * stride for begin, stride in zip(corner, view.strides, strict=True))
    return View(tuple(shape), view.strides, offset)


def compose(outer: View, inner: View) -> View | None:
    """``inner`` read through a permutation of its elements; ``None`` if no strides express it.

    ``outer`` is a view of the dense tensor of ``inner``'s elements. It must be a permutation of all of them (no
    offset, no broadcast, no slice): then its dimensions' coordinates never carry into one another.
    """
    step: Dim = 1
    for extent, stride in sorted(merged(outer), key=lambda dim: sample_of(dim[1])):
        if not same(stride, step):
            return None
        step *= extent
    if not same(outer.offset, 0) or not same(step, inner.numel) or not same(outer.numel, inner.numel):
        return None
    ranges, low = [], 1  # the dense strides that each dimension of inner covers
    for extent, stride in reversed(merged(inner)):
        ranges.append((low, low * extent, stride))
        low *= extent
    strides: list[Dim] = []
    for extent, stride in zip(outer.shape, outer.strides, strict=True):
        if same(extent, 1):
            strides.append(0)
            continue
        covering = [dim for dim in ranges if below(dim[0] - stride, 1) and below(stride * extent - dim[1], 1)]
        if not covering or not divides(covering[0][0], stride):
            return None
        strides.append(covering[0][2] * (stride // covering[0][0]))
    return View(outer.shape, tuple(strides), inner.offset)


def reshape(view: View, shape: Sequence[Dim]) -> View | None:
    """The view with another shape of as many elements; ``None`` if no strides express it."""
    shape = tuple(shape)
    if math.prod(shape) != view.numel:
        raise ValueError(f"cannot reshape {view.shape} to {shape}")
    if same(view.numel, 0):
        return View(shape, dense_strides(shape), view.offset)
    source = merged(view)
    strides: list[Dim] = [0] * len(shape)
    position = len(source) - 1
    left, step = source[position] if source else (1, 1)
    for axis in reversed(range(len(shape))):
        extent = shape[axis]
        if same(extent, 1):
            strides[axis] = step
            continue
        if same(left, 1):
            position -= 1
            if position < 0:
                return None
            left, step = source[position]
        if not divides(extent, left):
            return None
        strides[axis] = step
        step *= extent
        left //= extent
    return View(shape, tuple(strides), view.offset)
