"""Packed sequences: ``pack_padded_sequence``, recurrent layers, ``pad_packed_sequence`` → operators on a padded batch.

In eager a packed batch has as many rows as the sum of its lengths. Here it stays padded, with steps first and zeros
after the end of each sequence. So the lengths are data, and only the greatest one is a number that forward reads. A
layer keeps a sequence's state after its end (:data:`PACKED_LAYERS`). Only recurrent layers and
``pad_packed_sequence`` may use packed rows: other functions would see other rows than in eager.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch.nn.utils.rnn import pack_padded_sequence

from bridge.base.devices import HOST, current_device
from bridge.base.errors import Unsupported, UnsupportedModule, line_of_forward
from bridge.base.modes import ambient_autocast
from bridge.base.torch_internals import VF, TensorBase, aten, no_torch_function, pack_padded, pad_packed, pytree
from bridge.base.torch_recording import own_operator

_CELLS = {VF.lstm: "lstm", VF.gru: "gru", VF.rnn_tanh: "rnn_tanh", VF.rnn_relu: "rnn_relu"}
_ZEROS = VF.zeros
_WIDE = ({torch.float32}, {torch.float64})
_OWN = os.path.dirname(__file__)
_ASKED = {each.__get__ for each in (torch.Tensor.dtype, torch.Tensor.device, torch.Tensor.requires_grad)}
_ASKED.add(TensorBase.dim)
"""Attributes of packed rows that forward may read, beside their last extent."""


def _caller() -> FrameType:
    """The innermost frame outside of this package."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    return frame


_REFUSED = (
    "its shapes are the numbers in the lengths; pack_padded_sequence, recurrent layers in float32 or float64, without "
    "dropout between them, without projections, and pad_packed_sequence alone keep it padded",
    "run the recurrent layer on the padded batch and mask its results, or dispatch the other layers: whole=False",
)


def _refused(use: str, where: str | None = None) -> UnsupportedModule:
    """The refusal of a use of a packed sequence that depends on its rows, or draws for them."""
    return UnsupportedModule("", [Unsupported(use, where or line_of_forward(), *_REFUSED)])


@dataclass(frozen=True)
class _Packed:
    """A packed batch: padded ``rows`` [steps * batch, ...], ``lengths`` [batch], ``sizes`` (``batch_sizes``) [steps],
    and ``active`` [steps, batch], which is true up to the end of each sequence."""

    rows: torch.Tensor
    lengths: torch.Tensor
    sizes: torch.Tensor
    active: torch.Tensor

    @property
    def padded(self) -> torch.Tensor:
        """The rows as [steps, batch, ...]."""
        return self.rows.unflatten(0, self.active.shape)

    def where(self, x: torch.Tensor, padding: float) -> torch.Tensor:
        """``x`` [steps, batch, ...] with ``padding`` after the sequences' ends."""
        active = self.active.reshape(*self.active.shape, *[1] * (x.dim() - 2))
        return VF.where(active, x, x.new_full((), padding))


class PackedSequences:
    """The packed sequences of a run, kept padded; ``count``: see :attr:`bridge.capture.functions.Functions.count`."""

    def __init__(self, count: Callable[[str, torch.Tensor], int]):
        self._count = count
        self._packed: dict[int, _Packed] = {}  # by the id of their rows
        self._sizes: dict[int, _Packed] = {}  # by the id of their batch sizes
        self._batch: dict[int, tuple[torch.Tensor, int]] = {}  # first sizes, tensors and numbers

    def called(self, call: Callable[..., Any], func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Calls a torch function in its padded form, or by ``call(func, args, kwargs)`` → its result."""
        if func == pack_padded:
            return self._pack(*args, **kwargs)
        if func is VF.sort and current_device() != HOST and _caller().f_code is pack_padded_sequence.__code__:
            kwargs = {**kwargs, "stable": True}  # any order of equal lengths is right; this one is the same everywhere
        if not self._packed:
            return call(func, args, kwargs)
        if func in _CELLS and id(args[0]) in self._packed:
            return self._layers(_CELLS[func], *args, **kwargs)
        if func == pad_packed and id(args[0]) in self._packed:
            return self._pad(*args, **kwargs)
        if func is _ZEROS:  # the first states of a layer, one for each row of the first step
            args = pytree.tree_map(lambda leaf: self._batch.get(id(leaf), (None, leaf))[1], args)
        elif not (func in _ASKED or (func == TensorBase.size and args[1:] == (-1,))):
            self.refuse((args, kwargs))
        made = call(func, args, kwargs)
        if func == TensorBase.__getitem__ and id(args[0]) in self._sizes and type(args[1]) is int and not args[1]:
            self._batch[id(made)] = made, self._sizes[id(args[0])].lengths.shape[0]
        return made

    def refuse(self, values: Any, where: str | None = None) -> None:
        """Raises :class:`UnsupportedModule` if ``values`` contain packed rows; ``where``: if that is not in forward."""
        if any(id(leaf) in self._packed for leaf in pytree.tree_leaves(values)):
            raise _refused("the rows of a packed sequence are used", where)

    def _note(self, packed: _Packed) -> torch.Tensor:
        self._packed[id(packed.rows)] = packed
        return packed.rows

    def _pack(self, input: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, ...]:
        with no_torch_function():
            self.refuse(input)
            steps = self._count("longest", lengths)
            padded = (input.transpose(0, 1) if batch_first else input)[:steps]
            if steps < 0 or padded.shape[:2] != (steps, *lengths.shape):
                return pack_padded(input, lengths, batch_first)  # eager's error
            sizes = (lengths > VF.arange(steps, device=lengths.device).unsqueeze(1)).sum(1)
            own = lengths.to(input.device)
            active = own > VF.arange(steps, device=input.device).unsqueeze(1)
            packed = _Packed(padded.flatten(0, 1), own, sizes, active)
            packed = replace(packed, rows=packed.where(padded, 0).flatten(0, 1))
            self._sizes[id(sizes)] = packed
            return self._note(packed), sizes

    def _layers(self, cell: str, rows, sizes, first, weights, biases, layers, rate, train, both_ways) -> tuple:
        packed, directions = self._packed[id(rows)], 2 if both_ways else 1
        self._require_same(packed, sizes)
        states = list(first) if cell == "lstm" else [first]
        tensors = [rows, *states, *weights]
        if ambient_autocast() is not None or {each.dtype for each in tensors} not in _WIDE:
            raise _refused("a packed sequence in a half type")
        if layers > 1 and rate and train:
            raise _refused("dropout between layers over a packed sequence, which is drawn for its rows")
        if len(weights) // (layers * directions) % 2:
            raise _refused("a projection over a packed sequence")
        with no_torch_function():
            options = list(weights), bool(biases), layers, bool(both_ways)
            y, *last = PACKED_LAYERS(cell, packed.padded, packed.lengths, states, *options)
            return self._note(replace(packed, rows=y.flatten(0, 1))), *last[: len(states)]

    def _pad(
        self, rows: torch.Tensor, sizes: torch.Tensor, batch_first: bool, padding: float, total: int
    ) -> tuple[torch.Tensor, ...]:
        packed = self._packed[id(rows)]
        self._require_same(packed, sizes)
        with no_torch_function():
            y = packed.where(packed.padded, padding)
            if total > y.shape[0]:
                y = VF.cat([y, y.new_full((total - y.shape[0], *y.shape[1:]), padding)])
            lengths = (sizes.unsqueeze(1) > VF.arange(y.shape[1], device=sizes.device)).sum(0)
            return y.transpose(0, 1) if batch_first else y, lengths

    def _require_same(self, packed: _Packed, sizes: torch.Tensor) -> None:
        if sizes is not packed.sizes:
            raise _refused("rows of a packed sequence with other batch sizes")


# Recurrent layers over packed sequences: ``tvm_dispatch::packed_layers``, on padded sequences and their lengths.
#
#     packed_layers(cell, x, lengths, states, weights, biases, layers, both_ways) -> (y, h, c)
#
# ``x``: [steps, batch, inputs], zeros after the end of each sequence; ``lengths``: [batch], in descending order. After
# a sequence's end, the state stays, and ``y`` is zero. ``c`` is empty for cells other than LSTM. The kernel is torch's
# operator on the packed rows. Its derivative and its shapes are here; a compiled program has loops instead
# (:mod:`bridge.aten.recurrent`).


def packed_layers(
    cell: str,
    x: torch.Tensor,
    lengths: torch.Tensor,
    states: list[torch.Tensor],
    weights: list[torch.Tensor],
    biases: bool,
    layers: int,
    both_ways: bool,
) -> tuple[torch.Tensor, ...]:
    """The operator by torch's operators, differentiable any number of times; shapes as above."""
    rows, sizes = aten._pack_padded_sequence(x, lengths.to(HOST), False)
    first = list(states) if cell == "lstm" else states[0]
    y, *last = getattr(aten, cell).data(rows, sizes, first, weights, biases, layers, 0.0, True, both_ways)
    y, _ = aten._pad_packed_sequence(y, sizes, False, 0.0, x.shape[0])
    return y, last[0], last[1] if cell == "lstm" else x.new_empty(0)


def _like(cell, x, lengths, states, weights, biases, layers, both_ways):
    directions = 2 if both_ways else 1
    y = x.new_empty(*x.shape[:2], directions * states[0].shape[2])
    return y, VF.empty_like(states[0]), VF.empty_like(states[1]) if cell == "lstm" else x.new_empty(0)


PACKED_LAYERS = own_operator(
    "packed_layers(str cell, Tensor x, Tensor lengths, Tensor[] states, Tensor[] weights, bool biases, int layers, "
    "bool both_ways) -> (Tensor, Tensor, Tensor)",
    packed_layers,
    _like,
)


def _keep(ctx: Any, inputs: tuple, output: Any) -> None:
    cell, x, lengths, states, weights, *ctx.options = inputs
    ctx.cell, ctx.states = cell, len(states)
    ctx.save_for_backward(x, lengths, *states, *weights)


def _backward(ctx: Any, *grads: torch.Tensor) -> tuple:
    x, lengths, *rest = ctx.saved_tensors
    with torch.enable_grad():
        x, *rest = [each.detach().requires_grad_() for each in (x, *rest)]
        states, weights = rest[: ctx.states], rest[ctx.states :]
        made = packed_layers(ctx.cell, x, lengths, states, weights, *ctx.options)
        pairs = [pair for pair in zip(made, grads, strict=True) if pair[0].requires_grad and pair[1] is not None]
        outputs, grads = zip(*pairs, strict=True)
        of_x, *found = torch.autograd.grad(outputs, [x, *rest], grads)
    return None, of_x, None, found[: ctx.states], found[ctx.states :], None, None, None


torch.library.register_autograd("tvm_dispatch::packed_layers", _backward, setup_context=_keep)
