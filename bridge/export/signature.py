"""Signatures of forward ↔ plain data: they say how a call may be spelled (by position, by name, by default)."""

from __future__ import annotations

import inspect
from typing import Any

from bridge.export.plain import from_plain, to_plain

__all__ = ["signature_data", "signature_from"]


def signature_data(signature: inspect.Signature | None) -> list[list[Any]] | None:
    """Name, kind and default of each parameter; ``None`` where a default cannot be told, or there is no signature."""
    if signature is None:
        return None
    try:
        return [
            [each.name, each.kind.name, [] if each.default is each.empty else [to_plain(each.default)]]
            for each in signature.parameters.values()
        ]
    except TypeError:
        return None


def signature_from(data: list[list[Any]] | None) -> inspect.Signature | None:
    """The inverse of :func:`signature_data`. ``ValueError`` for what is no signature."""
    return None if data is None else inspect.Signature([_parameter(*each) for each in data])


def _parameter(name: str, kind: str, default: list[Any]) -> inspect.Parameter:
    value = from_plain(default[0]) if default else inspect.Parameter.empty
    return inspect.Parameter(name, getattr(inspect.Parameter, kind), default=value)
