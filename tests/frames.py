"""Fast look-ups for stack frames: a frame's module, and its line of source.

TVMScript's decorators and the samples of torch's operator lists ask ``inspect.stack()``, which asks for the module of
every frame. The frames of a file ``<...>`` (the import system, ``runpy``) belong to none, and ``inspect`` goes through
all modules that there are, some thousands, to find that out: for every frame of that kind, every time.

A stack as text, which torch makes for every mode of fake tensors and for every ``torch.manual_seed``, asks the file
system about the file of every frame: whether it has changed. pytest's frames are many, and their files do not change.
"""

from __future__ import annotations

import inspect
import linecache
import os
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch

_getmodule, _checkcache = inspect.getmodule, linecache.checkcache

_STAY = (
    *(str(folder) + os.sep for folder in (Path(torch.__file__).parents[1], Path(os.__file__).parent)),
    str(Path(__file__).parents[1]) + os.sep,
)
"""Folders of installed packages, of Python itself, and this tree: files in them do not change while tests run."""


def quick_getmodule(thing: Any, _filename: str | None = None) -> ModuleType | None:
    """The result of ``inspect.getmodule``."""
    if isinstance(thing, FrameType) and (_filename or thing.f_code.co_filename).startswith("<"):
        return None
    return _getmodule(thing, _filename)


def quick_checkcache(filename: str | None = None) -> None:
    """``linecache.checkcache`` for files that may change."""
    if filename is None or not filename.startswith(_STAY):
        _checkcache(filename)
