"""Pool plan: the gradient of a maximum over windows with channels behind, as plain data for a backend's kernel."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PoolPlan"]


@dataclass(frozen=True)
class PoolPlan:
    """``dx[n, h, w, c]``: the sum of ``grad[n, i, j, c]`` over the windows whose maximum is at ``h * W + w``.

    Windows are met row by row, each row in order, as eager's kernel adds them; in float32 for half types.

    Attributes:
        dtype: element type of gradients; places are int64.
        batch, channels: extents; ``image``: height and width of ``x``; ``windows``: how many there are, down and along.
        kernel, stride, padding, dilation: of a window, each down and along.
    """

    dtype: str
    batch: int
    channels: int
    image: tuple[int, int]
    windows: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def reach(self, axis: int) -> int:
        """Elements from the first of a window to the last."""
        return self.dilation[axis] * (self.kernel[axis] - 1)

    def overlapping(self, axis: int) -> int:
        """Windows at most that an element lies between the ends of."""
        return min(self.windows[axis], self.reach(axis) // self.stride[axis] + 1)
