"""Random chains of shape operations: a view of a dense base, and the torch tensor that the same operations give."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import torch

from bridge.compile.loop_ir import views
from bridge.compile.loop_ir.views import View

SHAPES = [(2, 3, 4), (6, 1, 5), (4, 4), (2, 2, 2, 3), (12,), (1, 7), (3, 8, 2), (5, 0, 2), ()]


def addresses(view: View) -> np.ndarray:
    """Addresses of a view's elements in row-major order."""
    grid = np.full(view.shape, view.offset, dtype=np.int64)
    for axis, (extent, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
        grid += np.arange(extent).reshape(-1, *[1] * (len(view.shape) - axis - 1)) * stride
    return grid.ravel()


def factors(rng: random.Random, count: int) -> tuple[int, ...]:
    """A random shape of so many elements."""
    shape = []
    while count > 1 and len(shape) < 4:
        extent = rng.choice([n for n in range(1, count + 1) if count % n == 0])
        shape.append(extent)
        count //= extent
    shape.insert(rng.randint(0, len(shape)), count)
    return tuple(shape)


def random_view(rng: random.Random, steps: int, shape: Sequence[int] | None = None) -> tuple[View, torch.Tensor]:
    """A view of a dense base whose elements are their own addresses, and the tensor that it should show."""
    shape = rng.choice(SHAPES) if shape is None else tuple(shape)
    view, tensor = views.dense(shape), torch.arange(math.prod(shape)).view(shape)
    for _ in range(steps):
        view, tensor = random_step(rng, view, tensor)
    return view, tensor


def random_step(rng: random.Random, view: View, tensor: torch.Tensor) -> tuple[View, torch.Tensor]:
    """One more shape operation on both, except reshapes that no strides express, as in torch."""
    rank = tensor.dim()
    match rng.choice(["permute", "slice", "reshape", "reshape", "expand"]):
        case "permute":
            axes = rng.choice([None, rng.sample(range(rank), rank), [axis - rank for axis in range(rank)]])
            return views.permute(view, axes), tensor.permute(list(reversed(range(rank))) if axes is None else axes)
        case "slice" if rank:
            axis = rng.randrange(-rank, rank)
            extent = tensor.shape[axis]
            begin, step = rng.randint(0, extent), rng.randint(1, 3)
            end = rng.randint(begin, extent + 2)
            index = [slice(None)] * rank
            index[axis] = slice(begin, end, step)
            return views.slice_view(view, axis, begin, end, step), tensor[tuple(index)]
        case "reshape" if tensor.numel() < 1000:
            shape = factors(rng, tensor.numel()) if tensor.numel() else (0, rng.randint(0, 3))
            made = views.reshape(view, shape)
            if made is not None:
                return made, tensor.reshape(shape)
            try:
                tensor.view(shape)
            except RuntimeError:
                return view, tensor
            raise AssertionError(f"torch views {tuple(tensor.shape)} of strides {tensor.stride()} as {shape}")
        case "expand" if tensor.numel() < 200:
            shape = [rng.randint(1, 3) if extent == 1 else extent for extent in tensor.shape]
            shape = [rng.randint(1, 3) for _ in range(rng.randint(0, 1))] + shape
            return views.expand(view, shape), tensor.expand(shape)
    return view, tensor
