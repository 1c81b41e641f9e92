"""Parts of an entry as plain data: steps of a call, draws, outputs, module tensors ↔ what JSON holds.

Frozen dataclasses of a closed list are written by name and field, torch's types by name; anything else is refused.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import torch

from bridge.base.torch_internals import pytree
from bridge.capture import Draw, Operand, Operation, Output, Parameter, Place, Recomputed
from bridge.dispatch import STEPS
from bridge.export.structure import structure_of, to_structure
from bridge.state import ModuleTensor

__all__ = ["from_plain", "to_plain"]

_PARTS = (Draw, ModuleTensor, Operand, Operation, Output, Parameter, Place, Recomputed)
_CLASSES = {kind.__name__: kind for kind in (*STEPS, *_PARTS)}
_TORCH = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


def to_plain(value: Any) -> Any:
    """What JSON holds. ``TypeError`` for anything that cannot be told without the user's code."""
    if value is None or type(value) in (bool, int):
        return value
    if isinstance(value, str):
        return str(value)
    if type(value) is float:
        return value if math.isfinite(value) else {"is": "float", "value": repr(value)}
    if type(value) in (tuple, torch.Size):
        return [to_plain(item) for item in value]
    if type(value) in (list, frozenset):
        return {"is": type(value).__name__, "items": [to_plain(item) for item in value]}
    if isinstance(value, pytree.TreeSpec):
        return {"is": "structure", "value": to_structure(value)}
    if isinstance(value, torch.device):
        return {"is": "device", "value": str(value)}
    for name, kind in _TORCH.items():
        if isinstance(value, kind):
            return {"is": name, "value": str(value).removeprefix("torch.")}
    if type(value) in _CLASSES.values():
        return {"is": type(value).__name__} | {each.name: to_plain(getattr(value, each.name)) for each in fields(value)}
    raise TypeError(f"a value of class {type(value).__name__}")


def from_plain(plain: Any) -> Any:
    """The inverse of :func:`to_plain`. ``ValueError`` for what is none of those that it makes."""
    if isinstance(plain, list):
        return tuple(from_plain(item) for item in plain)
    if not isinstance(plain, dict):
        return plain
    name = plain.get("is")
    if name == "structure":
        return structure_of(plain["value"])
    given = {key: from_plain(item) for key, item in plain.items() if key != "is"}
    if name in ("list", "frozenset"):
        return (list if name == "list" else frozenset)(given["items"])
    if name == "float":
        return float(given["value"])
    if name == "device":
        return torch.device(given["value"])
    if name in _TORCH:
        found = getattr(torch, given["value"], None)
        if isinstance(found, _TORCH[name]):
            return found
    if name not in _CLASSES or given.keys() != {each.name for each in fields(_CLASSES[name])}:
        raise ValueError(f"wanted a part of an entry, got {name!r} with {', '.join(given)}")
    return _CLASSES[name](**given)
