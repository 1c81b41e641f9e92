"""Decomposition of normalizations: a function -> the same in the operators that normalizations are made of."""

from __future__ import annotations

from autodiff.batch_norm import spell_batch_norm
from autodiff.body import Body, on_functions
from autodiff.group_norm import spell_group_norm, spell_instance_norm
from autodiff.layer_norm import spell_layer_norm
from autodiff.rewrite import rewrite
from autodiff.rms_norm import spell_rms_norm

__all__ = ["spell_out"]

SPELLINGS = {
    "relax.nn.layer_norm": [spell_layer_norm],
    "relax.nn.batch_norm": [spell_batch_norm],
    "relax.nn.group_norm": [spell_group_norm],
    "relax.nn.instance_norm": [spell_instance_norm],
    "relax.nn.rms_norm": [spell_rms_norm],
}


@on_functions
def spell_out(body: Body) -> None:
    """Normalizations become mean, centred variance, rstd, multiply and add.

    Safe: each is replaced by its definition. Why: TVM has no gradients for them, and a partitioner can then save the
    row statistics (mean, rstd) instead of wide tensors.
    """
    rewrite(body, SPELLINGS)
