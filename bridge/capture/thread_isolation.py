"""Thread isolation: one thread captures a module, the others go on as if nothing happened.

A call of the module itself, or of one inside it, waits in any other thread until the capture is over, since
``forward`` may keep things on the module. Dynamo compiles under the same lock, for its tracers change the same things.
What is replaced in torch meanwhile (the table of docs/capture.md) asks which thread calls, or does for all of them what
it did before. What is left is a trace that the user starts beside a capture: ``torch.export``, ``torch.fx``
and ``torch.jit`` take no lock.
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
from bridge.base.generators import of_gpus
from bridge.base.modes import replaced
from bridge.base.threads import free_in_children, held, raise_deferred
from bridge.base.torch_internals import (
    compile_lock,
    len_dispatch_stack,
    len_function_stack,
    no_frames_compiled,
)
from bridge.base.torch_shapes import pooled_by_division
from bridge.state import generators_put_back

__all__ = ["CAPTURES", "is_capturing", "is_traced_here", "note_change_of_generator", "one_capture_at_a_time"]
__all__ += ["as_loud_as_eager", "quiet", "recording"]


@contextmanager
def recording() -> Iterator[None]:
    """Around the runs of a module's twin: dispatched modules that this thread calls run eager, uncounted."""
    with ExitStack() as stack:
        stack.enter_context(one_capture_at_a_time())
        stack.enter_context(generators_put_back())
        stack.enter_context(_seeds_put_back())
        stack.enter_context(pooled_by_division())
        stack.enter_context(no_frames_compiled())
        stack.enter_context(marked_capturing())
        yield
    raise_deferred()


@contextmanager
def _seeds_put_back() -> Iterator[None]:
    """Undoes what a seed set by the traced code does to the default generators, those of GPUs included.

    Fake tensors draw nothing. A generator that has merely moved on was moved by another thread: put back, it would give
    the same numbers again.
    """
    before = [(generator, generator.initial_seed(), generator.get_state()) for generator in _defaults()]
    changed_before = changes_of_generators()
    try:
        yield
    finally:
        for generator, seed, state in before:
            now = generator.get_state()
            if torch.equal(now, state):
                continue
            fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed()).get_state()
            seeded = generator.initial_seed() != seed or torch.equal(now, fresh)
            if seeded or changes_of_generators() != changed_before:
                generator.set_state(state)


def _defaults() -> list[torch.Generator]:
    return [torch.default_generator, *of_gpus()]


# Tracing state: whether this thread traces a module now; a dispatched module inside then runs as plain PyTorch.


class _Thread(threading.local):
    depth = 0
    unwarned = False
    warnings_go_to: Any = None


CAPTURES = _Thread()
"""Its ``depth``: how many captures of this package the calling thread is in; ``unwarned``: whether it is neither shown
warnings nor raised them; ``warnings_go_to``: what Python showed them by before."""


def is_capturing() -> bool:
    """Whether the calling thread is capturing a module for this package."""
    return CAPTURES.depth > 0


@contextmanager
def marked_capturing() -> Iterator[None]:
    """While active, :func:`is_capturing` in this thread."""
    CAPTURES.depth += 1
    try:
        yield
    finally:
        CAPTURES.depth -= 1


def note_change_of_generator() -> None:
    """To be called when the traced code seeds a generator of torch's, or sets its state."""
    CAPTURES.changes = changes_of_generators() + 1


def changes_of_generators() -> int:
    """How often this thread has called :func:`note_change_of_generator`."""
    return getattr(CAPTURES, "changes", 0)


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
            if getattr(CAPTURES, "holds", False):  # to ask for frozen objects is to count them all
                importing.close()
                yield
                return
            CAPTURES.holds = True
            try:
                with only_new_objects_collected(), _unwarned():
                    importing.close()  # what was imported is among what there was before
                    yield
            finally:
                CAPTURES.holds = False


# Warnings: of what is no run of the user's → neither shown nor raised, whatever the user's filters say.
#
# No count of filters moves, by which Python would forget what it has shown already.


class _OfThisThread:
    """A filter's pattern, which every warning of a thread matches that is not warned."""

    def match(self, _text: str) -> bool:
        return CAPTURES.unwarned and _recorder() is CAPTURES.warnings_go_to  # else forward itself collects them


def _recorder() -> Any:
    return getattr(warnings, "_showwarnmsg_impl", None)


_IGNORED = ("ignore", _OfThisThread(), Warning, None, 0)


@contextmanager
def _unwarned() -> Iterator[None]:
    """While active, warnings in this thread are ignored."""
    filters, CAPTURES.warnings_go_to = warnings.filters, _recorder()
    filters.insert(0, _IGNORED)
    try:
        with _warned_of(False):
            yield
    finally:
        if _IGNORED in filters:
            filters.remove(_IGNORED)


def as_loud_as_eager() -> AbstractContextManager[None]:
    """Around the run on real numbers: what it warns of is what eager warns of."""
    return _warned_of(True)


@contextmanager
def _warned_of(shown: bool) -> Iterator[None]:
    before, CAPTURES.unwarned = CAPTURES.unwarned, not shown
    try:
        yield
    finally:
        CAPTURES.unwarned = before


# Quiet runs: a run that eager does not make → it prints, logs and warns nothing.
#
# Other threads find what was there before, since each call asks which thread it is of.


_print = print
_SPOKEN = (builtins, "print"), (logging.Logger, "handle")


@contextmanager
def quiet() -> Iterator[None]:
    """While active, this thread prints nothing to the standard streams and logs nothing."""
    here = threading.get_ident()

    def silent(spoken: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != here or kwargs.get("file") not in (None, sys.stdout, sys.stderr):
                return spoken(*args, **kwargs)
            if spoken is _print:  # what is printed is read
                spoken(*args, **{**kwargs, "file": io.StringIO()})
            elif isinstance(args[-1], logging.LogRecord):
                args[-1].getMessage()
            return None

        return run

    with ExitStack() as stack:
        for owner, name in _SPOKEN:
            stack.enter_context(replaced(owner, **{name: silent(getattr(owner, name))}))
        yield
