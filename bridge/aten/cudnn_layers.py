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
from bridge.base.cudnn_layers import settings_of_layers
from bridge.base.devices import current_device
from bridge.base.torch_cuda import read_settings, recurrent_layers_are_tf32
from bridge.base.torch_internals import aten, unset_fake_temporarily
from bridge.capture import TensorForm

__all__ = ["CUDNN_TYPES", "cudnn_is_quicker", "cudnn_layers"]

op = relax.op

CUDNN_TYPES = ("float16", "float32", "float64")
"""Element types of layers that are cuDNN's in eager, too."""

_NARROW, _NARROW_RNN = 128, 256
"""Elements of a state up to which cuDNN keeps a float32 weight on the chip, and is quicker whatever else there is."""

_MANY_ROWS, _MANY_ELEMENTS = 64, 1 << 15
"""Rows, and elements of a state of all rows, up to which a loop's products, of parts of the weight, are quicker than
cuDNN's in TF32."""

_FEW_ROWS = 16
"""Rows up to which they are also where there are several layers or directions, which cuDNN runs side by side."""


def cudnn_is_quicker(cell: str, x: Expr, states: Sequence[Expr]) -> bool:
    """Whether cuDNN's kernels, recorded, take less time than recorded loops: a rule of what was measured (H200).

    Args:
        cell: the name of torch's operator, as in ``"gru"``.
        x: [steps, batch, inputs].
        states: [layers * directions, batch, hidden] each.
    """
    cells, batch, size = shape(states[0])
    if dtype(x) != "float32":
        return dtype(x) == "float16" and batch <= _MANY_ROWS
    if size <= (_NARROW_RNN if cell.startswith("rnn") else _NARROW):
        return True
    many = batch > _MANY_ROWS or batch * size > _MANY_ELEMENTS or (cells > 1 and batch > _FEW_ROWS)
    return many and recurrent_layers_are_tf32()


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
    extents = tuple(tuple(shape(each)) for each in (x, *weights, *states))
    kind = getattr(torch, dtype(x))
    workspace = _workspace(options, extents, kind, current_device(), str(read_settings()))
    results = [
        TensorForm((*shape(x)[:2], size * (2 if both_ways else 1)), kind),
        *(TensorForm((rows, batch, size), kind) for _ in states),
        TensorForm((workspace,), torch.uint8),
    ]
    made = importer.library("recurrent_layers", [options, len(states), x, *weights, *states], results)
    return [importer.item(made, index) for index in range(1 + len(states))]


@functools.lru_cache(maxsize=64)
def _workspace(
    options: str, extents: tuple[tuple[int, ...], ...], kind: torch.dtype, device: torch.device, settings: str
) -> int:
    """Bytes of cuDNN's workspace, which it alone knows; none where there is no cuDNN.

    Args:
        settings: what the choice among cuDNN's kernels depends on.
    """
    if device.type != "cuda":
        return 0
    read = json.loads(options)
    count, of_layer = 2 if read["cell"] == "lstm" else 1, 4 if read["biases"] else 2
    layers, both_ways = read["layers"], read["both_ways"]
    with torch.no_grad(), unset_fake_temporarily():
        x, *rest = (torch.zeros(each, dtype=kind, device=device) for each in extents)
        weights, (h, *c) = rest[:-count], rest[-count:]
        mode, size, *_ = told = settings_of_layers(read["cell"], h.shape[2], layers, both_ways)
        buffer = aten._cudnn_rnn_flatten_weight(weights, of_layer, x.shape[2], mode, size, 0, layers, False, both_ways)
        made = aten._cudnn_rnn(x, weights, of_layer, buffer, h, c[0] if c else None, *told)
    return made[3].numel()
