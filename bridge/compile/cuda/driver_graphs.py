"""CUDA graphs by the driver: launches on a stream → a graph that launches them again, as one.

The driver is called directly (``libcuda``, by ctypes): torch's own capture changes the state of the device's default
generator, so that draws in other threads raise during the capture, and after a failed one. Here a capture affects only
its stream, and a draw inside it raises.

Driver calls that raise on errors, a thread's context, kernels from machine code.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from bridge.base.torch_internals import VF

__all__ = ["DriverError", "ExecutableGraph", "LoadedKernel", "at_any_moment", "call", "captured", "error_name"]
__all__ += ["kernels", "library", "new_stream", "require_context"]

_RELAXED = 2
"""``CU_STREAM_CAPTURE_MODE_RELAXED``: allows a thread all calls that do not touch a capturing stream."""
_INVALID_CONTEXT = 201


class DriverError(RuntimeError):
    """The driver refused a call."""


@functools.cache
def library() -> ctypes.CDLL:
    """``libcuda``."""
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: object) -> None:
    """Calls a driver function; ``DriverError`` with the error's name if it fails."""
    status = getattr(library(), name)(*arguments)
    if status:
        raise DriverError(f"{name}: {error_name(status)}")


def error_name(status: int) -> str:
    """The name of a status, as in ``"CUDA_ERROR_INVALID_VALUE"``."""
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
    """Allows this thread to allocate and free memory while a stream is being captured, by any thread; otherwise the
    driver would refuse, and end that capture."""
    mode = ctypes.c_int(_RELAXED)
    library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


class LoadedKernel:
    """A kernel that stays loaded on a device for the process's lifetime.

    Attributes:
        function: the driver's handle.
    """

    def __init__(self, function: ctypes.c_void_p):
        self.function, self._launch = function, library().cuLaunchKernel

    def __call__(self, blocks: tuple[int, int], threads: int, argument: ctypes.Structure, stream: int) -> None:
        """Launches the kernel with one argument, whose bytes are read before this returns.

        Raises:
            DriverError: the driver refuses.
        """
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        given = (self.function, *blocks, 1, threads, 1, 1, 0, ctypes.c_void_p(stream), arguments, None)
        status = self._launch(*given)
        if status == _INVALID_CONTEXT:  # the thread's first use of the device
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


_NON_BLOCKING = 1
"""``CU_STREAM_NON_BLOCKING``: no implicit synchronization with the legacy default stream."""
_THREAD_LOCAL = 1
"""``CU_STREAM_CAPTURE_MODE_THREAD_LOCAL``: a call that cannot be captured fails in this thread only."""


def new_stream() -> int:
    """A new stream on the current device, for the process's lifetime.

    torch hands out its own streams repeatedly: another thread's launches on the same stream would get into a capture.
    """
    handle = ctypes.c_void_p()
    with at_any_moment():
        require_context()
        call("cuStreamCreate", ctypes.byref(handle), _NON_BLOCKING)
    return handle.value


class ExecutableGraph:
    """A graph that can be launched.

    Args:
        graph: the driver's handle, owned by this object from now on.

    Attributes:
        is_empty: whether the graph has no nodes.
        executable: the driver's handle of the instance.
    """

    def __init__(self, graph: ctypes.c_void_p):
        self.executable, nodes = ctypes.c_void_p(), ctypes.c_size_t()
        weakref.finalize(self, _destroy, graph, self.executable).atexit = False
        call("cuGraphGetNodes", graph, None, ctypes.byref(nodes))
        self.is_empty = not nodes.value
        require_context()
        with at_any_moment():  # another thread may be capturing
            call("cuGraphInstantiateWithFlags", ctypes.byref(self.executable), graph, ctypes.c_ulonglong(0))
        self._launch = library().cuGraphLaunch

    def launcher(self, stream: int) -> Callable[..., None]:
        """A function that launches the graph on a stream, and ignores its arguments; raises ``DriverError``."""
        launch, executable, handle = self._launch, self.executable, ctypes.c_void_p(stream)

        def replay(*_: object, _graph: ExecutableGraph = self) -> None:
            if status := launch(executable, handle):
                raise DriverError(f"cuGraphLaunch: {error_name(status)}")

        return replay


@contextmanager
def captured(stream: int) -> Iterator[list[ExecutableGraph]]:
    """Captures this thread's launches on a stream into a graph, which the list contains afterwards.

    The capture ends in any case.

    Raises:
        DriverError: an operation cannot be captured.
    """
    handle, graph, made = ctypes.c_void_p(stream), ctypes.c_void_p(), []
    call("cuStreamBeginCapture_v2", handle, _THREAD_LOCAL)
    try:
        yield made
    except BaseException:
        library().cuStreamEndCapture(handle, ctypes.byref(graph))  # the exception has the error already
        _destroy(graph, ctypes.c_void_p())
        _take_pending_errors()
        raise
    call("cuStreamEndCapture", handle, ctypes.byref(graph))
    made.append(ExecutableGraph(graph))


def _take_pending_errors() -> None:
    """Clears an error that a failed capture left in CUDA's runtime, which would surface at the next call."""
    for _ in range(2):
        try:
            VF.empty(1, device="cuda").zero_()
        except RuntimeError:
            continue
        return


def _destroy(graph: ctypes.c_void_p, executable: ctypes.c_void_p) -> None:
    """Destroys a graph; a capture may be under way when its last reference goes."""
    with at_any_moment():
        if executable:
            library().cuGraphExecDestroy(executable)
        if graph:
            library().cuGraphDestroy(graph)
