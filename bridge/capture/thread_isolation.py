"""Thread isolation: one thread captures a module, other threads see no change.

In other threads, a call of the module, or of a module inside it, waits until the capture is over, because ``forward``
may set attributes. Dynamo compiles under the same lock, because its tracers patch the same objects. Patches of torch
(the table of docs/capture.md) check the calling thread, or behave as before in all threads. A user's trace during a
capture is not isolated: ``torch.export``, ``torch.fx`` and ``torch.jit`` take no lock.
"""

from __future__ import annotations

import builtins
import io
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from bridge.base.collector import collection_paused, only_new_objects_collected
from bridge.base.modes import replaced_here, while_active
from bridge.base.threads import free_in_children, held, raise_deferred
from bridge.base.torch_higher_order import no_frames_compiled
from bridge.base.torch_internals import (
    compile_lock,
    len_dispatch_stack,
    len_function_stack,
)
from bridge.state import generators_put_back

__all__ = ["CAPTURES", "is_capturing", "is_traced_here", "one_capture_at_a_time"]
__all__ += ["as_loud_as_eager", "quiet", "recording"]


@contextmanager
def recording() -> Iterator[None]:
    """Context of the runs of a module's twin: the dispatched modules that this thread calls run eager, uncounted."""
    with (
        one_capture_at_a_time(),
        generators_put_back(),
        no_frames_compiled(),
        while_active(CAPTURES, depth=CAPTURES.depth + 1),
    ):
        yield
    raise_deferred()


# Tracing state: whether this thread traces a module; a dispatched module inside then runs as plain PyTorch.


class _Thread(threading.local):
    depth = 0
    unwarned = holds = False
    warnings_go_to: Any = None


CAPTURES = _Thread()
"""Per thread. ``depth``: how many captures of this package it is in; ``holds``: whether it has the lock of tracing;
``unwarned``: whether its warnings are ignored; ``warnings_go_to``: the function that showed warnings before."""


def is_capturing() -> bool:
    """Whether the calling thread is capturing a module for this package."""
    return CAPTURES.depth > 0


def is_traced_here() -> bool:
    """Whether torch traces the calling thread; ``torch.compiler.is_compiling`` speaks for the whole process."""
    if is_capturing() or torch.jit.is_tracing() or torch.compiler.is_dynamo_compiling():
        return True
    if not torch.compiler.is_compiling():
        return False
    return len_function_stack() > 0 or len_dispatch_stack() > 0


_capturing = free_in_children(threading.RLock())


@contextmanager
def one_capture_at_a_time() -> Iterator[None]:
    """Holds the reentrant lock of tracing: one module at a time is captured, or one of Dynamo's graphs."""
    # imports Dynamo before any patch, because Dynamo caches the members of nn.Module that a capture replaces
    with ExitStack() as importing:
        if "torch._dynamo" not in sys.modules:
            importing.enter_context(collection_paused())
        dynamos = compile_lock()
        with held(_capturing), held(dynamos):
            if CAPTURES.holds:  # freezing the collector's objects again would count them all
                importing.close()
                yield
                return
            with while_active(CAPTURES, holds=True), only_new_objects_collected(), _unwarned():
                importing.close()  # the imported objects count as old ones
                yield


# Warnings of the capture's own work → neither shown nor raised, whatever the user's filters say.
#
# The version of the filters stays, so that Python keeps its memory of warnings that it has shown.


class _OfThisThread:
    """A filter's pattern that matches every warning in a thread whose warnings are ignored."""

    def match(self, _text: str) -> bool:
        return CAPTURES.unwarned and _recorder() is CAPTURES.warnings_go_to  # otherwise forward collects warnings


def _recorder() -> Any:
    return getattr(warnings, "_showwarnmsg_impl", None)


_IGNORED = ("ignore", _OfThisThread(), Warning, None, 0)


@contextmanager
def _unwarned() -> Iterator[None]:
    """While active, warnings in this thread are ignored."""
    filters, CAPTURES.warnings_go_to = warnings.filters, _recorder()
    filters.insert(0, _IGNORED)
    try:
        with while_active(CAPTURES, unwarned=True):
            yield
    finally:
        if _IGNORED in filters:
            filters.remove(_IGNORED)


def as_loud_as_eager() -> AbstractContextManager[None]:
    """While active, warnings of this thread are shown: the real run warns as eager does."""
    return while_active(CAPTURES, unwarned=False)


# Quiet runs: a run that eager does not make prints and logs nothing. Other threads are unaffected, because each call
# checks its thread.


_print = print


@contextmanager
def quiet() -> Iterator[None]:
    """While active, this thread prints nothing to the standard streams and logs nothing."""

    def silent(spoken: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("file") not in (None, sys.stdout, sys.stderr):
                return spoken(*args, **kwargs)
            if spoken is _print:  # formats the arguments, which may read numbers
                spoken(*args, **{**kwargs, "file": io.StringIO()})
            elif isinstance(args[-1], logging.LogRecord):
                args[-1].getMessage()
            return None

        return run

    with replaced_here(builtins, print=silent), replaced_here(logging.Logger, handle=silent):
        yield
