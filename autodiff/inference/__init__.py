"""Inference: a forward function whose first parameters stay as they are -> a function of those and one of the rest.

Partial evaluation by binding times (N. D. Jones, C. K. Gomard, P. Sestoft, 1993): what depends on the frozen parameters
alone is *static* and computed once; the *dynamic* rest is what a call computes.

    fold_scales      affine maps of channels (BatchNorm) go into the weights of the convolution before them
    spell_attention  attention of float32 becomes products and a softmax
    merge_products   products of one input with several weights become one
    split_static     one function -> constants(frozen) and call(rest, constants)

Relax -> Relax, as all of :mod:`autodiff`; functions are in its flat form, simplified before. Nothing of them is to be
differentiated.
"""

from autodiff.attention import spell_attention
from autodiff.inference.fold_scales import fold_scales, merge_products
from autodiff.inference.split_static import Frozen, split_static

__all__ = ["PASSES", "Frozen", "fold_scales", "merge_products", "spell_attention", "split_static"]

PASSES = (fold_scales, merge_products)
"""On every device. Body and number of frozen parameters; each edits the body. ``split_static`` comes last."""
