"""Canonical form of a key: classes, operators, layouts, structures, plain values → the same data in any process."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import torch

from bridge.base.devices import name_of
from bridge.base.torch_internals import OpOverload, pytree
from bridge.state import kept

__all__ = ["NotCanonicalError", "canonical"]

_BY_NAME = (torch.dtype, torch.layout, torch.memory_format)


class NotCanonicalError(TypeError):
    """Something whose name in another process is not known."""


def canonical(value: Any) -> Any:
    """Plain data (see :func:`bridge.artifact.key_of`), equal in all processes, and on all GPUs, for what is the same.

    Raises:
        NotCanonicalError: for an object of any other kind.
    """
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, _BY_NAME):
        return ["torch", str(value)]
    if isinstance(value, torch.device):
        return ["device", name_of(value)]
    if isinstance(value, OpOverload):
        return ["operator", str(value)]
    if isinstance(value, pytree.TreeSpec):
        return ["structure", canonical(value.type), canonical(value.context), list(map(canonical, value.children()))]
    if isinstance(value, type):
        return ["class", value.__module__, value.__qualname__]
    if isinstance(value, tuple | list):
        return [type(value).__qualname__, *map(canonical, kept(value))]
    if isinstance(value, set | frozenset):
        return ["set", *sorted(map(canonical, kept(value)), key=repr)]
    if type(value) is dict:
        return ["dict", *([canonical(key), canonical(each)] for key, each in value.items())]
    if is_dataclass(value) and value.__dataclass_params__.frozen:
        return [canonical(type(value)), *([each.name, canonical(getattr(value, each.name))] for each in fields(value))]
    raise NotCanonicalError(f"{type(value)} has no form that is the same in every process")
