"""What Lightning's loop calls of a callback → the module's layers dispatched at the first batch; needs no Lightning."""

from __future__ import annotations

from typing import Any

from torch import nn

from bridge.callbacks.choose import chosen_layers
from bridge.callbacks.first_call import DispatchAtFirstCall

__all__ = ["LightningMethods"]


class LightningMethods(DispatchAtFirstCall):
    """The hooks of ``lightning.pytorch.Callback`` that the dispatch needs."""

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """After the sanity check of the validation, so that the first call is one of the training."""
        chosen = chosen_layers(pl_module, self.layers)
        if "" in chosen:  # Lightning calls the module's steps, which call what it holds
            held = dict(pl_module.named_children())
            chosen = {name: child for name, child in held.items() if any(True for _ in child.parameters())}
        self.watch(chosen)

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        self.end()
