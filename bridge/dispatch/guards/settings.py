"""Conditions on torch's settings for CUDA: how its kernels round, and which of them it takes; of entries on a GPU.

Library calls follow the settings when they run, as eager does; what was chosen when the graph was traced does not.
"""

from __future__ import annotations

from itertools import product

import torch

from bridge.base.errors import INTERPRETER, GuardFailure
from bridge.base.torch_cuda import SETTINGS, meaning_the_same, read_settings, settle_attention_order
from bridge.dispatch.guards.check import CheckSource
from bridge.dispatch.guards.condition import differs

__all__ = ["SettingsGuard"]


class SettingsGuard:
    """The conditions of one entry on the settings: they mean the same as those of now, on a device."""

    def __init__(self, device: torch.device) -> None:
        settle_attention_order(device)  # or an entry would miss from the first attention on, whoever calls it
        self._accepted = [meaning_the_same(value) for value in read_settings()]
        self._states = tuple(product(*self._accepted))

    def write(self, source: CheckSource) -> None:
        """Writes the conditions."""
        reads = [f"    {source.name(read, name)}()," for name, read in SETTINGS.items()]
        source.add("settings = (", *reads, ")")
        source.refuse(f"settings not in {source.name(self._states, 'accepted settings')}")

    def failure(self) -> GuardFailure | None:
        """The first setting that is not as it was; ``None`` if all are."""
        for name, value, accepted in zip(SETTINGS, read_settings(), self._accepted, strict=True):
            if value not in accepted:
                return differs(INTERPRETER, name, accepted[0], value)
        return None
