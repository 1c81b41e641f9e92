"""Recurrent layers → one step of a loop between marks: one direction of one layer over a sequence, on a GPU.

The input's part of all gates, the weights' gradients and the kernels of a step are then those of any loop, see
:mod:`autodiff.scan`. Gates lie in torch's order, and the arithmetic is eager's up to the order of sums. In half types
products and outputs are rounded, and all that is between them, and an LSTM's cell, is in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tvm import relax

from autodiff.ir import Expr, dtype, shape
from bridge.capture import TensorForm

__all__ = ["looped_layer"]

op = relax.op

States = Sequence[Expr]


def looped_layer(
    importer: Any,
    cell: str,
    reverse: bool,
    x: Expr,
    weights: Sequence[Expr],
    biases: bool,
    states: States,
    active: Expr | None = None,
) -> list[Expr]:
    """Outputs [steps, batch, hidden] and the last states [batch, hidden].

    Args:
        cell: the name of torch's operator, as in ``"gru"``.
        x: [steps, batch, inputs].
        weights: of the input, of the hidden state, a bias for each with ``biases``, and a projection if there is one.
        active: [steps, batch, 1], which sequences a step belongs to; ``None``: all. The others keep their states, have
            outputs of zero, and no part in the step: what is in their states meets no weight.
    """
    steps, *of_step = shape(x)
    emit = importer.emit
    loop = -1 - len(importer.bindings)  # captured loops count from 0

    def mark(kind: str, value: Expr, *numbers: int, extents: Sequence[int]) -> Expr:
        form = TensorForm(tuple(extents), getattr(torch, dtype(value)))
        return importer.library(f"loop_{kind}", [value, loop, *numbers], form)

    rounded, exact = dtype(x), "float32" if dtype(x) in ("float16", "bfloat16") else dtype(x)
    states = [states[0], *(importer.cast(state, exact) for state in states[1:])]
    before = [
        mark("first", state, place, steps, int(reverse), extents=shape(state)) for place, state in enumerate(states)
    ]
    part = mark("part", x, 0, extents=of_step)
    of_input, of_hidden, *rest = weights
    bias, projection = (rest[:2] if biases else []), rest[2 if biases else 0 :]

    def gates(value: Expr, weight: Expr, place: int) -> Expr:
        product = importer.cast(emit(op.matmul(value, emit(op.permute_dims(weight)))), exact)
        return emit(op.add(product, importer.cast(bias[place], exact))) if biases else product

    used, here = before, None
    if active is not None:
        here = mark("part", active, 1, extents=shape(active)[1:])
        used = [_where(importer, here, each, None) for each in before]
    wide = [importer.cast(state, exact) for state in used]
    after = _CELLS[cell](importer, gates(part, of_input, 0), gates(used[0], of_hidden, 1), wide)
    after[0] = importer.cast(after[0], rounded)
    if projection:
        after[0] = emit(op.matmul(after[0], emit(op.permute_dims(projection[0]))))
    y = after[0]
    if here is not None:
        y = _where(importer, here, y, None)
        after = [_where(importer, here, *each) for each in zip(after, before, strict=True)]
    last = [mark("last", state, place, extents=shape(state)) for place, state in enumerate(after)]
    last = [importer.cast(state, rounded) for state in last]
    return [mark("steps", y, 0, steps, extents=(steps, *shape(y))), *last]


def _where(importer: Any, condition: Expr, value: Expr, other: Expr | None) -> Expr:
    """``value`` or ``other``, zeros by default."""
    other = importer.emit(op.zeros(shape(value), dtype(value))) if other is None else other
    return importer.emit(op.where(condition, value, other))


def _lstm(importer: Any, of_input: Expr, of_hidden: Expr, before: States) -> list[Expr]:
    emit = importer.emit
    enter, forget, new, leave = _split(importer, emit(op.add(of_input, of_hidden)), 4)
    kept = emit(op.multiply(emit(op.sigmoid(forget)), before[1]))
    inner = emit(op.add(kept, emit(op.multiply(emit(op.sigmoid(enter)), emit(op.tanh(new))))))
    return [emit(op.multiply(emit(op.sigmoid(leave)), emit(op.tanh(inner)))), inner]


def _gru(importer: Any, of_input: Expr, of_hidden: Expr, before: States) -> list[Expr]:
    emit = importer.emit
    (reset, keep, new), (of_reset, of_keep, of_new) = (_split(importer, each, 3) for each in (of_input, of_hidden))
    reset, keep = (emit(op.sigmoid(emit(op.add(*pair)))) for pair in ((reset, of_reset), (keep, of_keep)))
    new = emit(op.tanh(emit(op.add(new, emit(op.multiply(reset, of_new))))))
    return [emit(op.add(new, emit(op.multiply(keep, emit(op.subtract(before[0], new))))))]


def _plain(activate: Callable[[Expr], Expr]) -> Callable[..., list[Expr]]:
    def step(importer: Any, of_input: Expr, of_hidden: Expr, before: States) -> list[Expr]:
        return [importer.emit(activate(importer.emit(op.add(of_input, of_hidden))))]

    return step


_CELLS = {"lstm": _lstm, "gru": _gru, "rnn_tanh": _plain(op.tanh), "rnn_relu": _plain(op.nn.relu)}


def _split(importer: Any, gates: Expr, count: int) -> list[Expr]:
    size = shape(gates)[1] // count
    return [importer.slice(gates, [1], [index * size], [(index + 1) * size]) for index in range(count)]
