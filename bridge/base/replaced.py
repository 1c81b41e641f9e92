"""Replaced attributes: an owner and values by name → set while active, put back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["replaced"]


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """While active, the attributes of ``owner`` that ``values`` names have those values; a class inherits again."""
    inherited = {name for name in values if isinstance(owner, type) and name not in vars(owner)}
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if name in inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
