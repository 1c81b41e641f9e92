"""Inputs on the host beside a GPU's: integers (lengths, say) → copies on the device, which a program takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bridge.base.devices import HOST, may_be_on_host
from bridge.capture import Captured

__all__ = ["HostInputs", "host_inputs"]


class HostInputs:
    """The places among a call's inputs whose tensors may lie on the host."""

    def __init__(self, places: Sequence[int], device: torch.device):
        self._places, self._device = places, device

    def moved(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The inputs as a program takes them; the same list where all are on the device."""
        found = inputs
        for place in self._places:
            if inputs[place].device != self._device:
                found = list(inputs) if found is inputs else found
                found[place] = inputs[place].to(self._device)
        return found


def host_inputs(captured: Captured) -> HostInputs | None:
    """Those of a captured call; ``None`` where there are none."""
    first = len(captured.module_tensors)
    places = [first + index for index, each in enumerate(captured.arguments) if may_be_on_host(each)]
    return HostInputs(places, captured.device) if places and captured.device != HOST else None
