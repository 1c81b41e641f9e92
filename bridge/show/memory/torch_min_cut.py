"""What torch's own min-cut partitioner (AOTAutograd's) saves for the backward of a module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bridge.base.generators import gpus_in_use
from bridge.base.torch_internals import torch_partitioner
from bridge.show.memory.measure import saved_for_backward

__all__ = ["PREPARATIONS", "torch_min_cut", "torch_min_cut_or_reason"]

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
