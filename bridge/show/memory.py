"""Saved bytes of a lowered call beside those of its extremes, of eager and of torch's own min-cut.

Saved bytes of one forward: eager's by ``saved_tensors_hooks``, a plan's by its captures, counted alike.

What counts: distinct storages that are saved for the backward, dropout masks included. What does not, because it is
alive anyway: parameters, buffers, arguments, and what the module returns.

What torch's own min-cut partitioner (AOTAutograd's) saves for the backward of a module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bridge.base.generators import gpus_in_use
from bridge.base.torch_internals import pytree, torch_partitioner
from bridge.lowering import LoweredCall, partition_options
from partition import Plan, Strategy, partition

__all__ = ["PREPARATIONS", "SavedBytes", "eager_saved_bytes", "kept_bytes", "plan_with", "saved_bytes"]
__all__ += ["saved_for_backward", "torch_min_cut", "torch_min_cut_or_reason"]

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


#: How the joint graph is made before it is cut: its decompositions, and whether Inductor's passes clean it.
PREPARATIONS: dict[str, tuple[Callable[[], dict | None], bool]] = {
    "as traced": (lambda: None, False),
    "core ATen": (lambda: torch_partitioner().decompositions(), False),
    "Inductor": (lambda: torch_partitioner().inductor_decompositions(), True),
}

#: What AOTAutograd raises for modules that it cannot trace (it has no error class of its own).
_UNTRACEABLE = (RuntimeError, TypeError, ValueError, AssertionError, AttributeError, KeyError, NotImplementedError)


def torch_min_cut(module: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> tuple[int, str]:
    """The fewest bytes that ``min_cut_rematerialization_partition`` saves, and the preparation that led there.

    Each preparation's forward graph runs once, uncompiled, on a copy of the module, and is measured as eager is:
    distinct storages that autograd keeps, without parameters, arguments and what the module returns. Inductor draws as
    eager does (``fallback_random``), so that masks are saved; its own draws are other numbers than eager's. The
    generator is put back.

    Raises:
        Exception: what AOTAutograd raises for a module that it cannot trace.
    """
    found = {name: _measure(module, args, kwargs or {}, *how) for name, how in PREPARATIONS.items()}
    best = min(found, key=found.get)
    return found[best], best


def torch_min_cut_or_reason(
    module: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None
) -> tuple[int | None, str]:
    """:func:`torch_min_cut`, or ``None`` and why it does not apply: AOTAutograd cannot trace this module."""
    try:
        return torch_min_cut(module, args, kwargs)
    except _UNTRACEABLE as error:
        line = (str(error).strip().splitlines() or [""])[0]
        return None, f"does not apply: {type(error).__name__}: {line}"


def _measure(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], table: Callable[[], dict | None], clean: bool
) -> int:
    module, torchs = copy.deepcopy(module), torch_partitioner()

    def partition(joint: torch.fx.GraphModule, inputs: Any, **options: Any):
        if clean:
            torchs.inductor_passes(joint)
        return torchs.min_cut(joint, inputs, **options)

    def keep(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        return graph

    with (
        torchs.inductor_config.patch(fallback_random=True),
        torch.enable_grad(),
        torch.random.fork_rng(devices=gpus_in_use()),
    ):
        cut = torchs.aot_module(module, keep, keep, partition_fn=partition, decompositions=table())
        return saved_for_backward(module, lambda: cut(*args, **kwargs), (args, kwargs), outputs_free=True)


@dataclass(frozen=True)
class SavedBytes:
    """Bytes saved for the backward of one call of one module.

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


def saved_bytes(
    lowered: LoweredCall, module: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None
) -> SavedBytes:
    """The comparison for a module that was lowered with gradients. Runs copies of ``module``; it is not changed.

    Args:
        lowered: of this call, with any strategy.
        args, kwargs: the call. The random number generator is put back after it.

    Raises:
        ValueError: nothing of the lowered call requires grad, so that nothing is saved.
    """
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
