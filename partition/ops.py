"""Which Relax operators are views, point-wise, row kernels, reductions or products.

The partition never guesses: an operator that is in no table here is treated as one that must not be recomputed.
"""

from __future__ import annotations

__all__ = [
    "CHEAP",
    "CHEAP_LIBRARY",
    "CREATION",
    "DRAWS",
    "PRODUCTS",
    "REDUCTIONS",
    "ROW",
    "SLICES",
    "TRANSCENDENTAL",
    "TRIVIAL",
    "VIEWS",
]


def _relax(names: str) -> frozenset[str]:
    return frozenset("relax." + name for name in names.split())


#: Random draws. A second draw would be another number, so none may be in a joint function at all.
DRAWS = _relax("nn.dropout")

#: Another look at the same elements; nothing to save beyond the base.
VIEWS = _relax("reshape permute_dims expand_dims squeeze broadcast_to flatten nn.batch_flatten split")

#: A part of the same elements: a view, unless copying the part is cheaper than keeping the whole alive.
SLICES = _relax("strided_slice")

#: Expressions that only name something: an alias, a tuple, a constant.
TRIVIAL = frozenset({"Var", "DataflowVar", "Tuple", "TupleGetItem", "Constant", "GenericConst", "ShapeExpr"})

#: Made from nothing, or from scalars.
CREATION = _relax("full zeros ones arange eye hamming_window")

#: Point-wise (or injective) work of an instruction or two an element: fuses into whatever reads it.
CHEAP = _relax(
    "abs add astype bitwise_and bitwise_not bitwise_or bitwise_xor ceil clip concat equal ewise_fma eye_like flip "
    "floor floor_divide floor_mod full_like greater greater_equal isfinite isinf isnan left_shift less less_equal "
    "logical_and logical_not logical_or logical_xor maximum meshgrid minimum mod multiply negative nn.leakyrelu nn.pad "
    "nn.pixel_shuffle nn.prelu nn.relu not_equal one_hot ones_like repeat right_shift round sign slice_scatter "
    "square stack subtract tile tril triu trunc where zeros_like divide sqrt rsqrt layout_transform"
)

#: Point-wise work that calls a transcendental function.
TRANSCENDENTAL = _relax(
    "acos acosh asin asinh atan atan2 atanh cos cosh erf exp log log_add_exp nn.gelu nn.gelu_tanh nn.selu nn.silu "
    "nn.softplus power sigmoid sin sinh tan tanh"
) | {"library.log1p", "library.expm1"}

#: One kernel over rows: a reduction and point-wise work, with a result as large as its input.
ROW = _relax("nn.softmax nn.log_softmax nn.layer_norm nn.rms_norm nn.group_norm nn.instance_norm")

#: Matrix products and their like: recomputed only if the user allows it.
PRODUCTS = _relax(
    "matmul einsum outer nn.conv1d nn.conv2d nn.conv3d nn.conv1d_transpose nn.conv2d_transpose nn.conv3d_transpose "
    "nn.attention nn.attention_bias nn.attention_var_len"
)

#: A few numbers out of many (or a running total): small to keep, and a pass over the operand to compute again.
REDUCTIONS = _relax(
    "argmax argmin collapse_sum_like collapse_sum_to cumprod cumsum max mean median min prod std sum variance "
    "nn.adaptive_avg_pool1d nn.adaptive_avg_pool2d nn.adaptive_avg_pool3d nn.avg_pool1d nn.avg_pool2d nn.avg_pool3d "
    "nn.max_pool1d nn.max_pool2d nn.max_pool3d nn.batch_norm nn.cross_entropy_with_logits nn.nll_loss"
)

#: Library functions that read each element of their result once and compute next to nothing, or are point-wise.
CHEAP_LIBRARY = frozenset({"library.embedding", "library.log1p", "library.expm1"})
