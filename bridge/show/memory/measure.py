"""Saved bytes of one forward: eager's by ``saved_tensors_hooks``, a plan's by its captures, counted alike.

What counts: distinct storages that are saved for the backward, dropout masks included. What does not, because it is
alive anyway: parameters, buffers, arguments, and what the module returns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bridge.base.generators import gpus_in_use
from bridge.base.torch_internals import pytree
from bridge.lowering import LoweredCall, partition_options
from partition import Plan, Strategy, partition

__all__ = ["eager_saved_bytes", "kept_bytes", "plan_with", "saved_for_backward"]


_STATE_BYTES = 16
"""Of a seed and an offset."""


def plan_with(lowered: LoweredCall, strategy: str | Strategy) -> Plan:
    """The plan that another strategy makes for the same joint function."""
    joint = lowered["cleaned"].function
    return partition(joint, strategy=strategy, **partition_options(lowered, strategy)).plan


def kept_bytes(lowered: LoweredCall, plan: Plan | None = None, computed: Collection[int] = ()) -> int:
    """Bytes of captures and of draws (masks) under a plan: what a dispatched call keeps and would not have otherwise.

    ``plan`` is of the lowered function; by default its own. ``computed``: places among its parameters of masks that
    kernels compute, from a seed and an offset that are kept instead.
    """
    given = len(lowered.captured.module_tensors) + len(lowered.captured.arguments)
    plan = plan or lowered.plan
    primals = zip(plan.saved_primals, plan.free, strict=False)  # free lists the primals first, then the outputs
    return plan.bytes + sum(
        _STATE_BYTES if index in computed else saved.bytes for index, saved in primals if index >= given
    )


def eager_saved_bytes(module: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> int:
    """Bytes that eager autograd saves for ``module(*args, **kwargs)``, measured on a copy of the module.

    The copy is a plain module: a dispatched one is measured as if it were not. The generator is put back.
    """
    module, kwargs = copy.deepcopy(module), kwargs or {}
    with torch.enable_grad(), torch.random.fork_rng(devices=gpus_in_use()):
        return saved_for_backward(module, lambda: module(*args, **kwargs), (args, kwargs), outputs_free=True)


def saved_for_backward(
    module: nn.Module, forward: Callable[[], object], arguments: object = (), *, outputs_free: bool = False
) -> int:
    """Bytes of the distinct storages that autograd saves during ``forward()``.

    Storages of parameters, buffers and ``arguments`` are free: they are alive anyway; with ``outputs_free`` also those
    of what ``forward()`` returns. The measure is ``torch.autograd.graph.saved_tensors_hooks``, so what escapes autograd
    is not counted. Each storage counts in full, also if only a view of it is saved: in full is how it stays alive.
    """
    free = _storages([*module.parameters(), *module.buffers(), *pytree.tree_leaves(arguments)])
    # Held until the end: a storage freed in between could lend its address to another one.
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in free:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results = forward()
    returned = _storages(pytree.tree_leaves(results)) if outputs_free else set()
    return sum(storage.nbytes() for address, storage in storages.items() if address not in returned)


def _storages(values: Iterable[Any]) -> set[int]:
    return {value.untyped_storage().data_ptr() for value in values if isinstance(value, Tensor)}
