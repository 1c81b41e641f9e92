"""Dropout of fused attention: a call of a torch operator → its rate, and how far its kernel moves a generator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bridge.base.torch_internals import schema

__all__ = ["attention_advance", "attention_rate", "is_attention"]

_RATE = "dropout_p"
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
