"""Recurrent layers on a GPU → cuDNN's kernels for all layers and directions at once, where loops take longer.

A loop launches a product and a kernel for each step of each layer, one after the other; cuDNN lets layers and
directions run side by side.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import torch
from tvm import relax

from autodiff.ir import Expr, dtype, shape
from bridge.base.devices import current_device
from bridge.base.torch_cuda import read_settings
from bridge.base.torch_internals import aten
from bridge.capture import TensorForm

__all__ = ["cudnn_is_quicker", "cudnn_layers"]

op = relax.op

_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}


def cudnn_is_quicker(cell: str, x: Expr, states: Sequence[Expr], layers: int, both_ways: bool) -> bool:
    """Whether cuDNN's kernels are known to take less time than loops.

    Args:
        cell: the name of torch's operator, as in ``"gru"``.
        x: [steps, batch, inputs].
        states: [layers * directions, batch, hidden] each.
    """
    return False


def cudnn_layers(
    importer: Any,
    cell: str,
    x: Expr,
    states: Sequence[Expr],
    weights: Sequence[Expr],
    biases: bool,
    layers: int,
    both_ways: bool,
) -> list[Expr]:
    """Outputs [steps, batch, directions * hidden] and the last states [layers * directions, batch, hidden]."""
    options = json.dumps({"cell": cell, "layers": layers, "both_ways": both_ways, "biases": biases}, sort_keys=True)
    rows, batch, size = shape(states[0])
    extents = (shape(x), *(shape(each) for each in (*weights, *states)))
    kind = getattr(torch, dtype(x))
    workspace, buffer = _buffers(options, tuple(map(tuple, extents)), kind, current_device(), str(read_settings()))
    results = [
        TensorForm((*shape(x)[:2], size * (2 if both_ways else 1)), kind),
        *(TensorForm((rows, batch, size), kind) for _ in states),
        TensorForm((workspace,), torch.uint8),
        TensorForm((buffer,), kind),
    ]
    made = importer.library("recurrent_layers", [options, len(states), x, *weights, *states], results)
    return [importer.item(made, index) for index in range(1 + len(states))]


@functools.lru_cache(maxsize=64)
def _buffers(
    options: str, extents: tuple[tuple[int, ...], ...], kind: torch.dtype, device: torch.device, settings: str
) -> tuple[int, int]:
    """Elements of cuDNN's workspace and of its weights, which it alone knows; none where there is no cuDNN."""
    if device.type != "cuda":
        return 0, 0
    read = json.loads(options)
    count = 2 if read["cell"] == "lstm" else 1
    x, *rest = (torch.zeros(each, dtype=kind, device=device) for each in extents)
    weights, (h, *c) = rest[:-count], rest[-count:]
    of_layer = 4 if read["biases"] else 2
    options = [_MODES[read["cell"]], h.shape[2], 0, read["layers"], False, 0.0, True, read["both_ways"], [], None]
    with torch.no_grad():
        *_, workspace, buffer = aten._cudnn_rnn(x, weights, of_layer, None, h, c[0] if c else None, *options)
    return workspace.numel(), buffer.numel()
