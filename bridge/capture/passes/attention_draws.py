"""Fused attention of CUDA: a call of a torch operator → its rate of dropout, how far its kernel moves a generator, and
whether it is computed by products, as a formula, in the kernel's place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from autodiff.extents import sample_of
from bridge.base.torch_cuda import attention_may_be_formula, memory_of
from bridge.base.torch_internals import aten, schema
from bridge.base.torch_shapes import hint

__all__ = ["attends_by_products", "attention_advance", "attention_rate", "is_attention"]

_EFFICIENT = aten._scaled_dot_product_efficient_attention.default
_RATE = "dropout_p"
_MOST_WEIGHTS = 2
"""Bytes of attention's weights, as a part of those of queries, keys, values and results, up to which products take
less time and their memory is no matter: 512 rows of 64 elements each."""
_PART_OF_MEMORY = 256
"""Of the GPU, that the weights of one attention take at most."""
_FLASH = 32
"""How far flash attention moves a generator for each head of each element of a batch."""


def is_attention(operator: Any) -> bool:
    """Whether it is tagged as random, and is only where it is asked for dropout."""
    return "scaled_dot_product" in str(operator)


def attention_rate(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """The rate of a call of an operator that :func:`is_attention`."""
    names = [argument.name for argument in schema(operator).arguments]
    place = names.index(_RATE) if _RATE in names else len(args)
    return args[place] if place < len(args) else kwargs.get(_RATE, 0.0)


def attention_advance(operator: Any, query: torch.Tensor, key: torch.Tensor) -> int | torch.SymInt:
    """How far one of CUDA's kernels that drops moves its generator's offset: the rule that was seen to hold.

    For sizes that vary. At the sample it is compared with what was measured, and in each call with where the kernel
    leaves the generator.
    """
    heads = query.shape[0] * query.shape[1]
    if "flash" in str(operator):
        return heads * _FLASH
    return (heads * query.shape[2] * key.shape[2] + 3) // 4 * 4


def attends_by_products(operator: Any, query: Any, key: Any, value: Any, rate: float = 0.0) -> bool:
    """Whether the weights are computed: two products and a softmax take the efficient kernel's place.

    In float32 they take less time, in TF32 a third, and the kernel's dropout is known by a rule
    (:mod:`bridge.rng.attention_mask`); but the weights lie in memory. Where sizes vary, those of the sample decide:
    either is right. Who forbids torch the formula (``torch.backends.cuda.enable_math_sdp``, ``sdpa_kernel``) gets the
    kernel.

    Args:
        query, key, value: tensors or their forms, of (batch, head, row, column).
        rate: of its dropout.
    """
    if operator is not _EFFICIENT or query.dtype != torch.float32 or query.device.type != "cuda":
        return False
    if np.float32(rate) == 1:  # the kernel divides by zero
        return False
    sizes = [[sample_of(hint(extent)) for extent in each.shape] for each in (query, key, value)]
    if any(len(each) != 4 or None in each for each in sizes) or len({tuple(each[:2]) for each in sizes}) > 1:
        return False
    (batch, heads, rows, depth), (*_, columns, _), (*_, width) = sizes
    weights, others = rows * columns, rows * (depth + width) + columns * (depth + width)
    if not 0 < weights <= _MOST_WEIGHTS * others or not attention_may_be_formula():
        return False
    total = memory_of(query.device)
    return total is None or 4 * batch * heads * weights <= total // _PART_OF_MEMORY
