"""What torch's own min-cut partitioner (AOTAutograd's) saves for the backward of a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._decomp import core_aten_decompositions
from torch._functorch.aot_autograd import aot_module
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor_config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes

from benchmarks.saved import saved_for_backward

__all__ = ["PREPARATIONS", "torch_min_cut"]

#: How the joint graph is made before it is cut: its decompositions, and whether Inductor's passes clean it.
PREPARATIONS: dict[str, tuple[Callable[[], dict | None], bool]] = {
    "as traced": (lambda: None, False),
    "core ATen": (core_aten_decompositions, False),
    "Inductor": (select_decomp_table, True),
}


def torch_min_cut(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[int, str]:
    """The fewest bytes that ``min_cut_rematerialization_partition`` saves, and the preparation that led there.

    Each preparation's forward graph runs once, uncompiled, and is measured like everything else: distinct storages
    that autograd keeps, without parameters, arguments and what the module returns. Inductor draws as eager does
    (``fallback_random``), so that masks are saved; its own draws are other numbers than eager's.
    """
    found = {name: _measure(module, arguments, *preparation) for name, preparation in PREPARATIONS.items()}
    best = min(found, key=found.get)
    return found[best], best


def _measure(module: nn.Module, arguments: tuple, table: Callable[[], dict | None], clean: bool) -> int:
    def partition(joint: torch.fx.GraphModule, inputs: Any, **options: Any):
        if clean:
            joint_graph_passes(joint)
        return min_cut_rematerialization_partition(joint, inputs, **options)

    def keep(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        return graph

    with inductor_config.patch(fallback_random=True):
        cut = aot_module(module, keep, keep, partition_fn=partition, decompositions=table())
        return saved_for_backward(module, lambda: cut(*arguments), arguments, outputs_free=True)
