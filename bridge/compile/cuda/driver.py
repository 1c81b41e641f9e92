"""CUDA's driver by ctypes: calls that raise what it answers, a thread's context, kernels of machine code."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

__all__ = ["DriverError", "LoadedKernel", "at_any_moment", "call", "error_name", "kernels", "library"]
__all__ += ["require_context"]

_RELAXED = 2
"""``CU_STREAM_CAPTURE_MODE_RELAXED``: a thread in it may do what concerns no captured stream."""
_INVALID_CONTEXT = 201


class DriverError(RuntimeError):
    """The driver refused a call."""


@functools.cache
def library() -> ctypes.CDLL:
    """``libcuda``."""
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: object) -> None:
    """Calls a function; ``DriverError`` with what it answers, if that is no success."""
    status = getattr(library(), name)(*arguments)
    if status:
        raise DriverError(f"{name}: {error_name(status)}")


def error_name(status: int) -> str:
    """As in ``"CUDA_ERROR_INVALID_VALUE"``."""
    name = ctypes.c_char_p()
    library().cuGetErrorName(status, ctypes.byref(name))
    return name.value.decode() if name.value else f"error {status}"


def require_context() -> None:
    """Makes the current device's context this thread's, as CUDA's runtime does when a thread first calls it."""
    context, device = ctypes.c_void_p(), ctypes.c_int()
    call("cuCtxGetCurrent", ctypes.byref(context))
    if not context:
        call("cuDeviceGet", ctypes.byref(device), torch.cuda.current_device())
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        call("cuCtxSetCurrent", context)


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


class LoadedKernel:
    """A kernel that is loaded on a device, for as long as the process lives.

    Attributes:
        function: the driver's handle.
    """

    def __init__(self, function: ctypes.c_void_p):
        self.function, self._launch = function, library().cuLaunchKernel

    def __call__(self, blocks: tuple[int, int], threads: int, argument: ctypes.Structure, stream: int) -> None:
        """Launches it with one argument, whose bytes are read before this returns.

        Raises:
            DriverError: the driver refuses.
        """
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        given = (self.function, *blocks, 1, threads, 1, 1, 0, ctypes.c_void_p(stream), arguments, None)
        status = self._launch(*given)
        if status == _INVALID_CONTEXT:  # the thread has done nothing on the device yet
            require_context()
            status = self._launch(*given)
        if status:
            raise DriverError(f"cuLaunchKernel: {error_name(status)}")


def kernels(code: bytes, names: Sequence[str]) -> list[LoadedKernel]:
    """Loads a cubin's kernels on the current device."""
    module, found = ctypes.c_void_p(), []
    with at_any_moment():
        require_context()
        call("cuModuleLoadData", ctypes.byref(module), code)
        for name in names:
            function = ctypes.c_void_p()
            call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
            found.append(LoadedKernel(function))
    return found
