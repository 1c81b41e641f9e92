"""Inference: a forward function whose first parameters are frozen -> a function of the rest and of constants.

Partial evaluation by binding times (N. D. Jones, C. K. Gomard, P. Sestoft, 1993): values that depend on the frozen
parameters alone are *static* and computed once; a call computes the *dynamic* rest.

    fold_scales      folds affine maps of channels (BatchNorm) into the weights of the convolution before them
    spell_attention  replaces attention of float32 or float64 by products and a softmax
    merge_products   merges products of one input with several weights
    split_static     one function -> constants(frozen) and call(rest, constants)

Functions are in flat form and simplified; they must not be differentiated afterwards.
"""

from autodiff.attention import spell_attention
from autodiff.inference.fold_scales import fold_scales, merge_products
from autodiff.inference.split_static import Frozen, split_static

__all__ = ["PASSES", "Frozen", "fold_scales", "merge_products", "spell_attention", "split_static"]

PASSES = (fold_scales, merge_products)
"""Passes for every device: (body, number of frozen parameters), edits the body. ``split_static`` comes last."""
