"""Call key: a call before it is made → what it looks like: classes, names and layouts of tensors, arguments, modes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from bridge.base.devices import current_device
from bridge.base.modes import autocast_setting, cuda_autocast_setting
from bridge.base.torch_cuda import read_settings
from bridge.base.torch_internals import pytree, storage_id
from bridge.capture import DynamicDim
from bridge.compile import backend_for
from bridge.state import constant_key, module_tensors

__all__ = ["call_key_of"]


def call_key_of(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], grad: bool, partition: Any, dims: Sequence[DynamicDim]
) -> tuple | None:
    """What a call looks like before it is made; ``None`` where that cannot be compared.

    How tensors share memory is part of it: what is written through one of them is read through the other.
    """
    strategy = _strategy_key(partition)
    tensors, real_tensors = module_tensors(module)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    memory: dict[int, int] = {}
    places = []
    for tensor in (*real_tensors, *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))):
        storage = memory.setdefault(storage_id(tensor), len(memory))
        places.append((storage, tensor.storage_offset(), tensor.device, tensor.is_neg()))
    keys = [_tensor_key(leaf) if isinstance(leaf, torch.Tensor) else constant_key(leaf) for leaf in leaves]
    if strategy is None or None in keys:
        return None
    classes = tuple((path, type(child)) for path, child in module.named_modules(remove_duplicate=False))
    modes = (grad, torch.get_default_dtype(), current_device(), autocast_setting(), cuda_autocast_setting())
    settings = tuple(map(str, read_settings()))  # which kernels composite operators are made of
    measured = _measured() if any(issubclass(kind, nn.RNNBase) for _, kind in classes) else ()
    return classes, tuple(tensors), tuple(places), tuple(keys), spec, modes, strategy, tuple(dims), settings, measured


def _measured() -> tuple:
    """What the choice between the forms of a recurrent layer depends on beside its shape."""
    host = backend_for(None)
    settings = torch.backends.mkldnn.enabled, torch.are_deterministic_algorithms_enabled()
    return host.threads(), str(host.machine()), *settings


def _tensor_key(tensor: torch.Tensor) -> tuple:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def _strategy_key(partition: Any) -> tuple | None:
    """A strategy by name or by value; ``None`` for an object that is not known to stay as it is."""
    if isinstance(partition, str):
        return (partition,)
    if not (is_dataclass(partition) and partition.__dataclass_params__.frozen):
        return None
    values = tuple(constant_key(getattr(partition, field.name)) for field in fields(partition))
    return None if None in values else (type(partition), values)
