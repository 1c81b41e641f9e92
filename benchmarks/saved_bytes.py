"""Saved bytes of a lowered call, compared with save-all, inputs-only, eager and AOTAutograd's min-cut partitioner.

Counted: distinct storages saved for the backward, dropout masks included; in eager by ``saved_tensors_hooks``, in a
plan by its saved tensors. Not counted, since they are alive anyway: parameters, buffers, arguments and results.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from bridge.base.generators import gpus_in_use
from bridge.base.torch_internals import find, pytree
from bridge.lowering import LoweredCall, partition_options
from bridge.show.report import kept_bytes
from partition import Plan, Strategy, partition


@functools.cache
def torch_partitioner() -> SimpleNamespace:
    """The parts of AOTAutograd's and Inductor's partition of a joint graph; their import takes a second.

    ``aot_module`` differentiates a module ahead of time, ``min_cut`` splits a joint graph, ``inductor_passes`` first
    clean it up in place; decompositions are tables, made when called.
    """
    return SimpleNamespace(
        aot_module=find("torch._functorch.aot_autograd.aot_module"),
        min_cut=find("torch._functorch.partitioners.min_cut_rematerialization_partition"),
        decompositions=find("torch._decomp.core_aten_decompositions"),
        inductor_decompositions=find("torch._inductor.decomposition.select_decomp_table"),
        inductor_passes=find("torch._inductor.fx_passes.joint_graph.joint_graph_passes"),
        inductor_config=find("torch._inductor.config"),
    )


def plan_with(lowered: LoweredCall, strategy: str | Strategy) -> Plan:
    """The plan of another strategy for the same joint function."""
    joint = lowered["cleaned"].function
    return partition(joint, strategy=strategy, **partition_options(lowered, strategy)).plan


def eager_saved_bytes(module: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> int:
    """Bytes that eager autograd saves for ``module(*args, **kwargs)``, measured on a copy of the module.

    The copy is a plain module even if ``module`` is dispatched. The generator is restored.
    """
    module, kwargs = copy.deepcopy(module), kwargs or {}
    with torch.enable_grad(), torch.random.fork_rng(devices=gpus_in_use()):
        return saved_for_backward(module, lambda: module(*args, **kwargs), (args, kwargs), outputs_free=True)


def saved_for_backward(
    module: nn.Module, forward: Callable[[], object], arguments: object = (), *, outputs_free: bool = False
) -> int:
    """Bytes of the distinct storages that autograd saves during ``forward()``.

    Storages of parameters, buffers and ``arguments`` are free, since they are alive anyway; with ``outputs_free`` also
    the storages of the results. Measured by ``torch.autograd.graph.saved_tensors_hooks``: only tensors that autograd
    saves count. A storage counts in full even if only a view is saved, since all of it stays alive.
    """
    free = _storages([*module.parameters(), *module.buffers(), *pytree.tree_leaves(arguments)])
    # Held until the end: the address of a freed storage could be reused.
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


#: Preparations of the joint graph before the cut: decompositions, and whether Inductor's passes run.
PREPARATIONS: dict[str, tuple[Callable[[], dict | None], bool]] = {
    "as traced": (lambda: None, False),
    "core ATen": (lambda: torch_partitioner().decompositions(), False),
    "Inductor": (lambda: torch_partitioner().inductor_decompositions(), True),
}

#: AOTAutograd's errors for modules that it cannot trace (it has no error class of its own).
_UNTRACEABLE = (RuntimeError, TypeError, ValueError, AssertionError, AttributeError, KeyError, NotImplementedError)


def torch_min_cut(module: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> tuple[int, str]:
    """The fewest bytes that AOTAutograd's ``min_cut_rematerialization_partition`` saves, and the preparation's name.

    Each preparation's forward graph runs once, uncompiled, on a copy of the module, and is measured as eager is.
    Inductor draws as eager does (``fallback_random``), so that masks are saved. The generator is restored.

    Raises:
        Exception: AOTAutograd's error for a module that it cannot trace.
    """
    found = {name: _measure(module, args, kwargs or {}, *how) for name, how in PREPARATIONS.items()}
    best = min(found, key=found.get)
    return found[best], best


def torch_min_cut_or_reason(
    module: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None
) -> tuple[int | None, str]:
    """:func:`torch_min_cut`, or ``None`` and the reason why AOTAutograd cannot trace the module."""
    try:
        return torch_min_cut(module, args, kwargs)
    except _UNTRACEABLE as error:
        line = (str(error).strip().splitlines() or [""])[0]
        return None, f"does not apply: {type(error).__name__}: {line}"


def _measure(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], table: Callable[[], dict | None], clean: bool
) -> int:
    """Bytes that torch's min-cut saves with one preparation: a decomposition table, and whether Inductor cleans."""
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
        strategy: the plan's strategy.
        plan: bytes under the plan.
        save_all: bytes if everything that the gradient reads is saved.
        inputs_only: bytes if only inputs are saved: random draws, which are never repeated.
        eager: bytes by ``torch.autograd.graph.saved_tensors_hooks``.
        torch_min_cut: bytes under AOTAutograd's min-cut; ``None`` if it does not apply.
        torch_note: the preparation of torch's graph, or the reason why its partitioner does not apply.
    """

    strategy: str
    plan: int
    save_all: int
    inputs_only: int
    eager: int
    torch_min_cut: int | None
    torch_note: str

    def table(self) -> str:
        """Text, a line per method: bytes, and their ratio to eager's."""
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
    """Compares the saved bytes of a call that was lowered with gradients. Runs copies of ``module``, not itself.

    Args:
        lowered: the lowered call, with any strategy.
        args, kwargs: its arguments. The random number generator is restored.

    Raises:
        ValueError: nothing requires grad, so nothing is saved.
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
