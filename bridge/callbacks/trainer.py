"""HuggingFace's ``Trainer`` → its model's layers dispatched at the first batch: a ``TrainerCallback``."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from bridge.callbacks.first_call import DispatchAtFirstCall, chosen_layers

__all__ = ["TrainerDispatch"]


class TrainerDispatch(DispatchAtFirstCall, TrainerCallback):
    """``Trainer(..., callbacks=[TrainerDispatch()])`` dispatches the model's repeated blocks at the first batch.

    It searches the model inside a wrapper (DDP), not the wrapper. See :class:`DispatchAtFirstCall` for arguments and
    attributes. At the end of the training it logs a line with hits and misses (``BRIDGE_LOGS=dispatch`` shows it).

    Example:
        >>> callback = TrainerDispatch("BertLayer")
        >>> Trainer(model=model, args=arguments, train_dataset=data, callbacks=[callback]).train()
        >>> callback.report()
        '2 x BertLayer dispatched to TVM: 118 hits, 0 misses'
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.watch(chosen_layers(kwargs["model"], self.layers))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end()
