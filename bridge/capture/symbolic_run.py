"""Symbolic run: the fake run of a call with dynamic shapes → its record with torch's symbolic sizes.

The arguments have a symbol for each dynamic dimension; parameters have numbers. At the sample's sizes, the rows equal
the real run's. Each question of forward or torch about a size is a condition in torch's environment, which becomes a
guard (:mod:`bridge.capture.symbolic_sizes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from bridge.base.devices import HOST
from bridge.base.errors import BY_NUMBERS, Unsupported, UnsupportedModule, line_of
from bridge.base.modes import while_active
from bridge.base.quirks import applies, quirk
from bridge.base.torch_internals import FakeTensorMode, aten, python_kernels
from bridge.base.torch_recording import no_python_kernels
from bridge.base.torch_shapes import check_places, expression, hint, is_decided, symbolic_fake, upsampled_sizes
from bridge.capture.counted_dims import CountedDims
from bridge.capture.draws import DrawRecorder
from bridge.capture.observation import Draw
from bridge.capture.opened import LAYERED
from bridge.capture.passes.decompositions import UPSAMPLES, diagonal_filled
from bridge.capture.rows import Form, Record, Row, ValueRef, at_hints, leaves_in, renamed, values_in
from bridge.capture.sample import DynamicDim
from bridge.capture.whole_functions import SHAPES

_SLICE = aten.slice.Tensor
_END = 2**63 - 1
_SHAPE_OF_NUMBERS = f"the shape of a result {BY_NUMBERS}, and sizes vary"


def symbolic_leaf(mode: FakeTensorMode, leaf: torch.Tensor, index: int, dims: Sequence[DynamicDim]) -> torch.Tensor:
    """A fake tensor for a leaf of the arguments, with a separate symbol for each of its dynamic dimensions."""
    dynamic = {each.dimension for each in dims if each.leaf == index}
    made = symbolic_fake(mode, leaf.detach(), dynamic, f"input_{index}") if dynamic else mode.from_tensor(leaf.detach())
    return made.requires_grad_(leaf.requires_grad)


class Symbols:
    """State of a run on symbolic sizes: runs its operators, records its draws and the lines of its conditions.

    Attributes:
        draws: the draws, with symbolic sizes.
        lines: index of a condition in torch's environment -> the user's line of the operator that asked it.
        counts: the symbols of numbers that forward reads; ``None``: the numbers are constants.
    """

    def __init__(self, real: Record, mode: FakeTensorMode, counts: CountedDims | None = None):
        self._real, self.counts = real, counts
        self._mode, self._environment = mode, mode.shape_env
        self.draws: list[Draw] = []
        self.lines: dict[int, str] = {}

    @staticmethod
    def inside(func: Any) -> Callable[..., Any] | None:
        """A formula for an opened operator whose own kernel fixes sizes, or ``None``."""
        return _INSIDE.get(func)

    def recording(self, inputs: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """While active, draws are recorded."""
        recorder = DrawRecorder(self.draws, lambda op, reason: None, inputs)
        return while_active(self._mode, through=partial(recorder.on_fakes, self._mode))

    def is_whole_slice(self, op: Any, operands: tuple, args: tuple, record: Record, known: Row | None) -> bool:
        """Whether a call is a slice that spans the whole at the sample's sizes and has no row in the real run.

        In ``x[:, None]`` and the like, torch's indexing leaves out slices that span the whole of a static size.
        """
        if op is not _SLICE or operands[1] or type(operands[0][0]) is not ValueRef:
            return False
        x, dim, start, end, step = (*args, *(0, 0, _END, 1)[len(args) - 1 :])
        size = hint(x.shape[dim])
        if (start is not None and hint(start)) or hint(step) != 1 or (end is not None and hint(end) < size):
            return False
        if known is None:
            return True
        same = known.args[:1] == renamed(operands[0][:1], record)
        if known.op is _SLICE:
            return not (same and at_hints(operands[0][1:]) == known.args[1:])
        return not (known.op is aten.alias.default and same)

    def result(self, func: Any, args: tuple, kwargs: dict[str, Any], known: Row | None, where: Any) -> Any:
        """Runs an operator, or its size formula → its result.

        Raises:
            UnsupportedModule: numbers decide the shape.
        """
        before = len(self._environment.guards)
        forms = [] if known is None else [self._real.forms[number] for number in values_in(known.results)]
        draws = known is not None and known.draws[0] != known.draws[1]
        formula = FORMULAS.get(func)
        with no_python_kernels() if draws else nullcontext():  # some decompose operators whose draws must stay whole
            result = NotImplemented if formula is None or known is None else formula(forms, *args, **kwargs)
            if result is NotImplemented:
                result = func(*args, **kwargs)
        if where is not None:
            self.lines.update(dict.fromkeys(range(before, len(self._environment.guards)), line_of(where)))
        for tensor in leaves_in(result, torch.Tensor):
            self._check_decided(func, tensor, where)
        return result

    def fixed(self, size: int | torch.SymInt, line: str) -> int:
        """Fixes a size to the sample's number → that number; ``line``: the user's line that fixes it."""
        before = len(self._environment.guards)
        number = int(size)
        self.lines.update(dict.fromkeys(range(before, len(self._environment.guards)), line))
        return number

    def _check_decided(self, func: Any, tensor: torch.Tensor, where: Any) -> None:
        for size in tensor.shape:
            if isinstance(size, torch.SymInt) and not is_decided(self._environment, expression(size)):
                raise UnsupportedModule("", [Unsupported(str(func), line_of(where), _SHAPE_OF_NUMBERS)])


# Size formulas: operators whose kernels fix symbolic sizes, or take long → the same results by other operators.
#
# Each formula takes the metadata of the results in the real run, then the operator's arguments. It returns
# ``NotImplemented`` where the operator itself works.


def has_symbols(tensor: torch.Tensor) -> bool:
    """Whether a size of a tensor is a symbol."""
    return any(isinstance(size, torch.SymInt) for size in tensor.shape)


def _layers(
    forms: Sequence[Form], x, states, weights, biases, layers, dropout, train, both_ways, batch_first
) -> tuple[torch.Tensor, ...]:
    """Recurrent layers: empty results and the dropouts between layers, because torch's own formula runs each step."""
    if not isinstance(weights, list | tuple):
        return NotImplemented  # a packed sequence
    first, *finals = forms
    shape = x.shape
    steps, batch = (shape[1], shape[0]) if batch_first else shape[:2]
    width = first.shape[2]
    for _ in range(layers - 1 if train and dropout else 0):
        torch.dropout(torch.empty((steps, batch, width), dtype=first.dtype, device=first.device), dropout, True)
    y = _made(first, (steps, batch, width))
    each = states if isinstance(states, list | tuple) else [states]
    made = [_made(form, state.shape) for form, state in zip(finals, each, strict=True)]
    return (y.transpose(0, 1) if batch_first else y, *made)


def _made(form: Form, shape: Sequence[Any]) -> torch.Tensor:
    made = torch.empty(shape, dtype=form.dtype, device=form.device)
    return made.requires_grad_().clone() if form.requires_grad else made


def _whole(like: Callable[..., Any], forms: Sequence[Form], *args: Any, **kwargs: Any) -> torch.Tensor:
    """An operator that stays whole: an empty result (:data:`bridge.capture.whole_functions.SHAPES`)."""
    made = like(*args, **kwargs)
    return made if made is NotImplemented else _made(forms[0], made.shape)


def _max_pool1d(
    x: torch.Tensor, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, up=False
) -> torch.Tensor:
    """``max_pool1d`` as 2-d pooling of an image with one row, as in eager under autograd."""
    if not has_symbols(x):
        return NotImplemented
    kernel, step, pad, dilated = map(_number, (kernel, stride, padding, dilation))
    pooled = aten.max_pool2d_with_indices.default(
        x.unsqueeze(-2), (1, kernel), (1, kernel if step is None else step), (0, pad), (1, dilated), up
    )
    return pooled[0].squeeze(-2)


@quirk(
    "F.scaled_dot_product_attention",
    reason="the C++ of products, which its formula with dropout is made of on a CPU, reads sizes as numbers",
    test="tests/bridge/dispatch/test_dynamic_attention.py",
    until="2.13",
)
def _attention(
    forms: Sequence[Form], query, key, value, mask=None, rate=0.0, is_causal=False, *, scale=None, enable_gqa=False
) -> torch.Tensor:
    """Attention with dropout on a CPU: eager's formula, with torch's Python decomposition of matrix products."""
    rate = float(rate)
    if not rate or query.device != HOST or not any(map(has_symbols, (query, key, value))):
        return NotImplemented
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    scores = _product(query * (query.shape[-1] ** -0.5 if scale is None else scale), key.mT)
    if is_causal:
        mask = torch.ones_like(scores, dtype=torch.bool).tril()
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, float("-inf")) if is_bool else scores + mask
    return _product(torch.dropout(scores.softmax(-1), rate, True).to(value.dtype), value)


def _upsampled(packet: Any, x: torch.Tensor, size: Any, *rest: Any) -> torch.Tensor:
    """The operator that an interpolation calls; its own C++ kernel would fix the sizes."""
    *options, factors = rest
    shape = upsampled_sizes(x.shape, size, factors)
    return packet.default(x, shape, *options, *(factors or [None] * len(shape)))


def _placed(forms: Sequence[Form], x: torch.Tensor, size: Any, stride: Any, offset: Any = None) -> torch.Tensor:
    check_places(x, size, stride, offset)
    return NotImplemented


def _product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with python_kernels():
        return torch.matmul(x, y)


def _number(value: Any) -> Any:
    """The number of a number or of a list with at most one; ``None`` for an empty list."""
    return next(iter(value), None) if isinstance(value, list | tuple) else value


POOLINGS: dict[Any, Callable[..., Any]] = {aten.max_pool1d.default: _max_pool1d}
"""Size formulas that need no result metadata, which functionalization uses as well."""

_INSIDE: dict[Any, Callable[..., Any]] = {packet.vec: partial(_upsampled, packet) for packet in UPSAMPLES}
"""Formulas of opened operators (:mod:`bridge.capture.opened`) whose own kernels fix sizes."""

FORMULAS: dict[Any, Callable[..., Any]] = {
    **{op: partial(lambda pooled, forms, *args: pooled(*args), pooled) for op, pooled in POOLINGS.items()},
    **dict.fromkeys(LAYERED, _layers),
    **{op: partial(_whole, like) for op, like in SHAPES.items()},
    aten.fill_diagonal_.default: lambda forms, *args: diagonal_filled(*args),
    **dict.fromkeys((aten.as_strided.default, aten.as_strided_.default, aten.as_strided_copy.default), _placed),
    aten.as_strided_scatter.default: lambda forms, x, written, *places: _placed(forms, x, *places),
    **({aten.scaled_dot_product_attention.default: _attention} if applies(until="2.13") else {}),
}
