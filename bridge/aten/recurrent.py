"""Recurrent layers → library functions, or a loop over the steps.

A call of a whole ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN`` is split into layers and directions. Each becomes a loop, with
one product and one launch a step; where the batch is dynamic, a library function, cells step by step. An LSTM on the
processor stays oneDNN's kernel, beside which loops gained nothing (``docs/numbers.md``). On a GPU a call stays whole
where cuDNN's kernels are quicker (:mod:`bridge.aten.conv`). Dropout between layers is already a separate operator
(:mod:`bridge.capture.passes.decompositions`).

A loop is one step between marks, for one direction of one layer. :mod:`autodiff.scan` hoists the input's product out
of the steps, sums the weights' gradients, and fuses the kernels of a step. Gates are in torch's order, and the
arithmetic is eager's up to the order of sums. In half types, products and outputs are rounded; the values between
them, and an LSTM's cell, are float32.

Marks of one step of a loop (``tvm_dispatch::loop_..``) → the library calls that :mod:`autodiff.scan.operator` reads.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tvm import relax

from autodiff.extents import Dim
from autodiff.ir import Expr, compute_type, dtype, shape
from bridge.aten.complex_arithmetic import COMPLEX
from bridge.aten.complex_value import of_parts, parts_of
from bridge.aten.conv import CUDNN_TYPES, cudnn_is_quicker, cudnn_layers
from bridge.aten.registry import UnsupportedUse, converts, has_extents, numbers_only
from bridge.base.devices import HOST, current_device
from bridge.base.torch_internals import aten
from bridge.capture import LOOP_MARKS, PACKED_LAYERS, RECURRENT_LAYERS, TensorMetadata

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
        active: [steps, batch, 1], the sequences that a step belongs to; ``None``: all. The other sequences keep their
            states and have outputs of zero; their states are multiplied by no weight, so nan does not spread.
    """
    steps, *of_step = shape(x)
    emit = importer.emit
    loop = -1 - len(importer.bindings)  # captured loops count from 0

    def mark(kind: str, value: Expr, *numbers: int, extents: Sequence[int]) -> Expr:
        form = TensorMetadata(tuple(extents), getattr(torch, dtype(value)))
        return importer.library(f"loop_{kind}", [value, loop, *numbers], form)

    rounded, exact = dtype(x), compute_type(dtype(x))
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
    """``value`` where the condition holds, else ``other`` (default: zeros)."""
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


_TENSORS = 7  # of oneDNN's operator: x, four weights and biases, two states
_HAS_BIASES = 5  # among the operator's options

_WIDE = 256
"""Elements of an LSTM's state from which on a length may be dynamic: a loop serves all lengths, and takes 0.7 to 1.4
of the time of oneDNN's kernel for one length; with 128 elements 1.1 to 1.3 (Xeons, two threads, 8 to 128 rows)."""


@converts(RECURRENT_LAYERS)
def whole_layers(importer, node, cell, x, states, weights, biases, layers, both_ways, batch_first):
    """Output and last states of all layers: ``[layers * directions, batch, hidden]``."""
    if any(dtype(tensor) != dtype(x) for tensor in (*states, *weights)):
        raise UnsupportedUse("a recurrent layer of several element types")
    projected = len(weights) // (layers * (2 if both_ways else 1)) % 2 == 1
    x = importer.emit(op.permute_dims(x, [1, 0, 2])) if batch_first else x
    steps, *of_step = shape(x)
    known, on_host = not has_extents([of_step, *map(shape, states)]), current_device() == HOST
    fused = cell == "lstm" and dtype(x) == "float32" and not projected and torch.backends.mkldnn.enabled and on_host
    varies = has_extents(steps)
    if varies and not (on_host and (not fused or (known and shape(weights[1])[1] >= _WIDE))):
        kind = "oneDNN's kernel" if on_host else "a loop"
        raise UnsupportedUse(f"a length that varies: {kind} is of one length, and quicker than steps one by one")
    of_cudnn = known and not on_host and not projected and dtype(x) in CUDNN_TYPES
    of_cudnn = of_cudnn and torch.backends.cudnn.enabled
    if of_cudnn and cudnn_is_quicker(cell, x, states):
        x, *last = cudnn_layers(importer, cell, x, states, weights, bool(biases), layers, bool(both_ways))
        return importer.emit(op.permute_dims(x, [1, 0, 2])) if batch_first else x, *last

    is_looped = known and (not fused or varies)

    def layer(x: Expr, own: Sequence[Expr], first: Sequence[Expr], reverse: bool) -> list[Expr]:
        if is_looped:
            return looped_layer(importer, cell, reverse, x, own, bool(biases), first)
        # only oneDNN knows the bytes of its workspace, for given sizes
        options = {"cell": cell, "reverse": reverse, "biases": bool(biases), "fused": fused and known}
        return _layer(importer, options, [x, *own, *first], len(states))

    x, *last = _through_layers(importer, layer, x, states, weights, layers, both_ways)
    x = importer.emit(op.permute_dims(x, [1, 0, 2])) if batch_first else x
    return x, *last


@converts(PACKED_LAYERS)
def packed(importer, node, cell, x, lengths, states, weights, biases, layers, both_ways):
    """Layers over sequences of several lengths: loops whose steps skip sequences that have ended."""
    numbers_only("a packed sequence", shape(x))
    steps, batch, _ = shape(x)
    positions = importer.reshape(importer.emit(op.arange(0, steps, 1, dtype(lengths))), (steps, 1, 1))
    active = importer.emit(op.greater(importer.reshape(lengths, (1, batch, 1)), positions))

    def layer(x: Expr, own: Sequence[Expr], first: Sequence[Expr], reverse: bool) -> list[Expr]:
        return looped_layer(importer, cell, reverse, x, own, bool(biases), first, active)

    x, *last = _through_layers(importer, layer, x, states, weights, layers, both_ways)
    return x, *last, *[None] * (2 - len(last))


def _through_layers(
    importer: Any,
    layer: Callable[[Expr, Sequence[Expr], Sequence[Expr], bool], list[Expr]],
    x: Expr,
    states: Sequence[Expr],
    weights: Sequence[Expr],
    layers: int,
    both_ways: bool,
) -> list[Expr]:
    """Outputs [steps, batch, hidden] of the last layer, and the last states of all layers.

    Args:
        layer: (inputs, weights, first states, whether reversed) → outputs and last states [batch, hidden] of one layer
            in one direction.
        states, weights: for all layers and directions.
    """
    directions = 2 if both_ways else 1
    count = len(weights) // (layers * directions)
    finals: list[list[Expr]] = [[] for _ in states]
    for start in range(0, layers * directions, directions):
        made = []
        for direction in range(directions):
            index = start + direction
            first = [_row(importer, state, index) for state in states]
            y, *last = layer(x, weights[index * count : (index + 1) * count], first, direction == 1)
            made.append(y)
            for group, state in zip(finals, last, strict=True):
                group.append(importer.reshape(state, (1, *shape(state))))
        x = made[0] if len(made) == 1 else importer.emit(op.concat(made, 2))
    return [x, *(group[0] if len(group) == 1 else importer.emit(op.concat(group, 0)) for group in finals)]


@converts(aten.mkldnn_rnn_layer.default)
def recurrent_layer(importer, node, *args):
    """oneDNN's operator for one layer in one direction; torch traces an LSTM in bfloat16 into it."""
    x, *weights, h, c = args[:_TENSORS]
    reverse, *_ = args[_TENSORS:]
    biases = bool(args[_TENSORS:][_HAS_BIASES])
    numbers_only("oneDNN's recurrent layer", shape(x))
    size = shape(h)[-1]
    states = [importer.reshape(state, (shape(x)[1], size)) for state in (h, c)]
    options = {"cell": "lstm", "reverse": bool(reverse), "biases": biases, "fused": True}
    y, *last = _layer(importer, options, [x, *(weights if biases else weights[:2]), *states], 2)
    if any(user.args[1] == 3 for user in node.users):
        raise UnsupportedUse("reads oneDNN's workspace, as a derivative inside forward does")
    return y, *(importer.reshape(each, shape(h)) for each in last), None


def _layer(importer: Any, options: dict[str, Any], tensors: list[Expr], states: int) -> list[Expr]:
    """Outputs and last states of one direction of one layer."""
    x = tensors[0]
    last = [_like(shape(state), dtype(x)) for state in tensors[-states:]]
    results = [_like((*shape(x)[:2], last[0].shape[1]), dtype(x)), *last, *_read_backwards(options, tensors)]
    made = importer.library("recurrent_layer", [json.dumps(options, sort_keys=True), states, *tensors], results)
    return [importer.item(made, index) for index in range(1 + states)]


def _read_backwards(options: dict[str, Any], tensors: list[Expr]) -> list[TensorMetadata]:
    """Metadata of the function's saved tensors: gates after their activation, cell states, or oneDNN's workspace."""
    x, weight, *_, state = tensors
    steps, batch, inputs = shape(x)
    if options["fused"]:
        return [_like((_workspace(steps, batch, inputs, shape(state)[1], options["biases"], dtype(x)),), "uint8")]
    gates = _like((steps, batch, shape(weight)[0]), dtype(x))
    inner = _like((steps, batch, shape(state)[1]), dtype(x))
    return [gates, inner] if options["cell"] in ("lstm", "gru") else []


@functools.lru_cache(maxsize=64)
def _workspace(steps: int, batch: int, inputs: int, size: int, biases: bool, element_type: str) -> int:
    """Bytes of oneDNN's workspace, by a trial call."""
    extents = [(steps, batch, inputs), (4 * size, inputs), (4 * size, size), (4 * size,), (4 * size,)]
    extents += [(batch, size), (batch, size)]
    tensors = [torch.zeros(each, dtype=getattr(torch, element_type)) for each in extents]
    with torch.enable_grad():
        return aten.mkldnn_rnn_layer(*tensors, False, [], 2, size, 1, biases, False, False, True)[3].numel()


def _like(extents: Sequence[Dim], element_type: str) -> TensorMetadata:
    return TensorMetadata(tuple(extents), getattr(torch, element_type))


def _row(importer: Any, state: Expr, index: int) -> Expr:
    rows, *rest = shape(state)
    if rows > 1:
        state = importer.slice(state, [0], [index], [index + 1])
    return importer.reshape(state, rest)


_MARKS = dict(zip(LOOP_MARKS, ("loop_first", "loop_part", "loop_last", "loop_steps"), strict=True))


@converts(*_MARKS, table=COMPLEX)
@converts(*_MARKS)
def mark(importer, node, value, *numbers):
    """The library call of a mark, two for a complex number; the sources of a first carry are dropped."""
    name = _MARKS[node.target]
    loop, place, *rest = numbers[1:] if name == "loop_first" else numbers
    if name == "loop_first":
        importer.draws.enter(loop, *rest)
    elif name != "loop_part":
        importer.draws.leave()
    return of_parts(
        importer.library(name, [part, loop, 2 * place + index, *rest], importer.out(node))
        for index, part in enumerate(parts_of(value))
    )
