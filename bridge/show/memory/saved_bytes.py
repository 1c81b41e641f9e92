"""How many bytes a forward keeps for its backward: eager, a plan, its extremes and torch's own min-cut, counted alike.

What counts: distinct storages that are kept for the backward, dropout masks included. What does not, because it is
alive anyway: parameters, buffers, arguments, and what the module returns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bridge.base.torch_internals import pytree
from bridge.lowering.lowered import Lowered
from partition import Plan, Strategy, partition

__all__ = ["SavedBytes", "eager_saved_bytes", "kept_bytes", "plan_with", "saved_bytes", "saved_for_backward"]


@dataclass(frozen=True)
class SavedBytes:
    """Bytes kept for the backward of one call of one module.

    Attributes:
        strategy: what made the plan.
        plan: bytes under the plan.
        save_all: everything that the gradient reads.
        inputs_only: nothing but the inputs: random draws, which are never made again.
        eager: as ``torch.autograd.graph.saved_tensors_hooks`` sees them.
        torch_min_cut: under AOTAutograd's ``min_cut_rematerialization_partition``; ``None`` where it does not apply.
        torch_note: how torch's graph was prepared, or why its partitioner does not apply.
    """

    strategy: str
    plan: int
    save_all: int
    inputs_only: int
    eager: int
    torch_min_cut: int | None
    torch_note: str

    def table(self) -> str:
        """Text, a line per way: bytes and their share of eager's."""
        rows = [(self.strategy, self.plan), ("save_all", self.save_all), ("inputs only", self.inputs_only)]
        rows += [("eager", self.eager), (f"torch's min-cut ({self.torch_note})", self.torch_min_cut)]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {self._amount(count)}" for name, count in rows)

    def _amount(self, count: int | None) -> str:
        if count is None:
            return f"{'-':>15}"
        share = f"  {count / self.eager:.3f} of eager" if self.eager else ""
        return f"{count:>15,}{share}"

    __str__ = table


def saved_bytes(lowered: Lowered, module: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> SavedBytes:
    """The comparison for a module that was lowered with gradients. Runs copies of ``module``; it is not changed.

    Args:
        lowered: of this call, with any strategy.
        args, kwargs: the call. The random number generator is put back after it.

    Raises:
        ValueError: nothing of the lowered call requires grad, so that nothing is saved.
    """
    from bridge.show.memory.torch_min_cut import torch_min_cut_or_reason  # takes a second to import: Inductor

    if lowered.plan is None:
        raise ValueError(
            f"{lowered.captured.module_name}: nothing requires grad, so nothing is saved; lower it in train mode, with"
            " gradients enabled"
        )
    kwargs = kwargs or {}
    theirs, note = torch_min_cut_or_reason(module, args, kwargs)
    return SavedBytes(
        strategy=lowered.plan.strategy,
        plan=kept_bytes(lowered),
        save_all=kept_bytes(lowered, plan_with(lowered, "save_all")),
        inputs_only=kept_bytes(lowered, plan_with(lowered, "recompute_all")),
        eager=eager_saved_bytes(module, args, kwargs),
        torch_min_cut=theirs,
        torch_note=note,
    )


def plan_with(lowered: Lowered, strategy: str | Strategy) -> Plan:
    """The plan that another strategy makes for the same joint function."""
    joint = lowered["cleaned"].function
    return partition(joint, num_primals=lowered.num_primals, num_outputs=lowered.num_results, strategy=strategy).plan


def kept_bytes(lowered: Lowered, plan: Plan | None = None) -> int:
    """Bytes of captures and of draws (masks) under a plan: what a dispatched call keeps and would not have otherwise.

    ``plan`` is of the lowered function; by default its own.
    """
    given = len(lowered.captured.module_tensors) + len(lowered.captured.arguments)
    plan = plan or lowered.plan
    primals = zip(plan.saved_primals, plan.free, strict=False)  # free lists the primals first, then the outputs
    return plan.bytes + sum(saved.bytes for index, saved in primals if index >= given)


def eager_saved_bytes(module: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> int:
    """Bytes that eager autograd saves for ``module(*args, **kwargs)``, measured on a copy of the module.

    The copy is a plain module: a dispatched one is measured as if it were not. The generator is put back.
    """
    module, kwargs = copy.deepcopy(module), kwargs or {}
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        return saved_for_backward(module, lambda: module(*args, **kwargs), (args, kwargs), outputs_free=True)


def saved_for_backward(
    module: nn.Module, forward: Callable[[], object], arguments: object = (), *, outputs_free: bool = False
) -> int:
    """Bytes of the distinct storages that autograd saves during ``forward()``.

    Storages of parameters, buffers and ``arguments`` are free: they are alive anyway; with ``outputs_free`` also those
    of what ``forward()`` returns. The measure is ``torch.autograd.graph.saved_tensors_hooks``, so what escapes autograd
    is not seen. Each storage counts in full, also if only a view of it is saved, because in full is how it stays alive.
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
        kept = forward()
    returned = _storages(pytree.tree_leaves(kept)) if outputs_free else set()
    return sum(storage.nbytes() for address, storage in storages.items() if address not in returned)


def _storages(values: Iterable[Any]) -> set[int]:
    return {value.untyped_storage().data_ptr() for value in values if isinstance(value, Tensor)}
