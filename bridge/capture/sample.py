"""Sample call: what a user gives as a sample → positional and keyword arguments."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["normalize_sample"]


def normalize_sample(sample_input: Any, sample_kwargs: dict[str, Any] | None) -> tuple[tuple, dict[str, Any]]:
    """``(args, kwargs)`` of the sample call: a tensor is one argument, a tuple the positional, a dict the keyword ones.

    Raises:
        TypeError: for anything else, or keyword arguments given twice.
    """
    kwargs = dict(sample_kwargs or {})
    if isinstance(sample_input, torch.Tensor):
        return (sample_input,), kwargs
    if isinstance(sample_input, tuple):
        return sample_input, kwargs
    if isinstance(sample_input, dict):
        twice = sorted(set(sample_input) & set(kwargs))
        if twice:
            raise TypeError(f"sample_kwargs repeats what sample_input gives: {', '.join(map(str, twice))}")
        return (), {**sample_input, **kwargs}
    raise TypeError(
        "sample_input: wanted a tensor (one positional argument), a tuple (positional arguments) or a dict "
        f"(keyword arguments), got {type(sample_input).__name__}"
    )
