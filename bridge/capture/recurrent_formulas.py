"""Formulas of recurrent layers for tracing: torch's own unroll the steps → results of eager's types at once.

What ``torch.export`` and the runs on fake tensors need of a recurrent layer is what comes out: shapes, element types,
what it draws, which inputs autograd reaches. torch's formulas find that step by step, which takes seconds for a few
dozen steps. The stand-in here gives it for float32 and float64; on the host, in half types and under autocast, the
formulas stay, since :mod:`bridge.capture.passes.composites` writes down what they do. On a GPU autocast is a cast of
all that a layer takes, as cuDNN's is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bridge.base.devices import HOST, current_device
from bridge.base.modes import ambient_autocast
from bridge.base.torch_internals import aten, pytree, replaced_formula, schema
from bridge.capture.passes.recurrent import LAYERED
from bridge.capture.whole_functions import HANDLERS

__all__ = ["OfCudnnAloneError", "RecurrentStandIns", "lstm_as_in_eager", "recurrent_formulas"]

_library = torch.library.Library("tvm_dispatch", "FRAGMENT")
_library.define("recurrent_layer(str cell, SymInt steps, SymInt size, Tensor[] tensors) -> Tensor")


def _outputs(cell: str, steps: int, size: int, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Like the outputs of one layer in one direction, time in front."""
    return tensors[0].new_empty(steps, tensors[0].shape[1], size)


_library.impl("recurrent_layer", _outputs, "CompositeExplicitAutograd")
_library.impl("recurrent_layer", _outputs, "Meta")


class OfCudnnAloneError(NotImplementedError):
    """A recurrent layer on a GPU whose dropout is known to cuDNN's kernel alone."""


@contextmanager
def recurrent_formulas() -> Iterator[None]:
    """While modules are traced: the stand-ins, and eager's shapes where torch's formulas stay."""
    with ExitStack() as stack:
        stack.enter_context(replaced_formula(aten.lstm.input, _with_eagers_shapes))
        for operator in LAYERED:
            stack.enter_context(replaced_formula(operator, partial(_with_stand_in, schema(operator).name)))
        yield


class RecurrentStandIns(TorchFunctionMode):
    """While forward runs on fake tensors: the stand-ins, and the dropout between layers, which eager's kernels draw."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        cell = _CELLS.get(func)
        if cell is not None and not kwargs and len(args) == 9 and isinstance(args[3], bool) and _stands_in(*args):
            return _stand_in(cell, *args, draws=True)
        return func(*args, **(kwargs or {}))


def _cast_for_cudnn(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the casts of autocast on a GPU spelled out: to float16, whatever else is cast to."""

    def layers(*args: Any) -> Any:
        if ambient_autocast() is None or current_device() == HOST or isinstance(args[3], list | tuple):
            return func(*args)
        args = pytree.tree_map(_to_half, args)
        with torch.autocast(current_device().type, enabled=False):
            return func(*args)

    return layers


def _to_half(leaf: Any) -> Any:
    is_cast = isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64
    return leaf.to(torch.float16) if is_cast else leaf


for _function in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu):
    HANDLERS[_function] = _cast_for_cudnn(_function)

_CELLS = {torch.lstm: "aten::lstm", torch.gru: "aten::gru", torch.rnn_tanh: "aten::rnn_tanh"}
_CELLS[torch.rnn_relu] = "aten::rnn_relu"


def _with_stand_in(cell: str, formula: Callable[..., Any]) -> Callable[..., Any]:
    def layers(*args: Any) -> tuple[torch.Tensor, ...]:
        return _stand_in(cell, *args, draws=False) if _stands_in(*args) else formula(*args)

    return layers


def _stands_in(x: Any, states: Any, weights: Any, biases: bool, layers: int, dropout: float, train: bool, *_) -> bool:
    """Whether these are the arguments of a whole sequence of one length, in one of the wide types.

    Raises:
        OfCudnnAloneError: on a GPU, for dropout between layers.
    """
    is_on_gpu = current_device() != HOST
    if is_on_gpu and isinstance(weights, list | tuple) and x.numel() and layers > 1 and dropout and train:
        raise OfCudnnAloneError("with dropout between its layers")
    if not isinstance(weights, list | tuple) or ambient_autocast() is not None or x.dim() != 3 or not x.numel():
        return False
    tensors = [x, *(states if isinstance(states, list | tuple) else [states]), *weights]
    dtypes = {tensor.dtype for tensor in tensors}
    return len(dtypes) == 1 and (is_on_gpu or dtypes <= {torch.float32, torch.float64})


def _stand_in(
    cell: str, x, states, weights, biases, layers, dropout, train, both_ways, batch_first, *, draws: bool
) -> tuple[torch.Tensor, ...]:
    states = list(states) if isinstance(states, list | tuple) else [states]
    directions = 2 if both_ways else 1
    count = len(weights) // (layers * directions)
    x = x.transpose(0, 1) if batch_first else x
    reached = [x, *states]
    for layer in range(layers):
        made = []
        for direction in range(directions):
            index = layer * directions + direction
            own = list(weights[index * count : (index + 1) * count])
            reached += own
            name = f"{cell} {biases} {direction}"
            made.append(_reaching(reached, name, x.shape[0], states[0].shape[2], [x, *states, *own]))
        x = made[0] if len(made) == 1 else torch.cat(made, 2)
        if draws and dropout and train and layer < layers - 1:
            x = torch.dropout(x, dropout, True)
    # the cells of one step, as eager's steps on the host make them, know nothing of the projection behind them
    cells_alone = x.shape[0] == 1 and count % 2 and current_device() == HOST
    projections = list(weights[count - 1 :: count][-directions:]) if cells_alone else []
    finals = []
    for index, state in enumerate(states):
        unreached = projections if index else []
        sources = [each for each in reached if not any(each is other for other in unreached)]
        finals.append(_reaching(sources, f"state {index}", *state.shape[::2], [state]))
    return x.transpose(0, 1) if batch_first else x, *(f.reshape(s.shape) for f, s in zip(finals, states, strict=True))


def _reaching(
    reached: list[torch.Tensor], cell: str, steps: int, size: int, tensors: list[torch.Tensor]
) -> torch.Tensor:
    """Outputs whose autograd graph reaches those tensors, by elements that they have none of."""
    with torch.no_grad():
        y = torch.ops.tvm_dispatch.recurrent_layer(cell, steps, size, tensors)
    return y + torch.cat([tensor.reshape(-1)[:0] for tensor in reached]).sum()


def lstm_as_in_eager() -> AbstractContextManager[None]:
    """While modules are traced: an LSTM under autocast has the element type of eager's kernel.

    torch's formula of it for tracing, which knows nothing of that kernel, would give float32, and what the user's code
    does next may depend on it. Where this is mistaken, the module is refused: :mod:`bridge.capture.passes.autocast`
    compares.
    """
    return replaced_formula(aten.lstm.input, _with_eagers_type)


def _with_eagers_type(formula: Callable[..., Any]) -> Callable[..., Any]:
    def lstm(x: torch.Tensor, states: list, weights: list, *options: Any) -> tuple[torch.Tensor, ...]:
        made = formula(x, states, weights, *options)
        projected = states[0].shape[-1] != states[1].shape[-1]
        known = {each.dtype for each in (x, *states, *weights)} <= {torch.float32, torch.bfloat16}
        fused = torch.backends.mkldnn.enabled and known and not projected and x.numel()
        dtype = ambient_autocast()
        return tuple(each.to(dtype) for each in made) if dtype is not None and fused else made

    return lstm


def _with_eagers_shapes(formula: Callable[..., Any]) -> Callable[..., Any]:
    def lstm(x: torch.Tensor, states: list, weights: list, *options: Any) -> tuple[torch.Tensor, ...]:
        y, *finals = formula(x, states, weights, *options)
        shaped = [f if f.shape == s.shape else f.reshape(s.shape) for f, s in zip(finals, states, strict=True)]
        return (y, *shaped)

    return lstm
