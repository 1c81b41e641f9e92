"""Decompositions: operator → the function that replaces its kernel; and the operators that stay whole."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.export.decomp_utils import PRESERVED_ATEN_CIA_OPS
from torch.nn.functional import linear

from bridge.base.devices import HOST, current_device
from bridge.base.quirks import quirk
from bridge.base.torch_internals import (
    OpOverload,
    aten,
    core_decompositions,
    decomposition_of,
    is_preservable,
    schema,
)
from bridge.base.torch_recording import own_operator
from bridge.capture.loops.operators import MARKS
from bridge.capture.opened import LAYERED
from bridge.capture.passes.alias_analysis import told
from bridge.capture.whole_functions import SHAPES

#: Operators that torch decomposes, and that are computed by its kernel, with its derivative, as operators without a
#: conversion are (:mod:`bridge.aten.any_operator`). They are deterministic and functional (no views, no writes), their
#: shapes do not depend on numbers, and another formula would only round differently.
WHOLE = (
    *(aten.floor_divide.Scalar, aten.floor_divide.default),  # torch has no derivative of it: a backward is its error
    # special functions, and element-wise ones with singular points
    *(aten.hardsigmoid.default, aten.logaddexp.default, aten.logaddexp2.default, aten.mvlgamma.default),
    *(aten.special_entr.default, aten.special_log_ndtr.default, aten.special_xlog1py.default),
    *(aten.special_xlog1py.other_scalar, aten.special_xlog1py.self_scalar, aten.xlogy.Scalar_Other),
    *(aten.xlogy.Scalar_Self, aten.xlogy.Tensor),
    # linear algebra with a unique result, hence no factors that are free up to signs (eigenvectors, QR, SVD)
    *(aten.inverse.default, aten.linalg_cholesky.default, aten.linalg_ldl_factor.default, aten.linalg_inv.default),
    *(aten.linalg_lu_factor.default, aten.linalg_solve.default, aten.linalg_solve_ex.default),
    *(aten.linalg_tensorinv.default, aten.linalg_tensorsolve.default, aten.trace.default),
    # losses, reductions and writes with ties
    *(aten.huber_loss.default, aten.index_fill.int_Tensor, aten.max_unpool2d.default, aten.max_unpool3d.default),
    *(aten.multi_margin_loss.default, aten.multilabel_margin_loss_forward.default, aten.renorm.default),
    *(aten.smooth_l1_loss.default, aten.soft_margin_loss.default),
    # operators that torch has tagged as if numbers decided a shape; here they do not
    *(aten._ctc_loss.default, aten._ctc_loss.Tensor, aten.repeat_interleave.Tensor),
    *SHAPES,
    # derivatives whose decomposition has another derivative than autograd's formula: at a kink, beside an infinity, or
    # by a result that autograd does not track (a mean)
    *(aten._prelu_kernel_backward.default, aten.binary_cross_entropy_backward.default, aten.elu_backward.default),
    *(aten.glu_backward.default, aten.hardswish_backward.default, aten.huber_loss_backward.default),
    *(aten.log_sigmoid_backward.default, aten.logit_backward.default, aten.smooth_l1_loss_backward.default),
    *(aten.soft_margin_loss_backward.default, aten.softplus_backward.default, aten._fused_rms_norm_backward.default),
    *(aten.cudnn_batch_norm_backward.default, aten.native_batch_norm_backward.default),
    *(aten.native_group_norm_backward.default, aten.native_layer_norm_backward.default),
    *(aten.nll_loss2d_backward.default, aten.nll_loss_backward.default, aten.reflection_pad1d_backward.default),
    *(aten.reflection_pad2d_backward.default, aten.reflection_pad3d_backward.default),
)

#: Draws whose distribution's parameters are tensors; torch's operator draws in its place in the program.
COMPUTED_DRAWS = (
    aten.bernoulli.default,
    aten.bernoulli.Tensor,
    aten.bernoulli_.Tensor,
    aten.binomial.default,
    aten.multinomial.default,
    aten.normal.Tensor_Tensor,
    aten.normal.Tensor_float,
    aten.normal.float_Tensor,
    aten.poisson.default,
    aten._sample_dirichlet.default,
    aten._standard_gamma.default,
)

#: ``rrelu``, which draws a slope for each negative element of its argument.
SLOPE_DRAWS = (aten.rrelu_with_noise.default, aten.rrelu_with_noise_.default, aten.rrelu_with_noise_functional.default)

#: CUDA's fused attention kernels, which contain the dropout.
CUDA_ATTENTION = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)

#: Interpolations, with torch's name for the library's mode: torch has kernels for both directions.
UPSAMPLES = {
    getattr(aten, f"{prefix}upsample_{mode}"): mode
    for prefix, modes in (
        ("", ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "trilinear3d", "bicubic2d")),
        ("_", ("nearest_exact1d", "nearest_exact2d", "nearest_exact3d", "bilinear2d_aa", "bicubic2d_aa")),
    )
    for mode in modes
}

#: Operators that are not decomposed: their decomposition only adds nodes, or its derivative is nan (or another number)
#: where torch's backward formula is not.
PRESERVED = (
    *WHOLE,
    *COMPUTED_DRAWS,
    *CUDA_ATTENTION,
    aten.hann_window.default,  # some torch decomposes it; as other windows, it is a constant
    aten.hann_window.periodic,
    *(overload for packet in UPSAMPLES for overload in (packet.default, packet.vec)),
    aten.linalg_vector_norm.default,
    aten.linear.default,
    aten.matmul.default,
    aten.baddbmm.default,  # for an alpha of 0, torch's kernel may read no products
    aten._safe_softmax.default,
    aten._weight_norm_interface.default,  # for half types, torch's kernel computes in float32 and rounds once
    aten._prelu_kernel.default,  # its weight's gradient would multiply by elements on which it does not depend
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten.adaptive_avg_pool1d.default,
    aten.addcdiv.default,
    aten.addcmul.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.celu.default,
    aten.cosine_similarity.default,
    aten.frac.default,  # of -0.0, torch's formula makes -0.0
    aten.glu.default,
    aten.hardswish.default,
    aten.lerp.Scalar,
    aten.lerp.Tensor,
    aten.log_sigmoid_forward.default,
    aten.logit.default,
    aten.index_add.default,  # its decomposition, and that of index_copy, takes negative indices
    aten.index_copy.default,
    aten.index_fill.int_Scalar,  # decomposed into index_copy, which takes no negative indices
    aten._embedding_bag.default,
    aten.logsumexp.default,
    aten.roll.default,  # decomposed into an index, whose gradient adds up; so are the next ones
    *(aten.im2col.default, aten.col2im.default),
    *(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default),
    *(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default),
    aten.mish.default,
    aten.nan_to_num.default,
    aten.nansum.default,
    aten.one_hot.default,
    aten.silu.default,
    aten.sinc.default,
    aten.softplus.default,
    aten.softshrink.default,
    aten.std.correction,
    aten.std_mean.correction,
    aten.threshold.default,
)


Table = dict[Any, Callable]


_SELECT_SCATTER = aten.select_scatter.default


def _is_at_number(x: torch.Tensor, source: torch.Tensor, dim: int, index: Any) -> bool:
    return not isinstance(index, torch.SymInt)


_KINKED = (aten.sgn.default,)
"""Operators whose decomposition has no derivative at complex 0, where the operator's is 0."""


def _is_real(x: torch.Tensor, *args: Any) -> bool:
    return not x.is_complex()


def formulas() -> Table:
    """The decompositions of operators that are not composite."""
    return tables()[1]


def composite_formulas() -> Table:
    """Composite operator → the function that replaces its kernel; operators that stay whole have none."""
    return tables()[0]


@functools.cache
def whole_operators() -> frozenset:
    """Operators that stay whole, without operators that write, because functionalization replaces them first."""
    every = [*(PRESERVED_ATEN_CIA_OPS - composite_formulas().keys()), *PRESERVED]
    return frozenset(MARKS) | {op for op in every if isinstance(op, OpOverload) and not schema(op).is_mutable}


@quirk(
    "torch.linalg.vector_norm",
    reason="is decomposed, with other gradients at nan than its backward formula has",
    test="tests/bridge/aten/test_singular.py",
    since="2.14",
)
@quirk("F.one_hot", reason="its decomposition checks no class", test="tests/bridge/aten/test_indexing.py", until="2.12")
@functools.cache
def tables() -> tuple[Table, Table]:
    """``(composite operator → the function that replaces its kernel, other operator → its decomposition)``."""
    others = {op: formula for op, formula in core_decompositions().items() if op not in PRESERVED}
    others[_SELECT_SCATTER] = _where(_is_at_number, others[_SELECT_SCATTER])
    others.update((op, _where(_is_real, others[op])) for op in _KINKED if op in others)
    others[aten.take.default] = _taken
    composite = {op: others.pop(op) for op in list(others) if is_preservable(op)}
    on_cuda = {**CELLS, aten.instance_norm.default: instance_norm}  # torch's operators there are fused, and hide writes
    composite.update({op: _where(_is_on_cuda, own, decomposition_of(op)) for op, own in on_cuda.items()})
    composite[aten.fill_diagonal_.default] = diagonal_filled
    composite[aten._assert_async.default] = _asserted
    return composite, others


def _where(test: Callable, formula: Callable, other: Callable = lambda *args: NotImplemented) -> Callable:
    """A decomposition by ``formula`` for arguments that pass a test, else by another, or none."""
    return lambda *args: (formula if test(*args) else other)(*args)


def _is_on_cuda(x: torch.Tensor, *args: Any) -> bool:
    return x.is_cuda


def instance_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    from_images: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> torch.Tensor:
    """``torch.instance_norm`` by operators whose schemas state their writes: batch normalization with each image's
    channels as separate channels.

    The running statistics, if any, become the mean over the images' new statistics. With ``from_images=False`` they are
    only read (torch's kernel rewrites the old numbers).
    """
    batch, channels = x.shape[:2]
    of_each = [None if each is None else each.repeat(batch) for each in (weight, bias, mean, variance)]
    images = x.contiguous().view(1, batch * channels, *x.shape[2:])
    if mean is None:
        y = aten._native_batch_norm_legit.no_stats(images, *of_each[:2], from_images, momentum, eps)[0]
    elif from_images:
        y = aten._native_batch_norm_legit.default(images, *of_each, from_images, momentum, eps)[0]
    else:
        y = aten._native_batch_norm_legit_no_training.default(images, *of_each, momentum, eps)[0]
    for running, moved in ((mean, of_each[2]), (variance, of_each[3])):
        if running is not None and from_images:
            running.copy_(moved.view(batch, channels).mean(0))
    return y.view(x.shape)


def _asserted(x: torch.Tensor) -> None:
    """An assertion with a message: one without is taken for dead code."""
    aten._assert_async.msg(x, "a tensor that is asserted is zero")


def diagonal_filled(x: torch.Tensor, value: Any, wrap: bool = False) -> torch.Tensor:
    """``fill_diagonal_`` by views, because torch's kernel strides through memory, which needs static sizes."""
    if wrap and x.dim() == 2:
        return NotImplemented
    diagonal = x
    while diagonal.dim() > 1:
        diagonal = diagonal.diagonal(0, 0, 1) if diagonal is x else diagonal.diagonal(0, 0, diagonal.dim() - 1)
    diagonal.fill_(value)
    return x


def _taken(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``take`` by an index: torch's formula would read the number of a one-element index."""
    return aten.index.Tensor(x.reshape(-1), [index])


# Recurrent cells: ``aten.lstm_cell``, ``aten.gru_cell`` → products and pointwise operators, as torch computes them.
#
# Eager's CUDA kernels fuse the operators after the products, and compute them in float32 for half types. So do these
# formulas; they round where the fused kernels store.


_HALF = (torch.float16, torch.bfloat16)


def _wide(*tensors: Tensor | None) -> list[Tensor | None]:
    return [tensor.float() if tensor is not None and tensor.dtype in _HALF else tensor for tensor in tensors]


def _plus(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product + bias


def _lstm_cell(
    x: Tensor,
    states: list[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    h, c = states
    dtype = c.dtype
    of_x, of_h, b_ih, b_hh, c = _wide(linear(x, w_ih), linear(h, w_hh), b_ih, b_hh, c)
    gates = _plus(of_x, b_ih) + _plus(of_h, b_hh)
    i, f, g, o = gates.chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return h.to(dtype), c.to(dtype)


def _gru_cell(
    x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    dtype = h.dtype
    of_x, of_h, b_ih, b_hh, h = _wide(linear(x, w_ih), linear(h, w_hh), b_ih, b_hh, h)
    of_x, of_h = _plus(of_x, b_ih), _plus(of_h, b_hh)
    (r_x, z_x, n_x), (r_h, z_h, n_h) = of_x.chunk(3, 1), of_h.chunk(3, 1)
    r, z = (r_x + r_h).sigmoid(), (z_x + z_h).sigmoid()
    n = (n_x + r * n_h).tanh()
    return (n + z * (h - n)).to(dtype)


CELLS: dict[Any, Callable[..., Any]] = {aten.lstm_cell.default: _lstm_cell, aten.gru_cell.default: _gru_cell}
"""Operator → its formula, which takes the operator's arguments."""


# Recurrent layers before decomposition → ``tvm_dispatch::recurrent_layers``, which decomposition keeps whole.
#
# Decomposition would unroll ``aten.lstm`` and its like over the steps, and lose the dropout between the layers. So a
# call of several layers with dropout becomes one call per layer, a custom operator without draws, with explicit
# dropouts between them.


def _like_results(cell, x, states, weights, biases, layers, both_ways, batch_first):
    size = states[0].shape[2] * (2 if both_ways else 1)
    steps = x.transpose(0, 1) if batch_first else x
    y = x.new_empty(*steps.shape[:2], size)
    return [y.transpose(0, 1) if batch_first else y, *(torch.empty_like(state) for state in states)]


RECURRENT_LAYERS = own_operator(
    "recurrent_layers(str cell, Tensor x, Tensor[] states, Tensor[] weights, bool biases, int layers, bool both_ways, "
    "bool batch_first) -> Tensor[]",
    None,
    _like_results,
)
"""Whole layers without dropout; ``cell``: the name of torch's operator. Results: the output, then the last states."""


def keep_layers_whole(graph: fx.Graph) -> None:
    """Replaces recurrent layers of a training graph by :data:`RECURRENT_LAYERS`, in place."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in LAYERED or len(node.args) != 9:
            continue
        *_, layers, rate, train, _, _ = node.args
        for part in _split(graph, node) if layers > 1 and rate and train else [node]:
            _keep_whole(graph, part)


def _keep_whole(graph: fx.Graph, node: fx.Node) -> None:
    x, states, weights, biases, layers, _, _, both_ways, batch_first = node.args
    states = states if isinstance(states, list | tuple) else [states]
    cell = schema(node.target).name.removeprefix("aten::")
    arguments = (cell, x, list(states), list(weights), bool(biases), layers, bool(both_ways), bool(batch_first))
    with graph.inserting_before(node):
        made = graph.call_function(RECURRENT_LAYERS, arguments)
    made.meta.update(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _split(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """Replaces a call of several layers by one call per layer, with dropout between them → these calls."""
    x, given, weights, has_biases, layers, rate, _, both_ways, batch_first = node.args
    states = given if isinstance(given, list | tuple) else [given]
    directions = 2 if both_ways else 1
    count = len(weights) // layers
    finals: list[list[fx.Node]] = []
    parts: list[fx.Node] = []

    def call(target: Any, *args: Any) -> fx.Node:
        made = graph.call_function(target, args)
        made.meta.update(told(node))
        return made

    with graph.inserting_before(node):
        if batch_first:  # eager draws the masks time-major
            x = call(aten.transpose.int, x, 0, 1)
        for layer in range(layers):
            if layer:
                x = call(aten.dropout.default, x, rate, True)
            first = layer * directions
            own = [call(aten.slice.Tensor, state, 0, first, first + directions) for state in states]
            part = list(weights[layer * count : (layer + 1) * count])
            hidden = own if isinstance(given, list | tuple) else own[0]
            made = call(node.target, x, hidden, part, has_biases, 1, 0.0, True, both_ways, False)
            parts.append(made)
            x = call(operator.getitem, made, 0)
            finals.append([call(operator.getitem, made, 1 + index) for index in range(len(states))])
        if batch_first:
            x = call(aten.transpose.int, x, 0, 1)
        results = [x, *(call(aten.cat.default, list(group), 0) for group in zip(*finals, strict=True))]
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
    return parts


_LOOKED_UP = frozenset(
    "index index_select index_add index_copy index_fill index_put gather take put scatter scatter_add scatter_reduce "
    "embedding _embedding_bag _embedding_bag_forward_only one_hot repeat_interleave max_unpool2d max_unpool3d "
    "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d embedding_bag ctc_loss take_along_dim bincount "
    "nll_loss_forward nll_loss2d_forward multi_margin_loss multilabel_margin_loss_forward _ctc_loss "
    "histc binary_cross_entropy select_at".split()
)
"""Operators that check numbers and raise an error for some; on a GPU the check is a kernel's assertion."""
_DIVISIONS = frozenset({aten.floor_divide, aten.remainder, aten.fmod, aten.div})
_DECOMPOSED = frozenset({aten.lu_unpack, aten.linalg_vector_norm, aten.linalg_cross, aten.linalg_diagonal})
"""Operators of linear algebra that take any numbers."""


def may_raise(op: object, dtype: torch.dtype, constant_divisor: bool = False) -> bool:
    """Whether an operator with a result of ``dtype`` raises an error for some numbers, so that it must run even if its
    result is unused. Operators of other libraries may."""
    if not isinstance(op, OpOverload) or op.namespace not in ("aten", "tvm_dispatch"):
        return isinstance(op, OpOverload) and op.namespace not in ("prims", "prim", "profiler")
    name = op.overloadpacket.__name__
    if "linalg_" in name or "cholesky" in name or "lstsq" in name:
        return op.overloadpacket not in _DECOMPOSED
    if current_device() != HOST:
        return False
    if op.overloadpacket in _DIVISIONS:
        return not (constant_divisor or dtype.is_floating_point or dtype.is_complex)
    return name in _LOOKED_UP
