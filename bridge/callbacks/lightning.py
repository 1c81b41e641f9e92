"""Lightning's ``Trainer`` → the layers of its module dispatched at the first batch: a ``Callback``."""

from __future__ import annotations

import importlib
import importlib.util
import sys

from bridge.callbacks.first_call import LightningMethods

__all__ = ["LightningDispatch"]

#: Two names of one library, whose trainers each know their own callbacks.
_NAMES = ("lightning.pytorch", "pytorch_lightning")


def _callback() -> type:
    """The ``Callback`` of the library that is imported already, or of the one that can be."""
    name = next((name for name in _NAMES if name in sys.modules), None)
    if name is None:
        name = next((name for name in _NAMES if importlib.util.find_spec(name.partition(".")[0])), _NAMES[0])
    return importlib.import_module(name).Callback


class LightningDispatch(LightningMethods, _callback()):  # type: ignore[misc]
    """``Trainer(callbacks=[LightningDispatch()])`` dispatches the module's repeated blocks at the first batch.

    Where it has none, or with ``layers="whole"``: the networks that it holds. Arguments and attributes are those of
    :class:`bridge.callbacks.DispatchAtFirstCall`; at the end of the training a line with hits and misses is logged
    (``BRIDGE_LOGS=dispatch`` shows it).

    Example:
        >>> callback = LightningDispatch("Block")
        >>> lightning.Trainer(accelerator="cpu", callbacks=[callback]).fit(module, data)
        >>> callback.report()
        '2 x Block dispatched to TVM: 38 hits, 0 misses'
    """
