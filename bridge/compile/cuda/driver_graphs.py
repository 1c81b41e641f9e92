"""CUDA graphs by the driver: launches on a stream → a graph that launches them again, as one; its nodes.

The driver is called directly (``libcuda``, by ctypes): torch's own capture changes the state of the device's default
generator, so that draws in other threads raise during the capture, and after a failed one. Here a capture affects only
its stream, and a draw inside it raises.

Nodes of a captured graph: memory fills by the copy engine → fills by a kernel; a kernel's argument → a new one. In a
graph, a kernel waits some three microseconds for the copy engine's fill, as in attention's backward and some
convolutions; after a kernel's fill, it starts at once.

Driver calls that raise on errors, a thread's context, kernels from machine code. Kernels of this package that belong to
no program: copies, numbers from the host, fills, each as a launch with one argument.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from bridge.base.torch_internals import VF
from bridge.compile.cuda.nvrtc import compiled

__all__ = ["MOST", "MOST_NUMBERS", "NUMBERS", "THREADS", "VECTOR", "Copies", "DriverError", "ExecutableGraph", "Fill"]
__all__ += ["KernelNode", "LoadedKernel", "NumberCopies", "OwnKernels", "at_any_moment", "call", "captured"]
__all__ += ["error_name", "fills_by_kernel", "kernels", "library", "new_stream", "node_of", "own_kernels"]
__all__ += ["require_context"]

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


MOST = 8
"""Targets of one copying launch."""
MOST_NUMBERS = 128
"""Targets of one launch with sources in its argument, which the driver limits to 4096 bytes."""
THREADS = 256
VECTOR = 16
"""Bytes that a thread copies or fills at once."""
NUMBERS = 16
"""Maximum bytes from the host for one target."""

_SOURCE = f"""
struct Copies {{ const char* from[{MOST}]; char* to[{MOST}]; long long bytes[{MOST}]; }};
struct Numbers {{ char* to[{MOST_NUMBERS}]; char from[{MOST_NUMBERS}][{NUMBERS}]; int bytes[{MOST_NUMBERS}]; }};
struct Fill {{ char* to; long long bytes; unsigned int word; }};

extern "C" __global__ void __launch_bounds__({THREADS}) bridge_copy(Copies copies) {{
  const char* from = copies.from[blockIdx.y];
  char* to = copies.to[blockIdx.y];
  long long vectors = copies.bytes[blockIdx.y] / {VECTOR}, rest = copies.bytes[blockIdx.y] % {VECTOR};
  long long first = (long long)blockIdx.x * {THREADS} + threadIdx.x;
  for (long long i = first; i < vectors; i += (long long)gridDim.x * {THREADS})
    ((int4*)to)[i] = ((const int4*)from)[i];
  if (first < rest) to[vectors * {VECTOR} + first] = from[vectors * {VECTOR} + first];
}}

extern "C" __global__ void bridge_bring(Numbers numbers) {{
  if (threadIdx.x < numbers.bytes[blockIdx.x])
    numbers.to[blockIdx.x][threadIdx.x] = numbers.from[blockIdx.x][threadIdx.x];
}}

extern "C" __global__ void __launch_bounds__({THREADS}) bridge_fill(Fill fill) {{
  long long vectors = fill.bytes / {VECTOR}, rest = fill.bytes % {VECTOR};
  long long first = (long long)blockIdx.x * {THREADS} + threadIdx.x;
  int4 four = make_int4(fill.word, fill.word, fill.word, fill.word);
  for (long long i = first; i < vectors; i += (long long)gridDim.x * {THREADS}) ((int4*)fill.to)[i] = four;
  if (first < rest) fill.to[vectors * {VECTOR} + first] = (char)(fill.word >> 8 * (first % 4));
}}
"""


class Copies(ctypes.Structure):
    """Argument of a copy: sources and targets, aligned for vectors."""

    _fields_ = (
        ("source", ctypes.c_void_p * MOST),
        ("target", ctypes.c_void_p * MOST),
        ("nbytes", ctypes.c_longlong * MOST),
    )


class NumberCopies(ctypes.Structure):
    """Argument of a copy of numbers: targets, with the bytes in the argument itself."""

    _fields_ = (
        ("target", ctypes.c_void_p * MOST_NUMBERS),
        ("source", ctypes.c_char * NUMBERS * MOST_NUMBERS),
        ("nbytes", ctypes.c_int * MOST_NUMBERS),
    )


class Fill(ctypes.Structure):
    """Argument of a fill with a repeated four-byte word."""

    _fields_ = (("target", ctypes.c_void_p), ("nbytes", ctypes.c_longlong), ("word", ctypes.c_uint))


class OwnKernels(NamedTuple):
    """This package's kernels on one device."""

    copy: LoadedKernel
    bring: LoadedKernel
    fill: LoadedKernel


@functools.cache
def own_kernels(index: int) -> OwnKernels:
    """The kernels of a device, which must be current."""
    major, minor = torch.cuda.get_device_capability(index)
    return OwnKernels(*kernels(compiled(_SOURCE, f"sm_{major}{minor}"), ("bridge_copy", "bridge_bring", "bridge_fill")))


_KERNEL, _MEMSET = 0, 2
"""``CU_GRAPH_NODE_TYPE_KERNEL``, ``CU_GRAPH_NODE_TYPE_MEMSET``."""
_MOST_BLOCKS = 1024
_WHOLE = {1: 0x01010101, 2: 0x00010001, 4: 1}
"""Bytes of an element → the factor that repeats it to four bytes."""


class _Memset(ctypes.Structure):
    """``CUDA_MEMSET_NODE_PARAMS``."""

    _fields_ = (
        ("target", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("size", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class _KernelParams(ctypes.Structure):
    """``CUDA_KERNEL_NODE_PARAMS``."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
    )


class _Launch:
    """A kernel's launch with one argument, in the form of a graph's node."""

    def __init__(self, kernel: LoadedKernel, blocks: tuple[int, int], threads: int, argument: ctypes.Structure):
        self._argument = argument
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        grid, block, first = (*blocks, 1), (threads, 1, 1), ctypes.addressof(self._arguments)
        self._params = _KernelParams(kernel.function, grid, block, 0, first, None)
        self.params = ctypes.byref(self._params)


class KernelNode:
    """The node of one launch of a kernel, with one argument.

    Args:
        node: of a graph that outlives this object.
    """

    def __init__(self, node: ctypes.c_void_p, kernel: LoadedKernel):
        self._node, self._kernel = node, kernel

    def updater(
        self, executable: ctypes.c_void_p, blocks: tuple[int, int], threads: int, argument: ctypes.Structure
    ) -> Callable[[], None]:
        """A function that sets this argument, with its bytes at the call, for later launches of a graph's instance.

        It raises ``DriverError`` if the driver refuses.
        """
        launch = _Launch(self._kernel, blocks, threads, argument)
        given, update = (executable, self._node, launch.params), library().cuGraphExecKernelNodeSetParams

        def renew(_launch: _Launch = launch) -> None:
            if status := update(*given):
                raise DriverError(f"cuGraphExecKernelNodeSetParams: {error_name(status)}")

        return renew


def node_of(graph: ctypes.c_void_p, kernel: LoadedKernel) -> KernelNode | None:
    """The first node that launches a kernel of this package, or ``None``."""
    for node in _listed("cuGraphGetNodes", graph):
        if _kind(node) == _KERNEL and _function(node) == kernel.function.value:
            return KernelNode(node, kernel)
    return None


def _function(node: ctypes.c_void_p) -> int | None:
    """The handle of the function that a node launches; ``None`` for a newer kind of handle."""
    params = _KernelParams()
    try:
        call("cuGraphKernelNodeGetParams", node, ctypes.byref(params))
    except DriverError:
        return None
    return params.function


def fills_by_kernel(graph: ctypes.c_void_p, fill: LoadedKernel) -> int:
    """Replaces one-row memset nodes by fill kernels; returns their number.

    Raises:
        DriverError: the graph is unusable.
    """
    require_context()
    return sum(_replaced(graph, node, fill) for node in _listed("cuGraphGetNodes", graph) if _kind(node) == _MEMSET)


def _kind(node: ctypes.c_void_p) -> int:
    kind = ctypes.c_int()
    call("cuGraphNodeGetType", node, ctypes.byref(kind))
    return kind.value


def _replaced(graph: ctypes.c_void_p, node: ctypes.c_void_p, fill: LoadedKernel) -> bool:
    memset = _Memset()
    call("cuGraphMemsetNodeGetParams", node, ctypes.byref(memset))
    if memset.height != 1 or (memset.target or 0) % VECTOR or memset.size not in _WHOLE:
        return False
    try:
        before, behind = (_listed(f"cuGraphNodeGet{name}", node) for name in ("Dependencies", "DependentNodes"))
    except DriverError:  # an edge that does not wait for the node's end
        return False
    nbytes = memset.size * memset.width
    argument = Fill(memset.target, nbytes, memset.value * _WHOLE[memset.size] & 0xFFFFFFFF)
    blocks = min(max(1, -(-nbytes // (VECTOR * THREADS))), _MOST_BLOCKS)
    made, launch = ctypes.c_void_p(), _Launch(fill, (blocks, 1), THREADS, argument)
    call("cuGraphAddKernelNode", ctypes.byref(made), graph, _array(before), _count(before), launch.params)
    call("cuGraphAddDependencies", graph, _array([made] * len(behind)), _array(behind), _count(behind))
    call("cuGraphDestroyNode", node)
    return True


def _listed(name: str, of: ctypes.c_void_p) -> list[ctypes.c_void_p]:
    """The nodes that a driver function lists."""
    count = ctypes.c_size_t()
    call(name, of, None, ctypes.byref(count))
    found = (ctypes.c_void_p * count.value)()
    if count.value:
        call(name, of, found, ctypes.byref(count))
    return [ctypes.c_void_p(each) for each in found]


def _array(nodes: list[ctypes.c_void_p]) -> ctypes.Array:
    return (ctypes.c_void_p * len(nodes))(*[node.value for node in nodes])


def _count(nodes: list[ctypes.c_void_p]) -> ctypes.c_size_t:
    return ctypes.c_size_t(len(nodes))


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
        self._graph, self.executable, nodes = graph, ctypes.c_void_p(), ctypes.c_size_t()
        weakref.finalize(self, _destroy, graph, self.executable).atexit = False
        call("cuGraphGetNodes", graph, None, ctypes.byref(nodes))
        self.is_empty = not nodes.value
        fills_by_kernel(graph, own_kernels(torch.cuda.current_device()).fill)
        with at_any_moment():  # another thread may be capturing
            call("cuGraphInstantiateWithFlags", ctypes.byref(self.executable), graph, ctypes.c_ulonglong(0))
        self._launch = library().cuGraphLaunch

    def node_of(self, kernel: LoadedKernel) -> KernelNode | None:
        """See :func:`bridge.compile.cuda.driver_graphs.node_of`."""
        return node_of(self._graph, kernel)

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
