"""Batch normalization with ``momentum=None``: running averages over all batches seen so far.

torch's module reads the number of batches as a Python number to divide by it, which a graph cannot hold. While a
module is traced, such layers run a forward that divides in a tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from bridge.base.torch_internals import BatchNormBase

__all__ = ["averages_cumulatively", "cumulative_forward"]


def averages_cumulatively(layer: nn.Module) -> bool:
    """Whether :func:`cumulative_forward` has to stand in for the layer's own forward."""
    if not isinstance(layer, BatchNormBase) or type(layer).forward is not BatchNormBase.forward:
        return False
    counts = layer.num_batches_tracked is not None
    return layer.training and layer.track_running_stats and layer.momentum is None and counts


def cumulative_forward(self: BatchNormBase, x: Tensor) -> Tensor:
    """``_BatchNorm.forward`` with the share of the new batch, ``1 / num_batches_tracked``, as a tensor.

    As torch's kernel, it computes statistics of half types in float32, and leaves the running ones as they are where
    there are no elements.
    """
    self._check_input_dim(x)
    self.num_batches_tracked.add_(1)
    y = functional.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
    if x.numel() == 0:
        return y
    with torch.no_grad():
        axes = [axis for axis in range(x.dim()) if axis != 1]
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        share = 1.0 / self.num_batches_tracked.to(wide.dtype)
        new = (wide.mean(axes), wide.var(axes))
        for running, batch in zip((self.running_mean, self.running_var), new, strict=True):
            running.copy_(((1.0 - share) * running.to(wide.dtype) + share * batch).to(running.dtype))
    return y
