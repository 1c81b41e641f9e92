"""Derived attributes: what old ``weight_norm``, ``spectral_norm`` and ``prune`` set on a module in every call.

Each registers a forward pre-hook that computes the plain attribute (``weight``) of parameters and buffers
(``weight_g``, ``weight_v``). The compiled code computes it from those, so its value before a call is no input and not
guarded; after a call it is computed once more, as the hook does, for whoever reads it or differentiates through it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

__all__ = ["derived_attribute", "derived_attributes", "renew_derived"]

_PRUNES = ("__call__", "apply_mask")


def derived_attribute(hook: Any) -> str | None:
    """The attribute that this forward pre-hook of torch's sets; ``None`` for any other hook."""
    kind = type(hook)
    if kind in (WeightNorm, SpectralNorm):
        return hook.name
    if isinstance(hook, BasePruningMethod) and all(getattr(kind, m) is getattr(BasePruningMethod, m) for m in _PRUNES):
        return hook._tensor_name
    return None


def derived_attributes(module: nn.Module) -> dict[str, Any]:
    """Name of each derived attribute of ``module`` → the hook that sets it, in the order in which they run."""
    hooks = module.__dict__.get("_forward_pre_hooks")
    return {name: hook for hook in hooks.values() if (name := derived_attribute(hook))} if hooks else {}


def renew_derived(module: nn.Module, hook: Any) -> None:
    """Sets what ``hook`` left on ``module`` in the call that is over: same value, same autograd graph.

    ``spectral_norm`` has moved its buffers in that call; they are not moved again. Like the hook, this computes with
    copies of them, because the next call moves them before somebody may differentiate.
    """
    if not isinstance(hook, SpectralNorm):
        hook(module, ())
        return
    weight, u, v = (getattr(module, f"{hook.name}_{part}") for part in ("orig", "u", "v"))
    if module.training:
        u, v = u.clone(), v.clone()
    sigma = torch.dot(u, torch.mv(hook.reshape_weight_to_matrix(weight), v))
    setattr(module, hook.name, weight / sigma)
