"""CUDA graphs by the driver: launches on a stream → a graph that launches them again, as one.

The driver is asked itself (``libcuda``, by ctypes): torch's own capture puts the device's default generator into
another state for as long as it lasts, in which draws of other threads raise, and in which a capture that fails leaves
it. Here a capture touches nothing but its stream, and a draw inside of it raises.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from bridge.compile.cuda.driver import DriverError, Kernel, at_any_moment, call, error_name, library, require_context
from bridge.compile.cuda.graph_nodes import KernelNode, fills_by_kernel, node_of
from bridge.compile.cuda.own_kernels import own_kernels

__all__ = ["Graph", "captured", "new_stream"]

_NON_BLOCKING = 1
"""``CU_STREAM_NON_BLOCKING``: the stream does not wait for the legacy default one, nor that for it."""
_THREAD_LOCAL = 1
"""``CU_STREAM_CAPTURE_MODE_THREAD_LOCAL``: what cannot be captured fails in this thread; others go on."""


def new_stream() -> int:
    """A new stream on the current device, which lives as long as the process.

    torch's own are handed out in turns: another thread may work on any of them, and what it launched during a capture
    would be in the graph.
    """
    handle = ctypes.c_void_p()
    with at_any_moment():
        require_context()
        call("cuStreamCreate", ctypes.byref(handle), _NON_BLOCKING)
    return handle.value


class Graph:
    """A graph that can be launched.

    Args:
        graph: the driver's, from now on this one's.

    Attributes:
        is_empty: whether nothing was launched.
        executable: the driver's handle of what is launched.
    """

    def __init__(self, graph: ctypes.c_void_p):
        self._graph, self.executable, nodes = graph, ctypes.c_void_p(), ctypes.c_size_t()
        weakref.finalize(self, _destroy, graph, self.executable).atexit = False
        call("cuGraphGetNodes", graph, None, ctypes.byref(nodes))
        self.is_empty = not nodes.value
        fills_by_kernel(graph, own_kernels(torch.cuda.current_device()).fill)
        with at_any_moment():  # another thread may capture
            call("cuGraphInstantiateWithFlags", ctypes.byref(self.executable), graph, ctypes.c_ulonglong(0))
        self._launch = library().cuGraphLaunch

    def node_of(self, kernel: Kernel) -> KernelNode | None:
        """See :func:`bridge.compile.cuda.graph_nodes.node_of`."""
        return node_of(self._graph, kernel)

    def launcher(self, stream: int) -> Callable[..., None]:
        """What launches it on a stream, whatever it is given. ``DriverError`` if the driver refuses."""
        launch, executable, handle = self._launch, self.executable, ctypes.c_void_p(stream)

        def replay(*_: object, _graph: Graph = self) -> None:
            if status := launch(executable, handle):
                raise DriverError(f"cuGraphLaunch: {error_name(status)}")

        return replay


@contextmanager
def captured(stream: int) -> Iterator[list[Graph]]:
    """What this thread launches on a stream goes into a graph, which the list has afterwards.

    The stream captures no more afterwards, whatever happens.

    Raises:
        DriverError: something was done that cannot be in a graph.
    """
    handle, graph, made = ctypes.c_void_p(stream), ctypes.c_void_p(), []
    call("cuStreamBeginCapture_v2", handle, _THREAD_LOCAL)
    try:
        yield made
    except BaseException:
        library().cuStreamEndCapture(handle, ctypes.byref(graph))  # what went wrong is told already
        _destroy(graph, ctypes.c_void_p())
        _take_pending_errors()
        raise
    call("cuStreamEndCapture", handle, ctypes.byref(graph))
    made.append(Graph(graph))


def _take_pending_errors() -> None:
    """What failed during a capture may have left an error that CUDA's runtime tells whoever asks next."""
    for _ in range(2):
        try:
            torch.empty(1, device="cuda").zero_()
        except RuntimeError:
            continue
        return


def _destroy(graph: ctypes.c_void_p, executable: ctypes.c_void_p) -> None:
    """The last who has a graph may let go of it during a capture."""
    with at_any_moment():
        if executable:
            library().cuGraphExecDestroy(executable)
        if graph:
            library().cuGraphDestroy(graph)
