"""The C library's heap: free pages that it keeps → given back to the system."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

__all__ = ["give_back_pages"]


def give_back_pages() -> None:
    """Gives back the whole pages that are free, where the C library can (glibc); they are in between others' memory.

    A tensor that is freed leaves a hole. The small objects that live on, nodes of autograd's graph, take its beginning,
    and the next tensor of the size does not fit: a loop without a single tensor that stays fills the memory with holes.
    """
    if (trim := _trim()) is not None:
        trim(0)


@cache
def _trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
