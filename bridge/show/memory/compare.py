"""Saved bytes of a lowered call beside those of its extremes, of eager and of torch's own min-cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from bridge.lowering import LoweredCall
from bridge.show.memory.measure import eager_saved_bytes, kept_bytes, plan_with
from bridge.show.memory.torch_min_cut import torch_min_cut_or_reason

__all__ = ["SavedBytes", "saved_bytes"]


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
