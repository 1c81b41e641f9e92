"""Strided views: shape operations as functions from view to view, over a dense tensor.

A :class:`View` is what ``torch.as_strided`` takes (shape, strides, offset, in elements), always over a dense
row-major base. Every shape operation of Relax is a function from a view to a view, so a chain of them costs
nothing: a kernel turns the final view into index expressions, a library step into one strided torch tensor.
Only ``reshape`` can fail (``None``): then the caller has to make the view dense first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "View",
    "box",
    "compose",
    "cut_out",
    "dense",
    "dense_strides",
    "expand",
    "is_dense",
    "merged",
    "permute",
    "reshape",
    "slice_view",
    "without_broadcast",
]


@dataclass(frozen=True)
class View:
    """A strided window on a dense base: element ``(i, j, …)`` is ``base[offset + i*strides[0] + j*strides[1] + …]``."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of a dense tensor."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def dense(shape: Sequence[int]) -> View:
    """The view that reads a dense base as it is."""
    return View(tuple(shape), dense_strides(shape))


def is_dense(view: View) -> bool:
    """Whether the view's elements lie one after another from its offset on (the offset itself may be anything)."""
    step = 1
    for extent, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if extent == 0:
            return True
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True


def merged(view: View) -> list[tuple[int, int]]:
    """``(extent, stride)`` of the fewest dimensions that enumerate the view's elements in the same order."""
    dims: list[tuple[int, int]] = []
    for extent, stride in zip(view.shape, view.strides, strict=True):
        if extent == 1:
            continue
        if dims and dims[-1][1] == stride * extent:
            dims[-1] = (dims[-1][0] * extent, stride)
        else:
            dims.append((extent, stride))
    return dims


def permute(view: View, axes: Sequence[int] | None) -> View:
    """Dimensions in another order; ``None`` reverses them."""
    rank = len(view.shape)
    order = list(reversed(range(rank))) if axes is None else [axis % rank for axis in axes]
    return View(tuple(view.shape[a] for a in order), tuple(view.strides[a] for a in order), view.offset)


def expand(view: View, shape: Sequence[int]) -> View:
    """Broadcast to ``shape`` by numpy's rule. ``ValueError`` if the shapes do not broadcast."""
    shape = tuple(shape)
    missing = len(shape) - len(view.shape)
    if missing < 0:
        raise ValueError(f"cannot broadcast {view.shape} to {shape}")
    strides = [0] * missing
    for have, stride, want in zip(view.shape, view.strides, shape[missing:], strict=True):
        if have != want and have != 1:
            raise ValueError(f"cannot broadcast {view.shape} to {shape}")
        strides.append(stride if have == want else 0)
    return View(shape, tuple(strides), view.offset)


def without_broadcast(view: View, rank: int) -> View | None:
    """The view of ``rank`` dimensions, each element once, that :func:`expand` makes this view of; ``None`` if none."""
    missing = len(view.shape) - rank
    dims = list(zip(view.shape, view.strides, strict=True))
    if missing < 0 or any(extent != 1 and stride for extent, stride in dims[:missing]):
        return None
    shape = tuple(extent if stride else min(extent, 1) for extent, stride in dims[missing:])
    return View(shape, view.strides[missing:], view.offset)


def slice_view(view: View, axis: int, begin: int, end: int, step: int) -> View:
    """``view[..., begin:end:step, ...]`` with ``0 <= begin`` and ``step > 0``."""
    axis %= len(view.shape)
    end = min(end, view.shape[axis])
    extent = max(0, -(-(end - begin) // step))
    shape, strides = list(view.shape), list(view.strides)
    offset = view.offset + (begin * strides[axis] if extent else 0)
    shape[axis], strides[axis] = extent, strides[axis] * step
    return View(tuple(shape), tuple(strides), offset)


def box(view: View, shape: Sequence[int]) -> tuple[int, ...] | None:
    """The corner at which a view cuts a box out of the dense tensor of that shape, or ``None`` if it does not."""
    strides = dense_strides(shape)
    if len(view.shape) != len(strides) or view.numel == 0:
        return None
    corner, left = [], view.offset
    for have, extent, stride, want in zip(view.shape, shape, view.strides, strides, strict=True):
        begin, left = divmod(left, want)
        if begin + have > extent or (have != 1 and stride != want):
            return None
        corner.append(begin)
    return tuple(corner)


def cut_out(view: View, corner: Sequence[int], shape: Sequence[int]) -> View:
    """The box of ``shape`` at ``corner`` of a view."""
    offset = view.offset + sum(begin * stride for begin, stride in zip(corner, view.strides, strict=True))
    return View(tuple(shape), view.strides, offset)


def compose(outer: View, inner: View) -> View | None:
    """``inner`` read through a permutation of its elements, or ``None`` where no strides express it.

    ``outer`` is a view on the dense tensor of ``inner``'s elements. It must be a permutation of all of them (no
    offset, no broadcast, no slice): then the coordinates of its dimensions never carry into one another.
    """
    step = 1
    for extent, stride in sorted(merged(outer), key=lambda dim: dim[1]):
        if stride != step:
            return None
        step *= extent
    if outer.offset or step != inner.numel or outer.numel != inner.numel:
        return None
    ranges, low = [], 1  # which strides of the dense numbering each dimension of inner covers
    for extent, stride in reversed(merged(inner)):
        ranges.append((low, low * extent, stride))
        low *= extent
    strides = []
    for extent, stride in zip(outer.shape, outer.strides, strict=True):
        covering = [dim for dim in ranges if dim[0] <= stride and stride * extent <= dim[1]]
        if extent != 1 and not covering:
            return None
        strides.append(0 if extent == 1 else covering[0][2] * (stride // covering[0][0]))
    return View(outer.shape, tuple(strides), inner.offset)


def reshape(view: View, shape: Sequence[int]) -> View | None:
    """The view with another shape of as many elements, or ``None`` where no strides express it."""
    shape = tuple(shape)
    if math.prod(shape) != view.numel:
        raise ValueError(f"cannot reshape {view.shape} to {shape}")
    if view.numel == 0:
        return View(shape, dense_strides(shape), view.offset)
    source = merged(view)
    strides = [0] * len(shape)
    position = len(source) - 1
    left, step = source[position] if source else (1, 1)
    for axis in reversed(range(len(shape))):
        extent = shape[axis]
        if extent == 1:
            strides[axis] = step
            continue
        if left == 1:
            position -= 1
            left, step = source[position]
        if left % extent:
            return None
        strides[axis] = step
        step *= extent
        left //= extent
    return View(shape, tuple(strides), view.offset)
