"""Preserved operators: those that ``torch.export``'s decomposition leaves whole, and why."""

from __future__ import annotations

from bridge.base.torch_internals import aten

__all__ = ["COMPUTED_DRAWS", "CUDA_ATTENTION", "PRESERVED", "UPSAMPLES", "WHOLE"]


#: Computed by torch's own kernel, with torch's own derivative: see :mod:`bridge.aten.any_operator`. They are
#: deterministic, functional (no views, no writes), their shapes do not depend on numbers, and a formula of ours would
#: only be another rounding of the same thing.
WHOLE = (
    # shifts (by any count), common divisors, positions in sorted numbers
    aten.__lshift__.Scalar,
    aten.__lshift__.Tensor,
    aten.__rshift__.Scalar,
    aten.__rshift__.Tensor,
    aten.bitwise_left_shift.Scalar_Tensor,
    aten.bitwise_left_shift.Tensor,
    aten.bitwise_left_shift.Tensor_Scalar,
    aten.bitwise_right_shift.Scalar_Tensor,
    aten.bitwise_right_shift.Tensor,
    aten.bitwise_right_shift.Tensor_Scalar,
    aten.bucketize.Scalar,
    aten.bucketize.Tensor,
    aten.gcd.default,
    aten.histc.default,
    aten.lcm.default,
    aten.nonzero_static.default,
    aten.repeat_interleave.Tensor,
    aten.searchsorted.Scalar,
    aten.searchsorted.Tensor,
    # torch has no derivative of these: a backward through them is its error
    aten.floor_divide.Scalar,
    aten.floor_divide.default,
    aten.remainder.Scalar_Tensor,
    # special functions, and element-wise ones with singular points
    *(aten.angle.default, aten.clamp.Tensor, aten.copysign.Tensor, aten.copysign.Scalar, aten.cumprod.default),
    *(aten.digamma.default, aten.erfinv.default, aten.frexp.Tensor, aten.hardsigmoid.default, aten.hypot.default),
    *(aten.i0.default, aten.igamma.default, aten.igammac.default, aten.ldexp.Tensor, aten.lgamma.default),
    *(aten.logaddexp.default, aten.logaddexp2.default, aten.mvlgamma.default, aten.nextafter.default),
    *(aten.polygamma.default, aten.round.decimals, aten.signbit.default, aten.special_airy_ai.default),
    *(aten.special_bessel_j0.default, aten.special_bessel_j1.default, aten.special_entr.default),
    *(aten.special_erfcx.default, aten.special_i0e.default, aten.special_i1.default, aten.special_i1e.default),
    *(aten.special_log_ndtr.default, aten.special_ndtri.default, aten.special_xlog1py.default),
    *(aten.special_xlog1py.other_scalar, aten.special_xlog1py.self_scalar, aten.xlogy.Scalar_Other),
    *(aten.xlogy.Scalar_Self, aten.xlogy.Tensor),
    # linear algebra with one answer; factors that are free up to signs (eigenvectors, QR, SVD) are not among it
    *(aten._cdist_forward.default, aten._linalg_det.default, aten._linalg_slogdet.default),
    *(aten._linalg_solve_ex.default, aten.cholesky.default, aten.cholesky_inverse.default),
    *(aten.cholesky_solve.default, aten.inverse.default, aten.linalg_cholesky.default),
    *(aten.linalg_cholesky_ex.default, aten.linalg_inv.default, aten.linalg_inv_ex.default, aten.linalg_lu.default),
    *(aten.linalg_lu_factor.default, aten.linalg_lu_factor_ex.default, aten.linalg_lu_solve.default),
    *(aten.linalg_matrix_exp.default, aten.linalg_pinv.atol_rtol_tensor, aten.linalg_solve.default),
    *(aten.linalg_solve_ex.default, aten.linalg_solve_triangular.default, aten.linalg_tensorinv.default),
    *(aten.linalg_tensorsolve.default, aten.lu_unpack.default, aten.trace.default, aten.triangular_solve.default),
    # losses, sampling, scans, reductions and writes with ties
    *(aten._ctc_loss.default, aten._ctc_loss.Tensor, aten._pdist_forward.default, aten._trilinear.default),
    *(aten.argmax.default, aten.argmin.default, aten.dist.default, aten.fractional_max_pool2d.default),
    *(aten.fractional_max_pool3d.default, aten.grid_sampler_2d.default, aten.grid_sampler_3d.default),
    *(aten.huber_loss.default, aten.index_fill.int_Tensor, aten.index_reduce.default, aten.logcumsumexp.default),
    *(aten.masked_scatter.default, aten.max.default, aten.max_pool2d_with_indices_backward.default),
    *(aten.max_unpool2d.default, aten.max_unpool3d.default, aten.median.default, aten.min.default),
    *(aten.multi_margin_loss.default, aten.multilabel_margin_loss_forward.default, aten.nanmedian.default),
    *(aten.prod.default, aten.prod.dim_int, aten.put.default, aten.renorm.default, aten.segment_reduce.default),
    *(aten.smooth_l1_loss.default, aten.soft_margin_loss.default),
)

#: Draws whose distribution's parameters are tensors; each is made in its place, by torch's operator.
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
    aten._standard_gamma.default,
)

#: Slopes that ``rrelu`` draws where its argument is negative: as many numbers as there are such elements.
SLOPE_DRAWS = (aten.rrelu_with_noise.default, aten.rrelu_with_noise_.default, aten.rrelu_with_noise_functional.default)

#: CUDA's fused kernels, which drop inside.
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

#: Their decompositions only add noise, or are right going forward but, differentiated, give nan (or another number)
#: where torch's own backward formula has none.
PRESERVED = (
    *WHOLE,
    *COMPUTED_DRAWS,
    *CUDA_ATTENTION,
    aten.hann_window.default,  # some torch decomposes it; as other windows, it is a constant
    aten.hann_window.periodic,
    aten.linalg_householder_product.default,
    aten.ormqr.default,
    *(overload for packet in UPSAMPLES for overload in (packet.default, packet.vec)),
    aten.linalg_vector_norm.default,  # decomposed since torch 2.14, with other gradients at nan
    aten.linear.default,
    aten.matmul.default,
    aten._safe_softmax.default,
    aten._weight_norm_interface.default,  # of half types, torch's kernel computes in float32 and rounds once
    aten._prelu_kernel.default,  # its weight's gradient would multiply by what it does not depend on
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten.adaptive_avg_pool1d.default,
    aten.addcdiv.default,
    aten.addcmul.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.celu.default,
    aten.cosine_similarity.default,
    aten.exp2.default,
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
    aten._embedding_bag_forward_only.default,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.scatter_reduce.two,
    aten.logsumexp.default,
    aten.roll.default,  # taken apart into positions, whose gradient adds up
    aten.mish.default,
    aten.nan_to_num.default,
    aten.nansum.default,
    aten.one_hot.default,  # in torch 2.11 its decomposition checks no class
    aten.silu.default,
    aten.sinc.default,
    aten.softplus.default,
    aten.softshrink.default,
    aten.std.correction,
    aten.std_mean.correction,
    aten.threshold.default,
    aten.var.correction,
    aten.var_mean.correction,
)
