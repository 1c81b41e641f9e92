"""Sample call: what a user gives as a sample → positional and keyword arguments, decided by forward's signature."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["normalize_sample"]

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def normalize_sample(
    module: nn.Module, sample_input: Any, sample_kwargs: Mapping[str, Any] | None
) -> tuple[tuple, dict[str, Any]]:
    """``(args, kwargs)`` of the sample call.

    A tensor is one argument; a tuple or a list the positional arguments; a mapping (a dict, an ``OrderedDict``, a
    ``UserDict``, transformers' ``BatchEncoding``) the keyword arguments; ``None`` beside ``sample_kwargs`` nothing. A
    list, a named tuple or a mapping that does not fit forward's signature in this way is its one positional argument
    if it fits in that way.

    Raises:
        TypeError: for anything else, for keyword arguments given twice, and for a sample that fits the signature in
            both ways; the message has both spellings.

    Example:
        >>> normalize_sample(nn.Linear(3, 2), {"input": x}, None)
        ((), {'input': x})
    """
    if sample_kwargs is not None and not isinstance(sample_kwargs, Mapping):
        raise TypeError(f"sample_kwargs: wanted a mapping of keyword arguments, got {type(sample_kwargs).__name__}")
    kwargs = dict(sample_kwargs or {})
    if isinstance(sample_input, torch.Tensor):
        return (sample_input,), kwargs
    if type(sample_input) is tuple:
        return sample_input, kwargs
    if sample_input is None and sample_kwargs is not None:
        return (), kwargs
    if isinstance(sample_input, tuple | list):
        return _sequence(module, sample_input, kwargs)
    if isinstance(sample_input, Mapping):
        return _mapping(module, sample_input, kwargs)
    raise TypeError(
        "sample_input: wanted a tensor (one positional argument), a tuple or a list (positional arguments) or a "
        f"mapping (keyword arguments), got {type(sample_input).__name__}"
    )


def _sequence(module: nn.Module, sample: tuple | list, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    several = tuple(sample), kwargs
    if not _takes_one(module, sample, kwargs):
        return several
    if not _fits(module, *several):
        return (sample,), kwargs
    kind = type(sample).__name__
    raise TypeError(
        f"sample_input: a {kind} of {len(sample)} can be {_forward(module)}'s positional arguments, or one argument. "
        f"Give sample_input=tuple(sample) for module(*sample), sample_input=(sample,) for module(sample)"
    )


def _mapping(module: nn.Module, sample: Mapping, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    twice = sorted(map(str, set(sample) & set(kwargs)))
    fits_as_one = _takes_one(module, sample, kwargs)
    if all(isinstance(name, str) for name in sample):
        several = (), {**sample, **kwargs}
        named = set(sample) & set(_named(module))
        fits = not twice and _fits(module, *several)
        if fits and (named or not fits_as_one or not sample):
            return several
        if not fits_as_one:
            if twice:
                raise TypeError(f"sample_kwargs repeats what sample_input gives: {', '.join(twice)}")
            return several  # fits in no way: who calls it says what is wrong
        if fits:
            raise TypeError(
                f"sample_input: a mapping with the keys {', '.join(sample)} can be {_forward(module)}'s keyword "
                "arguments, or one argument. Give sample_input=(), sample_kwargs=dict(sample) for module(**sample), "
                "sample_input=(sample,) for module(sample)"
            )
        if named:
            reason = "some of its keys are names of parameters, and it does not fit them"
            raise TypeError(
                f"sample_input: a mapping with the keys {', '.join(sample)} for {_forward(module)}: {reason}. Give the "
                "keyword arguments that it takes, or sample_input=(sample,) for module(sample)"
            )
    return (sample,), kwargs


def _takes_one(module: nn.Module, sample: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a parameter of its own takes the sample; ``*args`` takes anything, and says nothing."""
    return _fits(module, (sample,), kwargs) and any(
        each.kind not in _VARIADIC for each in list(inspect.signature(module.forward).parameters.values())[:1]
    )


def _fits(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> bool:
    try:
        inspect.signature(module.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):  # what is written in C has no signature
        return False
    return True


def _named(module: nn.Module) -> list[str]:
    """The names of forward's parameters, but those that take any further argument."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [each.name for each in parameters if each.kind not in _VARIADIC]


def _forward(module: nn.Module) -> str:
    return f"{type(module).__name__}.forward{inspect.signature(module.forward)}"
