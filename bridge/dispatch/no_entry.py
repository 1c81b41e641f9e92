"""No entry: a call of a module of which nothing has been compiled → the guard failure that tells its kind of call.

A first call that cannot be compiled (evaluation with a cache, say) says nothing about one of another kind. Sizes and
numbers are no part of the kind: they would be another one at every call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bridge.base.errors import INTERPRETER, GuardFailure
from bridge.base.pytrees import leaf_names
from bridge.base.torch_internals import pytree
from bridge.dispatch.guards import active_modes

__all__ = ["NO_ENTRY", "no_entry"]

NO_ENTRY = "no entry"
_STAGE = INTERPRETER - 1  # farther away than any entry is
_FLAGS = (bool, str, type(None))


def no_entry(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> GuardFailure:
    """The failure of a call where there is no entry, as in ``"no entry: training, grad mode, args[0] a Tensor"``."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    mode = "training" if module.training else "evaluation"
    kinds = [mode, *["grad mode"] * torch.is_grad_enabled(), *active_modes()]
    for name, leaf in zip(leaf_names(spec), leaves, strict=True):
        kinds.append(f"{name} {leaf!r}" if isinstance(leaf, _FLAGS) else f"{name} a {type(leaf).__name__}")
    return GuardFailure(_STAGE, NO_ENTRY, ", ".join(kinds))
