"""Whole functions: torch functions whose traces read numbers → custom operators with torch's function as kernel.

A fake run fails in a composite function that reads numbers (to check arguments, to build a mask that depends only on
the shape), or that has a further result with a data-dependent shape. If the wanted result has a static shape, the
function becomes one operator, with torch's function as kernel and autograd's derivative of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from bridge.base.devices import HOST, current_device
from bridge.base.modes import ambient_autocast
from bridge.base.quirks import applies, quirk
from bridge.base.torch_internals import VF, TensorBase, aten, pytree
from bridge.base.torch_shapes import check_places

__all__ = ["HANDLERS", "WHOLE_FUNCTIONS", "WholeFunction", "define_whole"]

_library = torch.library.Library("tvm_dispatch", "FRAGMENT")


@dataclass(frozen=True)
class WholeFunction:
    """The kernel of a custom operator.

    Attributes:
        operator: torch's operator, or a function of torch's operators, which a program calls by the custom name.
        keywords: names of its last arguments if it takes them by keyword; the custom operator takes all by position.
    """

    operator: Any
    keywords: tuple[str, ...] = ()

    def call(self, args: tuple) -> tuple[tuple, dict[str, Any]]:
        """The custom operator's arguments → (args, kwargs) of torch's operator."""
        count = len(args) - len(self.keywords)
        return tuple(args[:count]), dict(zip(self.keywords, args[count:], strict=True))

    def __call__(self, *args: Any) -> Any:
        args, kwargs = self.call(args)
        return self.operator(*args, **kwargs)


WHOLE_FUNCTIONS: dict[Any, WholeFunction] = {}
"""Custom operator → its kernel."""

HANDLERS: dict[Any, Callable[..., Any]] = {}
"""torch function → its replacement while forward is traced."""


def define_whole(schema: str, computed: WholeFunction, like: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Defines and registers a custom operator with one result.

    Args:
        schema: as in ``"cov(Tensor input, int correction) -> Tensor"``.
        computed: its kernel, which autograd differentiates.
        like: its arguments → an empty tensor with the result's metadata.
    """
    name = schema.partition("(")[0]
    _library.define(schema)

    def kernel(*args):
        return computed(*args)

    def keep(ctx, inputs, output):
        ctx.save_for_backward(*[each for each in inputs if isinstance(each, torch.Tensor)])
        ctx.others = [_SAVED if isinstance(each, torch.Tensor) else each for each in inputs]

    def backward(ctx, grad):
        saved = iter(ctx.saved_tensors)
        args = [next(saved).detach() if each is _SAVED else each for each in ctx.others]
        wanted = [place for place, needs in enumerate(ctx.needs_input_grad) if needs]
        with torch.enable_grad():
            for place in wanted:
                args[place].requires_grad_()
            found = torch.autograd.grad(computed(*args), [args[place] for place in wanted], grad)
        gradients = dict(zip(wanted, found, strict=True))
        return tuple(map(gradients.get, range(len(args))))

    _library.impl(name, kernel, "CompositeExplicitAutograd")
    _library.impl(name, like, "Meta")
    torch.library.register_autograd(f"tvm_dispatch::{name}", backward, setup_context=keep, lib=_library)
    made = getattr(torch.ops.tvm_dispatch, name)
    WHOLE_FUNCTIONS[made.default] = computed
    return made


_SAVED = object()

# Losses


_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def _like_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity):
    is_each = reduction == _REDUCTIONS["none"] and log_probs.dim() == 3
    return log_probs.new_empty(log_probs.shape[1:2] if is_each else ())


def _define_ctc(name: str, lengths: str, computed: WholeFunction):
    given = f"Tensor log_probs, Tensor targets, {lengths} input_lengths, {lengths} target_lengths"
    schema = f"{name}({given}, int blank, int reduction, bool zero_infinity) -> Tensor"
    return define_whole(schema, computed, _like_loss)


_ctc_of_tensors = _define_ctc("ctc_loss", "Tensor", WholeFunction(aten.ctc_loss.Tensor))
_ctc_of_lists = _define_ctc("ctc_loss_of_lists", "int[]", WholeFunction(aten.ctc_loss.IntList))


@quirk(
    "F.ctc_loss",
    "torch.ctc_loss",
    reason="returns forward probabilities as well, whose shape is in the lengths",
    test="tests/bridge/aten/test_ctc.py",
)
def _ctc_loss(
    func, log_probs, targets, input_lengths, target_lengths, blank=0, reduction="mean", zero_infinity=False
) -> torch.Tensor:
    """CTC loss with its reduction as one operator, computed by torch."""
    lengths = input_lengths, target_lengths
    reduction = _REDUCTIONS.get(reduction, reduction)
    if reduction not in _REDUCTIONS.values():
        return func(log_probs, targets, *lengths, blank, reduction, zero_infinity)  # eager's error
    if ambient_autocast() is not None and log_probs.dtype != torch.float64:
        log_probs = log_probs.float()  # as eager's operator does
    options = (blank, reduction, bool(zero_infinity))
    if all(isinstance(each, torch.Tensor) for each in lengths):
        return _ctc_of_tensors(log_probs, targets, *lengths, *options)
    return _ctc_of_lists(log_probs, targets, *map(list, lengths), *options)


for _function in (F.ctc_loss, VF.ctc_loss):
    HANDLERS[_function] = partial(_ctc_loss, _function)


# Linear algebra


def _solved(input, other, rcond, driver):
    return aten.linalg_lstsq.default(input, other, rcond, driver=driver)[0]


def _solution(input, other, rcond, driver):
    batch = torch.broadcast_shapes(input.shape[:-2], other.shape[: input.dim() - 2])
    return other.new_empty((*batch, input.shape[-1], *other.shape[input.dim() - 1 :]))


_solve = define_whole(
    "lstsq_solution(Tensor input, Tensor other, float? rcond, str? driver) -> Tensor",
    WholeFunction(_solved),
    _solution,
)
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


# Quantiles


def _define_quantile(name: str) -> Callable[..., torch.Tensor]:
    """Defines a quantile of a tensor of levels; its meta function is torch's, which reads numbers only on the CPU."""
    schema = f"{name}(Tensor input, Tensor q, int? dim, bool keepdim, str interpolation) -> Tensor"
    computed = WholeFunction(getattr(aten, name).default, ("interpolation",))
    return define_whole(schema, computed, computed)


@quirk(
    "torch.quantile",
    "torch.nanquantile",
    until="2.13",
    reason="on the CPU, reads whether the levels are between 0 and 1",
    test="tests/bridge/aten/test_any_operator.py",
)
def _quantile(function, operator, input, q, dim=None, keepdim=False, *, interpolation="linear", **others):
    """Quantile as one operator, whose kernel still checks the levels at each call."""
    is_tensor = isinstance(q, torch.Tensor)
    if input.device != HOST or others or not (is_tensor or 0 <= q <= 1):  # a wrong level: torch's error
        return function(input, q, dim, keepdim, interpolation=interpolation, **others)
    levels = q if is_tensor else input.new_full((), q)
    levels = levels if interpolation == "linear" else levels.detach()  # a choice between numbers has no derivative
    return operator(input, levels, dim, keepdim, interpolation)


for _name in ("quantile", "nanquantile"):
    _operator = _define_quantile(_name)
    if applies(until="2.13"):
        for _function in (getattr(VF, _name), getattr(TensorBase, _name)):
            HANDLERS[_function] = partial(_quantile, _function, _operator)


# Spectrograms


def _signal(input, n_fft, hop_length, win_length, window, center, normalized, onesided, length, return_complex):
    *batch, _, frames = input.shape
    hop_length = n_fft // 4 if hop_length is None else hop_length
    whole = n_fft + hop_length * (frames - 1)
    if length is None:
        length = whole - 2 * (n_fft // 2) if center else whole
    return input.new_empty((*batch, length), dtype=input.dtype if return_complex else input.dtype.to_real())


_istft_whole = define_whole(
    "istft(Tensor input, int n_fft, int? hop_length, int? win_length, Tensor? window, bool center, bool normalized,"
    " bool? onesided, int? length, bool return_complex) -> Tensor",
    WholeFunction(aten.istft.default),
    _signal,
)


@quirk(
    "torch.istft",
    reason="asks whether the windows leave a gap between them; the length of the signal is in the sizes",
    test="tests/bridge/aten/test_any_operator.py",
)
def _istft(
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
    rest = n_fft, hop_length, win_length, window, center, normalized, onesided, length, return_complex
    return _istft_whole(input, *rest)


for _function in (VF.istft, torch.Tensor.istft):
    HANDLERS[_function] = _istft


# Statistics


def _covariances(input, correction, fweights, aweights):
    dtype = input.dtype
    for weights in (fweights, aweights):
        dtype = dtype if weights is None else torch.promote_types(dtype, weights.dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        dtype = torch.get_default_dtype()
    variables = input.shape[0] if input.dim() == 2 else 1
    return input.new_empty((variables, variables), dtype=dtype).squeeze()


def _chosen(input, r, with_replacement):
    count = input.shape[0]
    choices = math.comb(count + r - 1, r) if with_replacement and count else math.comb(count, r)
    return input.new_empty((choices, r) if r else (0,))


_cov_whole = define_whole(
    "cov(Tensor input, int correction, Tensor? fweights, Tensor? aweights) -> Tensor",
    WholeFunction(aten.cov.default, ("correction", "fweights", "aweights")),
    _covariances,
)
_corrcoef_whole = define_whole(
    "corrcoef(Tensor input) -> Tensor",
    WholeFunction(aten.corrcoef.default),
    lambda input: _covariances(input, 1, None, None),
)
_combinations_whole = define_whole(
    "combinations(Tensor input, int r, bool with_replacement) -> Tensor",
    WholeFunction(aten.combinations.default),
    _chosen,
)


@quirk(
    "torch.cov",
    "torch.corrcoef",
    reason="asks whether weights are negative, and whether there are more observations than degrees of freedom",
    test="tests/bridge/aten/test_any_operator.py",
)
def _cov(input, *, correction=1, fweights=None, aweights=None):
    return _cov_whole(input, correction, fweights, aweights)


@quirk(
    "torch.combinations",
    reason="selects by a mask that is in the size alone",
    test="tests/bridge/aten/test_any_operator.py",
)
def _combinations(input, r=2, with_replacement=False):
    if type(input.shape[0]) is not int or input.dim() != 1:
        return VF.combinations(input, r, with_replacement)
    return _combinations_whole(input, r, with_replacement)


for _function in (VF.cov, TensorBase.cov):
    HANDLERS[_function] = _cov
for _function in (VF.corrcoef, TensorBase.corrcoef):
    HANDLERS[_function] = lambda input: _corrcoef_whole(input)
HANDLERS[VF.combinations] = _combinations


# Writes by positions


_as_strided_scatter_whole = define_whole(
    "as_strided_scatter(Tensor input, Tensor src, int[] size, int[] stride, int storage_offset) -> Tensor",
    WholeFunction(aten.as_strided_scatter.default),
    lambda input, src, *places: check_places(input, *places) or VF.empty_like(input),
)


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
