"""Eager's own error: a sample that PyTorch itself refuses (shapes that do not fit) is reported in PyTorch's words."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bridge.base.errors import refused_by_eager
from bridge.base.torch_internals import pytree
from bridge.capture.isolated_rng import IsolatedRNG

__all__ = ["raise_if_eager_raises"]


def raise_if_eager_raises(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """A sample that PyTorch itself refuses (shapes that do not fit) is reported in PyTorch's words.

    Runs the module once, on copies of its tensors and of the sample, without moving the generator.
    """
    copies = {name: tensor.detach().clone() for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    leaves, spec = pytree.tree_flatten((args, kwargs))
    leaves = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    copied_args, copied_kwargs = pytree.tree_unflatten(leaves, spec)
    try:
        with IsolatedRNG(), torch.no_grad():
            torch.func.functional_call(module, copies, copied_args, copied_kwargs)
    except Exception as error:
        refused_by_eager(error)
        raise
