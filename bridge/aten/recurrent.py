"""Recurrent layers by oneDNN (an LSTM under autocast) → a library function."""

from __future__ import annotations

import json

from bridge.aten.registry import converts
from bridge.base.torch_internals import aten

__all__ = ["recurrent_layer"]

_TENSORS = 7  # x, four weights and biases, two states


@converts(aten.mkldnn_rnn_layer.default)
def recurrent_layer(importer, node, *args):
    """One layer in one direction; eager's result and rounding, so the kernel that eager calls."""
    *values, workspace = node.meta["val"]
    options = json.dumps(args[_TENSORS:])
    made = importer.library("recurrent_layer", [options, *args[:_TENSORS]], values)
    return *(importer.item(made, index) for index in range(len(values))), importer.filled(workspace, 0)
