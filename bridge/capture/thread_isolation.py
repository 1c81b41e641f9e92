"""Thread isolation: one thread captures a module, other threads see no change.

In other threads, a call of the module, or of a module inside it, waits until the capture is over, because ``forward``
may set attributes. Dynamo compiles under the same lock, because its tracers patch the same objects. Patches of torch
(the table of docs/capture.md) check the calling thread, or behave as before in all threads. A user's trace during a
capture is not isolated: ``torch.export``, ``torch.fx`` and ``torch.jit`` take no lock.
"""

from __future__ import annotations

import ast
import builtins
import io
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F

from bridge.base.collector import collection_paused, only_new_objects_collected
from bridge.base.modes import replaced_here, while_active
from bridge.base.threads import free_in_children, held, raise_deferred
from bridge.base.torch_higher_order import no_frames_compiled
from bridge.base.torch_internals import (
    VF,
    TensorBase,
    compile_lock,
    len_dispatch_stack,
    len_function_stack,
)
from bridge.state import generators_put_back


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


# Functions of torch that a user has replaced: torch's own in their place, where torch itself calls them by name.
#
# A replacement usually calls the function that it replaces. With a mode of torch functions, that function announces
# itself by its public name, which is the replacement by then; called for it, the replacement would be applied twice.
# torch's decompositions also call functions by name where eager runs an operator in C that calls none.


_TORCH = os.path.dirname(torch.__file__) + os.sep
_ANNOUNCES = torch.overrides.handle_torch_function.__code__


def _is_torchs(function: Any) -> bool:
    return type(function) is not FunctionType or function.__code__.co_filename.startswith(_TORCH)


_BY_CODE = {
    each.__code__: each
    for owner in (F, torch.functional, torch.Tensor)
    for each in vars(owner).values()
    if type(each) is FunctionType and _is_torchs(each)
}


def own_function(function: Any) -> Any:
    """torch's own function in place of a replacement, for a mode of torch functions, which calls this.

    A function in Python has announced itself from the frame before; a method in C has the replacement's name.
    """
    if _is_torchs(function):
        return function
    frame = sys._getframe(2)
    if frame.f_code is _ANNOUNCES:
        code = frame.f_back.f_code
        if not code.co_filename.startswith(_TORCH):  # a user's function, with a protocol of its own
            return function
        return _BY_CODE.get(code) or FunctionType(code, frame.f_back.f_globals, code.co_name)
    name = next((name for name, each in vars(torch.Tensor).items() if each is function), "")
    return getattr(TensorBase, name, function)


def replacements() -> dict[Any, dict[str, Any]]:
    """``torch`` and ``torch.Tensor`` → their functions that are replaced, by name, each with torch's own."""
    found = {}
    for owner, own_of in ((torch, _function_called), (torch.Tensor, _method_called)):
        names = [name for name, each in vars(owner).items() if not _is_torchs(each)]
        found[owner] = {name: own for name in names if (own := own_of(name)) is not None}
    return {owner: own for owner, own in found.items() if own}


@contextmanager
def functions_of_torch(found: dict[Any, dict[str, Any]] | None = None) -> Iterator[None]:
    """While active, this thread finds torch's own functions and methods of tensors in place of replacements.

    ``found``: the result of :func:`replacements`, if it is known.
    """
    with ExitStack() as stack:
        for owner, own in (replacements() if found is None else found).items():
            made = {name: partial(_either, each) for name, each in own.items()}
            stack.enter_context(replaced_here(owner, **made))
        yield


def _either(own: Any, replacement: Any) -> Any:
    return own


def _function_called(name: str) -> Any:
    own = getattr(torch.functional, name, None)
    return own if own is not None and _is_torchs(own) else getattr(VF, name, None)


def _method_called(name: str) -> Any:
    return None if name in _python_methods() else getattr(TensorBase, name, None)


@cache
def _python_methods() -> frozenset[str]:
    """The methods of ``torch.Tensor`` that torch defines in Python, from its source: a replacement hides them."""
    with open(os.path.join(_TORCH, "_tensor.py"), encoding="utf-8") as source:
        (kind,) = (each for each in ast.parse(source.read()).body if getattr(each, "name", None) == "Tensor")
    assigned = [each.targets[0].id for each in kind.body if isinstance(each, ast.Assign)]
    return frozenset([*assigned, *(each.name for each in kind.body if isinstance(each, ast.FunctionDef))])
