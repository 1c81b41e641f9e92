"""Tracing state: whether this thread traces a module now; a dispatched module inside then runs as plain PyTorch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from bridge.base.collector import collection_paused, only_new_objects_collected
from bridge.base.interrupts import held
from bridge.base.locks import free_in_children
from bridge.base.torch_internals import (
    compile_lock,
    len_dispatch_stack,
    len_function_stack,
)

__all__ = [
    "CAPTURES",
    "changes_of_generators",
    "is_capturing",
    "is_traced_here",
    "marked_capturing",
    "note_change_of_generator",
    "one_capture_at_a_time",
]


class _Thread(threading.local):
    depth = 0


_thread = _Thread()
CAPTURES = _thread
"""Its ``depth``: how many captures of this package the calling thread is in."""


def is_capturing() -> bool:
    """Whether the calling thread is capturing a module for this package."""
    return _thread.depth > 0


@contextmanager
def marked_capturing() -> Iterator[None]:
    """While active, :func:`is_capturing` in this thread."""
    _thread.depth += 1
    try:
        yield
    finally:
        _thread.depth -= 1


def note_change_of_generator() -> None:
    """To be called when the traced code seeds a generator of torch's, or sets its state."""
    _thread.changes = changes_of_generators() + 1


def changes_of_generators() -> int:
    """How often this thread has called :func:`note_change_of_generator`."""
    return getattr(_thread, "changes", 0)


def is_traced_here() -> bool:
    """Whether torch traces what the calling thread does: ``torch.compiler.is_compiling`` is the whole process's."""
    if is_capturing() or torch.jit.is_tracing() or torch.compiler.is_dynamo_compiling():
        return True
    if not torch.compiler.is_compiling():
        return False
    return len_function_stack() > 0 or len_dispatch_stack() > 0


_capturing = free_in_children(threading.RLock())


@contextmanager
def one_capture_at_a_time() -> Iterator[None]:
    """The lock of those who trace, which a thread may take again: one module is captured, or one of Dynamo's graphs."""
    # Here, since this imports Dynamo, which remembers what it finds in nn.Module, where a capture replaces it.
    with ExitStack() as importing:
        if "torch._dynamo" not in sys.modules:
            importing.enter_context(collection_paused())
        dynamos = compile_lock()
        with held(_capturing), held(dynamos):
            if getattr(_thread, "holds", False):  # to ask for frozen objects is to count them all
                importing.close()
                yield
                return
            _thread.holds = True
            try:
                with only_new_objects_collected():
                    importing.close()  # what was imported is among what there was before
                    yield
            finally:
                _thread.holds = False
