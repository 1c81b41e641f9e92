"""``examine``: a module's call → its operations, supported and unsupported, without compiling."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from bridge.base.devices import default_device_of_forward
from bridge.base.errors import Unsupported, UnsupportedModule, note_sample
from bridge.base.threads import interrupts_deferred
from bridge.capture import after_pre_hooks, capture, dynamic_dims, in_attempts, normalize_sample
from bridge.guards import undo
from bridge.lowering import lower_captured
from bridge.state import SampleCall
from bridge.ways import Way, compare_ways, quickest

__all__ = ["Coverage", "examine"]


@dataclass(frozen=True)
class Coverage:
    """The result of :func:`examine`; ``print`` it.

    Attributes:
        module_name: class name of the module.
        operations: how often each distinct operation occurs in the traced graph; empty if there is no graph.
        unsupported: problems, each with the operation, the user's source line and a remedy.
        ways: with ``compare=True``, for a refused module: step times in parts and under Dynamo, relative to eager.
    """

    module_name: str
    operations: Counter[str]
    unsupported: tuple[Unsupported, ...]
    ways: tuple[Way, ...] = ()

    @property
    def supported(self) -> tuple[str, ...]:
        """The distinct supported operations, most frequent first."""
        unsupported = {problem.op for problem in self.unsupported}
        return tuple(op for op, _ in self.operations.most_common() if op not in unsupported)

    @property
    def percentage(self) -> float:
        """Share of supported operations among the distinct ones, in percent; 0 if no graph could be traced."""
        return 100 * len(self.supported) / len(self.operations) if self.operations else 0.0

    def __str__(self) -> str:
        if not self.operations:
            head = f"{self.module_name}: no graph could be captured"
        elif self.unsupported and self.percentage == 100:
            head = f"{self.module_name}: {len(self.operations)} operations, each of them supported; the whole is not"
        else:
            head = (
                f"{self.module_name}: {len(self.supported)} of {len(self.operations)} distinct operations supported "
                f"({self.percentage:.0f}%), {sum(self.operations.values())} operations in all"
            )
        if not self.unsupported:
            return head + "\nnothing stands in the way of add_tvm_dispatch"
        told = [head, "in the way:", *(f"  {problem}" for problem in self.unsupported)]
        if UnsupportedModule(self.module_name, self.unsupported).is_of_draws:
            told.append("add_tvm_dispatch dispatches the modules inside by themselves, if it can dispatch any")
        if self.ways:
            told += ["what can be dispatched of it:", *(f"  {way}" for way in self.ways), f"  {quickest(self.ways)}"]
        else:
            told.append("examine(..., compare=True) times what whole=False and torch.compile make of it")
        return "\n".join(told)

    __repr__ = __str__


@interrupts_deferred()
@default_device_of_forward()
def examine(
    module: nn.Module,
    sample_input: Any,
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    compare: bool = False,
) -> Coverage:
    """Implements :func:`bridge.examine`."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: wanted a torch.nn.Module, got {type(module).__name__}")
    sample = SampleCall(module, *normalize_sample(module, sample_input, sample_kwargs))
    with after_pre_hooks(sample) as given:
        call, name = replace(given, dims=dynamic_dims(given, dynamic_shapes)), sample.name
        operations: Counter[str] = Counter()

        def lowered() -> None:
            captured = capture(call)
            operations.clear()
            operations.update(
                str(node.target)
                for node in captured.graph.nodes
                if node.op == "call_function" and node.target is not operator.getitem
            )
            lower_captured(captured, grad=torch.is_grad_enabled())
            if captured.numbers.by_draws and not call.dims:
                raise UnsupportedModule(name, captured.decisions)

        try:
            with undo(module, always=True):
                in_attempts(lowered)
        except UnsupportedModule as error:
            refused = error.ops
        except Exception as error:
            note_sample(error)
            raise
        else:
            return Coverage(name, operations, ())
        return Coverage(name, operations, refused, compare_ways(call) if compare else ())
