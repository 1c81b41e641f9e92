"""Dropout of fused attention: a call of one of torch's attention operators → the rate at which its kernel drops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bridge.base.torch_internals import schema

__all__ = ["attention_rate", "is_attention"]

_RATE = "dropout_p"


def is_attention(operator: Any) -> bool:
    """Whether it is tagged as random, and is only where it is asked for dropout."""
    return "scaled_dot_product" in str(operator)


def attention_rate(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """The rate of a call of an operator that :func:`is_attention`."""
    names = [argument.name for argument in schema(operator).arguments]
    place = names.index(_RATE) if _RATE in names else len(args)
    return args[place] if place < len(args) else kwargs.get(_RATE, 0.0)
