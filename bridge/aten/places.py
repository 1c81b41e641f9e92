"""Places: whether a traced value lies on the host beside a GPU's tensors."""

from __future__ import annotations

import torch
from torch import fx

from bridge.base.devices import current_device
from bridge.capture import TensorForm

__all__ = ["lies_elsewhere"]


def lies_elsewhere(node: fx.Node) -> bool:
    """Whether a node's value is a tensor on another device than the call's."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor | TensorForm) and value.device not in (None, current_device())
