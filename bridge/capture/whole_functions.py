"""Whole functions: composite operators that read numbers on their way → operators that stay whole, with torch's kernel.

A composite operator may read numbers (to check arguments, to build a mask that depends only on the shape), or have a
further result with a data-dependent shape. If the wanted result has a static shape, a program runs torch's kernel, and
backward autograd's derivative of it (:mod:`bridge.aten.any_operator`). On fake tensors a formula gives the shape, also
of an operator whose own formula there refuses calls that its kernel computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from bridge.base.devices import HOST, current_device
from bridge.base.modes import ambient_autocast
from bridge.base.quirks import applies, quirk
from bridge.base.torch_internals import VF, OpOverload, TensorBase, aten, pytree
from bridge.base.torch_recording import own_operator
from bridge.base.torch_shapes import check_places

SHAPES: dict[OpOverload, Callable[..., Any]] = {}
"""Operator that stays whole → a function of its arguments: an empty tensor with the result's metadata, or
``NotImplemented`` where the operator itself works."""

HANDLERS: dict[Any, Callable[..., Any]] = {}
"""torch function → its replacement while forward is traced."""


@quirk(
    "F.ctc_loss",
    "torch.ctc_loss",
    reason="computes forward probabilities as well, whose shape is in the lengths",
    test="tests/bridge/aten/test_ctc.py",
)
def _loss(log_probs, targets, input_lengths, target_lengths, blank=0, reduction=1, zero_infinity=False):
    return log_probs.new_empty(log_probs.shape[1:2] if not reduction and log_probs.dim() == 3 else ())


SHAPES |= {aten.ctc_loss.Tensor: _loss, aten.ctc_loss.IntList: _loss}


@quirk(
    "torch.quantile",
    "torch.nanquantile",
    until="2.13",
    reason="on the CPU, reads whether the levels are between 0 and 1",
    test="tests/bridge/aten/test_any_operator.py",
)
def _quantile(operator, input, q, *args, **options):
    meta = [torch.empty_like(each, device="meta") if isinstance(each, torch.Tensor) else each for each in (input, q)]
    return input.new_empty(operator(*meta, *args, **options).shape)


if applies(until="2.13"):
    for _packet in (aten.quantile, aten.nanquantile):
        SHAPES.update((each, partial(_quantile, each)) for each in (_packet.default, _packet.scalar))


@quirk(
    "torch.istft",
    reason="asks whether the windows leave a gap between them; the length of the signal is in the sizes",
    test="tests/bridge/aten/test_any_operator.py",
)
def _signal(
    input,
    n_fft,
    hop_length=None,
    win_length=None,
    window=None,
    center=True,
    normalized=False,
    onesided=None,
    length=None,
    return_complex=False,
):
    *batch, _, frames = input.shape
    hop_length = n_fft // 4 if hop_length is None else hop_length
    whole = n_fft + hop_length * (frames - 1)
    if length is None:
        length = whole - 2 * (n_fft // 2) if center else whole
    return input.new_empty((*batch, length), dtype=input.dtype if return_complex else input.dtype.to_real())


@quirk(
    "torch.cov",
    "torch.corrcoef",
    reason="asks whether weights are negative, and whether there are more observations than degrees of freedom",
    test="tests/bridge/aten/test_any_operator.py",
)
def _covariances(input, *, correction=1, fweights=None, aweights=None):
    dtype = input.dtype
    for weights in (fweights, aweights):
        dtype = dtype if weights is None else torch.promote_types(dtype, weights.dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        dtype = torch.get_default_dtype()
    variables = input.shape[0] if input.dim() == 2 else 1
    return input.new_empty((variables, variables), dtype=dtype).squeeze()


@quirk(
    "torch.combinations",
    reason="selects by a mask that is in the size alone",
    test="tests/bridge/aten/test_any_operator.py",
)
def _chosen(input, r=2, with_replacement=False):
    count = input.shape[0]
    if type(count) is not int:
        return NotImplemented
    choices = math.comb(count + r - 1, r) if with_replacement and count else math.comb(count, r)
    return input.new_empty((choices, r) if r else (0,))


SHAPES |= {aten.istft.default: _signal, aten.combinations.default: _chosen}
SHAPES |= {aten.cov.default: _covariances, aten.corrcoef.default: _covariances}


@quirk(
    "F.grouped_mm",
    reason="its formula for fake tensors has bfloat16 alone, its kernels other types as well",
    test="tests/bridge/aten/test_any_operator.py::test_products_of_groups",
)
def _product_of_groups(mat_a, mat_b, offs=None, bias=None, out_dtype=None):
    """As the kernels allocate it: rows begin at multiples of 16 bytes."""
    groups = next((each.shape[0] for each in (mat_a, mat_b, offs) if each.dim() != 2), None)
    shape = [groups] * (mat_a.dim() == mat_b.dim()) + [mat_a.shape[-2], mat_b.shape[-1]]
    dtype = mat_a.dtype if out_dtype is None else out_dtype
    step = 16 // dtype.itemsize
    return mat_a.new_empty((*shape[:-1], -(-shape[-1] // step) * step), dtype=dtype)[..., : shape[-1]]


SHAPES[aten._grouped_mm.default] = _product_of_groups


# Linear algebra


def _solution(input, other, rcond, driver):
    batch = torch.broadcast_shapes(input.shape[:-2], other.shape[: input.dim() - 2])
    return other.new_empty((*batch, input.shape[-1], *other.shape[input.dim() - 1 :]))


_solve = own_operator(
    "lstsq_solution(Tensor input, Tensor other, float? rcond, str? driver) -> Tensor",
    lambda input, other, rcond, driver: aten.linalg_lstsq.default(input, other, rcond, driver=driver)[0],
    is_composite=True,
)
SHAPES[_solve] = _solution
_FIELDS = ("solution", "residuals", "rank", "singular_values")


class LeastSquares:
    """The result of ``torch.linalg.lstsq``; fields other than the solution are computed when they are read."""

    def __init__(self, solution: torch.Tensor, everything: Callable[[], tuple] | None):
        self._solution, self._everything = solution, everything

    def __getitem__(self, index: Any) -> Any:
        return self._solution if index in (0, -len(_FIELDS)) else self._everything()[index]

    def __getattr__(self, name: str) -> torch.Tensor:
        if name not in _FIELDS:
            raise AttributeError(f"the result of lstsq has no {name}")
        return self[_FIELDS.index(name)]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._everything())

    def __len__(self) -> int:
        return len(_FIELDS)


@quirk(
    "torch.linalg.lstsq",
    reason="how many residuals it returns depends on the rank, which is in the numbers; the solution's shape does not",
    test="tests/bridge/aten/test_any_operator.py",
)
def _lstsq(A, B=None, rcond=None, *, b=None, driver=None) -> LeastSquares:
    """``lstsq`` with its solution as one operator; reading another field calls torch's function, which is refused."""
    other = b if B is None else B
    rest = partial(aten.linalg_lstsq.default, A, other, rcond, driver=driver)
    return LeastSquares(_solve(A, other, rcond, driver), rest)


pytree.register_pytree_node(  # makes the solution a tensor leaf of the result
    LeastSquares,
    lambda found: ([found[0]], found._everything),
    lambda leaves, everything: LeastSquares(*leaves, everything),
)
HANDLERS[torch.linalg.lstsq] = _lstsq


# Writes by positions


_as_strided_scatter_whole = own_operator(
    "as_strided_scatter(Tensor input, Tensor src, int[] size, int[] stride, int storage_offset) -> Tensor",
    lambda input, src, *places: aten.as_strided_scatter.default(input, src, *places),
    is_composite=True,
)
SHAPES[_as_strided_scatter_whole] = lambda input, src, *places: check_places(input, *places) or VF.empty_like(input)


@quirk(
    "torch.as_strided_scatter",
    reason="its derivative passes the gradient on where the source was written, too; that of functionalized writes, "
    "which are the same operator, does not",
    test="tests/bridge/parity/test_aliasing.py",
)
def _as_strided_scatter(function, input, src, size, stride, storage_offset=None):
    """Forward's own call as one operator with eager's derivative.

    Offsets count from the start of a contiguous input's memory, which is equal in every copy of it.
    """
    if input.storage_offset() or not input.is_contiguous() or input.is_conj() or input.is_neg():
        return function(input, src, size, stride, storage_offset)
    return _as_strided_scatter_whole(input, src, size, stride, storage_offset or 0)


for _function in (VF.as_strided_scatter, TensorBase.as_strided_scatter):
    HANDLERS[_function] = partial(_as_strided_scatter, _function)


@quirk(
    "torch.max_pool1d",
    reason="where autograd does not follow it on a CPU, a kernel of its own makes a contiguous result; under a mode "
    "torch takes the other way, whose result has the argument's order of axes",
    test="tests/bridge/aten/test_conv.py",
)
def _max_pool1d(function, input, *args, **kwargs):
    made = function(input, *args, **kwargs)
    if not isinstance(made, torch.Tensor):  # with positions there is one kernel in every case
        return made
    is_followed = input.requires_grad and torch.is_grad_enabled()
    return made if is_followed or input.device != HOST else made.contiguous()


for _function in (VF.max_pool1d, F.max_pool1d):
    HANDLERS[_function] = partial(_max_pool1d, _function)


def _cast_for_cudnn(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function with explicit casts for autocast on a GPU: to float16, whatever autocast's dtype is."""

    def layers(*args: Any, **kwargs: Any) -> Any:
        if ambient_autocast() is None or current_device() == HOST or isinstance(args[3], list | tuple):
            return func(*args, **kwargs)
        args = pytree.tree_map(_to_half, args)
        with torch.autocast(current_device().type, enabled=False):
            return func(*args, **kwargs)

    return layers


def _to_half(leaf: Any) -> Any:
    is_cast = isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64
    return leaf.to(torch.float16) if is_cast else leaf


for _function in (VF.lstm, VF.gru, VF.rnn_tanh, VF.rnn_relu):
    HANDLERS[_function] = _cast_for_cudnn(_function)
