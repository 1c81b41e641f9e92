"""Places of complex tensors among a call's inputs and results: programs know their parts alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bridge.base.tensor_properties import as_complex, as_parts
from bridge.lowering import LoweredCall

__all__ = ["ComplexPlaces", "complex_places"]


@dataclass(frozen=True)
class ComplexPlaces:
    """Where a call has complex tensors.

    Attributes:
        inputs: among module tensors and arguments.
        outputs: among the results that are computed.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def opened(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Inputs as a program takes them; autograd follows."""
        found = list(inputs)
        for place in self.inputs:
            found[place] = as_parts(found[place])
        return found

    def closed(self, computed: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Results as eager has them."""
        found = list(computed)
        for place in self.outputs:
            found[place] = as_complex(found[place])
        return found


def complex_places(lowered: LoweredCall) -> ComplexPlaces | None:
    """Those of a lowered call; ``None`` where there are none."""
    captured = lowered.captured
    given = [*captured.module_tensors, *captured.arguments]
    inputs = tuple(place for place, each in enumerate(given) if each.dtype.is_complex)
    complex_leaves = [
        leaf for leaf, output in enumerate(captured.outputs) if output.is_tensor and output.dtype.is_complex
    ]
    if not inputs and not complex_leaves:
        return None
    places = (lowered.imported.output_of[leaf] for leaf in complex_leaves)
    return ComplexPlaces(inputs, tuple(place for place in places if place is not None))
