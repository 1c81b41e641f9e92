"""Lightning's ``Trainer`` → the layers of its module dispatched at the first batch: a ``Callback``."""

from __future__ import annotations

import importlib
import importlib.util
import sys

from bridge.callbacks.first_call import LightningMethods

__all__ = ["LightningDispatch"]

#: Two packages of one library, each with its own ``Callback`` class.
_NAMES = ("lightning.pytorch", "pytorch_lightning")


def _callback() -> type:
    """The ``Callback`` of the package that is imported already, or else of the installed one."""
    name = next((name for name in _NAMES if name in sys.modules), None)
    if name is None:
        name = next((name for name in _NAMES if importlib.util.find_spec(name.partition(".")[0])), _NAMES[0])
    return importlib.import_module(name).Callback


class LightningDispatch(LightningMethods, _callback()):  # type: ignore[misc]
    """``Trainer(callbacks=[LightningDispatch()])`` dispatches the module's repeated blocks at the first batch.

    Without repeated blocks, or with ``layers="whole"``, it dispatches the module's children with parameters. See
    :class:`bridge.callbacks.DispatchAtFirstCall` for arguments and attributes. At the end of the training it logs a
    line with hits and misses (``BRIDGE_LOGS=dispatch`` shows it).

    Example:
        >>> callback = LightningDispatch("Block")
        >>> lightning.Trainer(accelerator="cpu", callbacks=[callback]).fit(module, data)
        >>> callback.report()
        '2 x Block dispatched to TVM: 38 hits, 0 misses'
    """
