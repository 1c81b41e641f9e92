"""CUDA's driver: ``libcuda`` by ctypes, for what torch does not hand on."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["DriverError", "at_any_moment", "call", "library", "name_of"]

_RELAXED = 2
"""``CU_STREAM_CAPTURE_MODE_RELAXED``: a thread in it may do what concerns no captured stream."""


class DriverError(RuntimeError):
    """The driver refused a call."""


@functools.cache
def library() -> ctypes.CDLL:
    """The library. ``OSError`` where there is no driver."""
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: object) -> None:
    """Calls a function of the driver. ``DriverError`` if it refuses."""
    status = getattr(library(), name)(*arguments)
    if status:
        raise DriverError(f"{name}: {name_of(status)}")


def name_of(status: int) -> str:
    """Of an error, as in ``"CUDA_ERROR_INVALID_VALUE"``."""
    name = ctypes.c_char_p()
    library().cuGetErrorName(status, ctypes.byref(name))
    return name.value.decode() if name.value else f"error {status}"


@contextmanager
def at_any_moment() -> Iterator[None]:
    """For what takes or frees memory: where this or another thread captures a stream, the driver would refuse it, and
    end that capture."""
    mode = ctypes.c_int(_RELAXED)
    library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
