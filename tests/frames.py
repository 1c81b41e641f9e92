"""Frames of a stack: which module each belongs to, told quickly where the answer is none.

TVMScript's decorators and the samples of torch's operator lists ask ``inspect.stack()``, which asks for the module of
every frame. The frames of a file ``<...>`` (the import system, ``runpy``) belong to none, and ``inspect`` goes through
all modules that there are, some thousands, to find that out: for every such frame, every time.
"""

from __future__ import annotations

import inspect
from types import FrameType, ModuleType
from typing import Any

__all__ = ["quick_getmodule"]

_getmodule = inspect.getmodule


def quick_getmodule(thing: Any, _filename: str | None = None) -> ModuleType | None:
    """What ``inspect.getmodule`` answers."""
    if isinstance(thing, FrameType) and (_filename or thing.f_code.co_filename).startswith("<"):
        return None
    return _getmodule(thing, _filename)
