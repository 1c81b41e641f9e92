"""Operators of the special-point sweep: name → function and its points.

torch's list is imported at first use: that takes seconds, which collecting tests does not need.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.sweep.special import points

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo


@dataclass(frozen=True)
class Case:
    """An operator at its points.

    Attributes:
        inputs: dtype → tensors whose first axis counts the points.
        alone: each point is a call of its own (for operators that mix points), not a row of one call.
        constant: positions of float inputs without a gradient.
        either_zero: a result of zero may have either sign (extrema of zeros, sums that cancel).
    """

    function: Callable
    inputs: Callable[[torch.dtype], Sequence[Tensor]]
    alone: bool = False
    constant: tuple[int, ...] = ()
    either_zero: bool = False


def _columns(*makers: Callable[[torch.dtype], Sequence[float]]) -> Callable[[torch.dtype], list[Tensor]]:
    """The cross product of lists of points, as tensors."""

    def inputs(dtype: torch.dtype) -> list[Tensor]:
        columns = points.cross(*(make(dtype) for make in makers))
        return [torch.tensor(column, dtype=torch.float64).to(dtype) for column in columns]

    return inputs


_one = _columns(points.values)
_two = _columns(points.inner, points.inner)
_three = _columns(points.few, points.few, points.few)


def _rows(dtype: torch.dtype) -> list[Tensor]:
    return [points.rows(dtype)]


def _row_pairs(dtype: torch.dtype) -> list[Tensor]:
    """Every row beside every third row and beside itself."""
    rows = points.rows(dtype)
    first = torch.cat([rows.repeat_interleave(len(rows[::3]), 0), rows])
    return [first, torch.cat([rows[::3].repeat(len(rows), 1), rows])]


def _row_triples(dtype: torch.dtype) -> list[Tensor]:
    a, b = _row_pairs(dtype)
    return [a, b, torch.cat([b[len(b) // 2 :], b[: len(b) // 2]])]


def _labelled(dtype: torch.dtype) -> list[Tensor]:
    rows = points.rows(dtype)
    return [rows.repeat_interleave(4, 0), torch.arange(4).repeat(len(rows))]


def _signed(count: int) -> Callable[[torch.dtype], list[Tensor]]:
    """Points (or pairs) with the targets 1 and -1."""
    return _columns(*[points.values if count == 1 else points.inner] * count, lambda dtype: [1.0, -1.0])


def _multilabel(dtype: torch.dtype) -> list[Tensor]:
    rows = points.rows(dtype)
    targets = torch.tensor([[0, -1, 1, 2], [1, 3, -1, 0], [-1, 0, 0, 0], [0, 1, 2, 3]])
    return [rows.repeat_interleave(4, 0), targets.repeat(len(rows), 1)]


def _signed_rows(dtype: torch.dtype) -> list[Tensor]:
    a, b = _row_pairs(dtype)
    sign = torch.ones(len(a), dtype=dtype)
    return [torch.cat([a, a]), torch.cat([b, b]), torch.cat([sign, -sign])]


UNARY = {
    "celu_alpha": lambda x: F.celu(x, 0.5),
    "clamp": lambda x: x.clamp(-1, 2),
    "clamp_crossed": lambda x: x.clamp(2, -1),
    "clamp_max": lambda x: x.clamp(max=0.5),
    "clamp_min": lambda x: x.clamp(min=0.5),
    "clamp_0": lambda x: x.clamp(min=0.0),
    "clamp_nan": lambda x: x.clamp(min=points.NAN),
    "elu_alpha": lambda x: F.elu(x, 0.5),
    "fmod_number": lambda x: torch.fmod(x, 0.75),
    "fmod_0": lambda x: torch.fmod(x, 0.0),
    "fmod_inf": lambda x: torch.fmod(x, points.INF),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardshrink_0": lambda x: F.hardshrink(x, 0.0),
    "hardswish": F.hardswish,
    "leaky_relu": F.leaky_relu,
    "leaky_relu_0": lambda x: F.leaky_relu(x, 0.0),
    "logit_eps": lambda x: torch.logit(x, 0.1),
    "logit_eps_0": lambda x: torch.logit(x, 0.0),
    "logit_eps_crossed": lambda x: torch.logit(x, 0.75),
    "nan_to_num_given": lambda x: torch.nan_to_num(x, 1.0, 2.0, -3.0),
    "remainder_number": lambda x: torch.remainder(x, 0.75),
    "remainder_0": lambda x: torch.remainder(x, 0.0),
    "remainder_inf": lambda x: torch.remainder(x, points.INF),
    "rdiv_number": lambda x: 2.0 / x,
    "rdiv_0": lambda x: 0.0 / x,
    "div_0": lambda x: x / 0.0,
    "mul_0": lambda x: x * 0.0,
    "mul_inf": lambda x: x * points.INF,
    "sub_self": lambda x: x - x,
    "div_self": lambda x: x / x,
    "div_floor_number": lambda x: torch.div(x, 0.5, rounding_mode="floor") + x,
    "div_trunc_number": lambda x: torch.div(x, 0.0, rounding_mode="trunc") + x,
    "relu_twice": lambda x: F.relu(F.relu(x)),
    "softplus_beta": lambda x: F.softplus(x, 2.0, 3.0),
    "softshrink_0": lambda x: F.softshrink(x, 0.0),
    "special.expit": torch.special.expit,
    "special.i0": torch.special.i0,
    "special.log1p": torch.special.log1p,
    "threshold_0": lambda x: F.threshold(x, 0.0, 0.0),
    "threshold_value": lambda x: F.threshold(x, 0.5, 7.0),
    "where_x_positive": lambda x: torch.where(x > 0, x, 0.0),
    "where_sqrt": lambda x: torch.where(x > 0, x.sqrt(), x),
    **{f"pow_{p}": lambda x, p=p: x**p for p in (0, 0.5, 1, 1.5, 2, 3, 4, -0.5, -1, -1.5, -2, -3, 1 / 3)},
    **{f"pow_of_{b}": lambda x, b=b: b**x for b in (0.0, 1.0, 2.0, -1.0, 0.5)},
    **{f"hardtanh_{i}": lambda x, b=b: F.hardtanh(x, *b) for i, b in enumerate(((-0.5, 2.0), (0.0, 6.0)))},
}
BINARY = {
    "clamp_by_tensors": lambda x, y: torch.clamp(x, y - 1, y + 1),
    "clamp_min_by_tensor": lambda x, y: torch.clamp(x, min=y),
    "clamp_max_by_tensor": lambda x, y: torch.clamp(x, max=y),
    "add_alpha": lambda x, y: torch.add(x, y, alpha=0.5),
    "sub_alpha": lambda x, y: torch.sub(x, y, alpha=-2),
    "huber": lambda x, y: F.huber_loss(x, y, reduction="none"),
    "huber_delta": lambda x, y: F.huber_loss(x, y, reduction="none", delta=0.5),
    "l1": lambda x, y: F.l1_loss(x, y, reduction="none"),
    "lerp": lambda x, y: torch.lerp(x, y, 0.25),
    "lerp_half": lambda x, y: torch.lerp(x, y, 0.75),
    "logaddexp2": torch.logaddexp2,
    "mse": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "prelu": lambda x, y: torch.where(x > 0, x, x * y),
    "smooth_l1": lambda x, y: F.smooth_l1_loss(x, y, reduction="none"),
    "smooth_l1_beta": lambda x, y: F.smooth_l1_loss(x, y, reduction="none", beta=0.5),
    "smooth_l1_beta_0": lambda x, y: F.smooth_l1_loss(x, y, reduction="none", beta=0.0),
    "where": lambda x, y: torch.where(x > y, x, y),
    "kl_div": lambda x, y: F.kl_div(x, y, reduction="none"),
    "kl_div_log_target": lambda x, y: F.kl_div(x, y, reduction="none", log_target=True),
    "poisson_nll": lambda x, y: F.poisson_nll_loss(x, y, reduction="none"),
    "poisson_nll_full": lambda x, y: F.poisson_nll_loss(x, y, reduction="none", full=True),
    "poisson_nll_linear": lambda x, y: F.poisson_nll_loss(x, y, log_input=False, reduction="none"),
    "bce_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"),
    "glu": lambda x, y: F.glu(torch.stack([x, y], -1), -1).squeeze(-1),
}
TERNARY = {
    "addcmul": lambda x, y, z: torch.addcmul(x, y, z, value=0.5),
    "addcdiv": lambda x, y, z: torch.addcdiv(x, y, z, value=0.5),
    "lerp_tensor": torch.lerp,
    "clamp_three": lambda x, y, z: torch.clamp(x, y, z),
    "fma": lambda x, y, z: x * y + z,
    "where_three": lambda x, y, z: torch.where(x == 0, y, z),
    "margin_ranking": lambda x, y, z: F.margin_ranking_loss(x, y, z, margin=0.5, reduction="none"),
}
ROW = {
    "amax": lambda x: x.amax(-1),
    "amin": lambda x: x.amin(-1),
    "aminmax": lambda x: torch.aminmax(x, dim=-1),
    "cummax": lambda x: x.cummax(-1),
    "cummin": lambda x: x.cummin(-1),
    "cumprod": lambda x: x.cumprod(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "diff": lambda x: x.diff(dim=-1),
    "glu_row": lambda x: F.glu(x, -1),
    "kthvalue": lambda x: x.kthvalue(2, -1),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "max_dim": lambda x: x.max(-1),
    "maximum_ties": lambda x: torch.maximum(x, x.flip(-1)),
    "mean": lambda x: x.mean(-1),
    "median": lambda x: x.median(-1),
    "min_dim": lambda x: x.min(-1),
    "mode": lambda x: x.mode(-1),
    "nanmean": lambda x: x.nanmean(-1),
    "nanmedian": lambda x: x.nanmedian(-1),
    "nansum": lambda x: x.nansum(-1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "normalize_1": lambda x: F.normalize(x, p=1.0, dim=-1),
    "norm": lambda x: x.norm(dim=-1),
    **{f"norm_{p}": lambda x, p=p: torch.linalg.vector_norm(x, p, -1) for p in (1, 1.5, 3, 4, 0.5, points.INF, -1)},
    "prod": lambda x: x.prod(-1),
    "quantile": lambda x: torch.quantile(x, 0.5, dim=-1),
    "renorm": lambda x: torch.renorm(x, 2, 0, 1.0),
    "rms": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "softmax": lambda x: F.softmax(x, -1),
    "softmin": lambda x: F.softmin(x, -1),
    "softmax_twice": lambda x: F.softmax(F.softmax(x, -1), -1),
    "sort": lambda x: x.sort(-1),
    "sort_stable": lambda x: torch.sort(x, stable=True, dim=-1, descending=True),
    "std": lambda x: x.std(-1),
    "std_biased": lambda x: x.std(-1, correction=0),
    "std_mean": lambda x: torch.std_mean(x, -1),
    "sum": lambda x: x.sum(-1),
    "topk": lambda x: x.topk(2, -1),
    "var": lambda x: x.var(-1),
    "var_mean": lambda x: torch.var_mean(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "layer_norm_weighted": lambda x: F.layer_norm(x, (4,), x.new_full((4,), 2.0), x.new_full((4,), 0.5)),
    "layer_norm_eps_0": lambda x: F.layer_norm(x, (4,), eps=0.0),
    "rms_norm": lambda x: F.rms_norm(x, (4,)),
    "rms_norm_eps": lambda x: F.rms_norm(x, (4,), eps=1e-6),
    "local_response_norm": lambda x: F.local_response_norm(x.unsqueeze(-1), 2).squeeze(-1),
    "max_pool1d": lambda x: F.max_pool1d(x.unsqueeze(1), 2, 1),
    "avg_pool1d": lambda x: F.avg_pool1d(x.unsqueeze(1), 2, 1),
    "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x.unsqueeze(1), 2),
    "lp_pool1d": lambda x: F.lp_pool1d(x.unsqueeze(1), 2, 2),
}
ROW_PAIR = {
    "cdist": lambda x, y: torch.cdist(x.unsqueeze(1), y.unsqueeze(1)).reshape(-1),
    "cdist_1": lambda x, y: torch.cdist(x.unsqueeze(1), y.unsqueeze(1), 1.0).reshape(-1),
    "cdist_direct": lambda x, y: torch.cdist(
        x.unsqueeze(1), y.unsqueeze(1), compute_mode="donot_use_mm_for_euclid_dist"
    ).reshape(-1),
    "cosine_similarity": lambda x, y: F.cosine_similarity(x, y, -1),
    "pairwise_distance": lambda x, y: F.pairwise_distance(x, y),
    "pairwise_distance_1": lambda x, y: F.pairwise_distance(x, y, 1.0),
    "cross_entropy_soft": lambda x, y: F.cross_entropy(x, y, reduction="none"),
    "multilabel_soft_margin": lambda x, y: F.multilabel_soft_margin_loss(x, y, reduction="none"),
    "dot": lambda x, y: (x * y).sum(-1),
}
LABELLED = {
    "cross_entropy": lambda x, t: F.cross_entropy(x, t, reduction="none"),
    "cross_entropy_smooth": lambda x, t: F.cross_entropy(x, t, reduction="none", label_smoothing=0.1),
    "cross_entropy_weighted": lambda x, t: F.cross_entropy(x, t, x.new_tensor([0.0, 1.0, 2.0, 0.5]), reduction="none"),
    "cross_entropy_ignore": lambda x, t: F.cross_entropy(x, t, reduction="none", ignore_index=1),
    "nll_loss": lambda x, t: F.nll_loss(x, t, reduction="none"),
    "multi_margin": lambda x, t: F.multi_margin_loss(x, t, reduction="none"),
    "multi_margin_2": lambda x, t: F.multi_margin_loss(x, t, p=2, reduction="none"),
    "multi_margin_weighted": lambda x, t: F.multi_margin_loss(
        x, t, weight=x.new_tensor([0.0, 1.0, 2.0, 0.5]), margin=0.5, reduction="none"
    ),
}
MEANS = {
    "cross_entropy_mean": (_labelled, lambda x, t: F.cross_entropy(x, t)),
    "cross_entropy_mean_ignore": (_labelled, lambda x, t: F.cross_entropy(x, t, ignore_index=1)),
    "multi_margin_mean": (_labelled, lambda x, t: F.multi_margin_loss(x, t)),
    "nll_loss_mean": (_labelled, lambda x, t: F.nll_loss(x, t)),
    "mse_mean": (_row_pairs, F.mse_loss),
    "l1_mean": (_row_pairs, F.l1_loss),
    "smooth_l1_mean": (_row_pairs, F.smooth_l1_loss),
    "huber_mean": (_row_pairs, F.huber_loss),
    "kl_div_batchmean": (_row_pairs, lambda x, y: F.kl_div(x, y, reduction="batchmean")),
    "soft_margin_mean": (_row_pairs, F.soft_margin_loss),
    "batch_norm": (_rows, lambda x: F.batch_norm(x.reshape(2, 2, 1), None, None, training=True)),
    "group_norm": (_rows, lambda x: F.group_norm(x.reshape(1, 2, 2), 1)),
    "group_norm_2": (_rows, lambda x: F.group_norm(x.reshape(1, 2, 2), 2)),
    "instance_norm": (_rows, lambda x: F.instance_norm(x.reshape(1, 1, 4))),
    "batch_norm_eval": (
        _rows,
        lambda x: F.batch_norm(x.reshape(2, 2, 1), x.new_zeros(2), x.new_ones(2), training=False),
    ),
    "median_all": (_rows, torch.median),
    "max_all": (_rows, torch.max),
    "min_all": (_rows, torch.min),
    "norm_all": (_rows, torch.norm),
    "prod_all": (_rows, torch.prod),
    "std_all": (_rows, torch.std),
    "var_all": (_rows, torch.var),
    "mean_all": (_rows, torch.mean),
    "pdist": (_rows, lambda x: F.pdist(x.reshape(2, 2))),
    "dist": (_row_pairs, torch.dist),
    "dist_1": (_row_pairs, lambda x, y: torch.dist(x, y, 1)),
}

_UNSUITED = ("real", "conj", "complex", "cdouble", "cfloat", "chalf", "jiterator", "rrelu", "fill", "polar", "masked")
_UNSUITED += ("hash_tensor", "nn.functional.prelu")


def _from_opinfo() -> dict[str, Case]:
    """torch's own lists of element-wise functions and reductions."""
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo.core import BinaryUfuncInfo, ReductionOpInfo, UnaryUfuncInfo

    found = {}
    for info in op_db:
        name = f"{info.name}:{info.variant_test_name}" if info.variant_test_name else info.name
        if torch.float32 not in info.supported_dtypes("cpu") or name.startswith(_UNSUITED):
            continue
        if isinstance(info, UnaryUfuncInfo):
            found[name] = Case(_with_sample_arguments(info), _one)
        elif isinstance(info, BinaryUfuncInfo):
            found[name] = Case(_with_sample_arguments(info), _two)
        elif isinstance(info, ReductionOpInfo):
            found[f"{name}:rows"] = Case(lambda x, call=info.op: call(x, dim=-1), _rows, either_zero=True)
    return found


def _with_sample_arguments(info: UnaryUfuncInfo | BinaryUfuncInfo) -> Callable:
    """The operator with the numbers of torch's first sample (the ``n`` of ``polygamma``)."""
    from torch.testing._internal.opinfo.core import UnaryUfuncInfo

    if isinstance(info, UnaryUfuncInfo):
        kwargs, _ = info.sample_kwargs("cpu", torch.float32, torch.ones(1))
        return functools.partial(_call, info.op, kwargs)
    sample = next(iter(info.sample_inputs("cpu", torch.float32)))
    return functools.partial(_call, info.op, sample.kwargs)


def _call(function: Callable, kwargs: dict, *tensors: Tensor):
    return function(*tensors, **kwargs)


@functools.cache
def cases() -> dict[str, Case]:
    """All operators by name."""
    table = _from_opinfo()
    for functions, inputs in (
        (UNARY, _one),
        (BINARY, _two),
        (TERNARY, _three),
        (ROW, _rows),
        (ROW_PAIR, _row_pairs),
        (LABELLED, _labelled),
    ):
        zero = functions is ROW
        table.update({name: Case(function, inputs, either_zero=zero) for name, function in functions.items()})
    for name, (inputs, function) in MEANS.items():
        constant = (1,) if "soft_margin" in name else ()
        table[name] = Case(function, inputs, alone=True, constant=constant, either_zero=True)
    signed = {
        "hinge_embedding": Case(lambda x, t: F.hinge_embedding_loss(x, t, reduction="none"), _signed(1)),
        "soft_margin": Case(lambda x, t: F.soft_margin_loss(x, t, reduction="none"), _two, constant=(1,)),
        "margin_ranking_signed": Case(
            lambda x, y, t: F.margin_ranking_loss(x, y, t, margin=0.5, reduction="none"), _signed(2)
        ),
        "bce": Case(lambda x, t: F.binary_cross_entropy(x, t, reduction="none"), _columns(points.unit, points.unit)),
        "cosine_embedding": Case(
            lambda x, y, t: F.cosine_embedding_loss(x, y, t, margin=0.5, reduction="none"), _signed_rows
        ),
        "triplet_margin": Case(lambda *x: F.triplet_margin_loss(*x, reduction="none"), _row_triples),
        "triplet_margin_swap": Case(lambda *x: F.triplet_margin_loss(*x, swap=True, reduction="none"), _row_triples),
        "multilabel_margin": Case(lambda x, t: F.multilabel_margin_loss(x, t, reduction="none"), _multilabel),
        "gaussian_nll": Case(
            lambda x, y, v: F.gaussian_nll_loss(x, y, v, reduction="none"),
            _columns(points.few, points.few, lambda dtype: [0.0, 1.0, 1e-8, points.INF]),
        ),
    }
    return {**table, **signed}
