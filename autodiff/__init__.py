"""Reverse-mode differentiation: a Relax function -> its joint function, pure Relax to Relax.

Every pass is a function ``Function -> Function`` in flat form (see :mod:`autodiff.ir`) and returns the same object if
it changed nothing. The usual line: ``clean(differentiate(mask_dropout(spell_out(func)), outputs, require_grads))``.
Given a :class:`Body` instead, a pass edits it: several passes in a row build no function in between.
"""

from autodiff.body import Body
from autodiff.clean import clean, clean_joint
from autodiff.differentiate import differentiate, drop_gradients, seed_vjp, without_grad_outs
from autodiff.dropout import mask_dropout
from autodiff.errors import NoGradient, UndifferentiableOp
from autodiff.layout_propagation import sink_channel_permutes, sink_head_permutes
from autodiff.normalization import spell_out
from autodiff.products import fuse_bias_epilogues, join_products
from autodiff.redundancy import (
    collectives_in_order,
    common_subexpression_elimination,
    dead_code_elimination,
    unique_names,
)
from autodiff.zapp import deduplicate_views, join_pads, one_zapp, zapp_like, zero_zapp

__all__ = ["Body", "NoGradient", "UndifferentiableOp", "clean", "collectives_in_order", "fuse_bias_epilogues"]
__all__ += ["clean_joint", "common_subexpression_elimination", "dead_code_elimination", "sink_channel_permutes"]
__all__ += ["deduplicate_views", "differentiate", "drop_gradients", "join_pads", "join_products"]
__all__ += ["mask_dropout", "one_zapp", "seed_vjp", "sink_head_permutes", "spell_out", "unique_names"]
__all__ += ["without_grad_outs", "zapp_like", "zero_zapp"]
