"""Callbacks that dispatch a model at the first batch, for HuggingFace's ``Trainer`` and for Lightning.

``TrainerDispatch`` and ``LightningDispatch`` import their library at the first access.
"""

from __future__ import annotations

import importlib
from typing import Any

from bridge.callbacks.first_call import DispatchAtFirstCall, chosen_layers

__all__ = ["DispatchAtFirstCall", "LightningDispatch", "TrainerDispatch", "chosen_layers"]

_HOMES = {"TrainerDispatch": "bridge.callbacks.trainer", "LightningDispatch": "bridge.callbacks.lightning"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
