"""First attention: what a forward gives fused attention first → whether its trace is worth to be gone on with.

Libraries ask whether they are traced, and make attention a mask of ones then where eager gives it none. What is to be
captured is what eager does (:func:`bridge.capture.pipeline.capture`): a trace that goes another way is ended at its
first attention, where most of it is still to be made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bridge.base.torch_internals import pytree
from bridge.base.torch_shapes import hint
from bridge.capture.call_log import ATTENTION
from bridge.capture.tracing import takes_eagers_branches, times_forward_asked
from bridge.state import constant_key

__all__ = ["FirstAttentionError", "TraceEndedError", "ended_at_attention", "is_attempt", "not_ended", "watched"]

_thread = threading.local()


class TraceEndedError(Exception):
    """A trace is not wanted any more."""


class FirstAttentionError(TraceEndedError):
    """It has come to the first attention.

    Attributes:
        arguments: the plain constants that it gives it, among them ``None`` for no mask.
    """

    def __init__(self, arguments: tuple):
        super().__init__("the trace ends at its first attention")
        self.arguments = arguments


class _Watch(TorchFunctionMode):
    """While active, raises :class:`FirstAttentionError` at the first attention, where ``ends(arguments)``."""

    def __init__(self, ends: Callable[[tuple], bool]):
        super().__init__()
        self.ends: Callable[[tuple], bool] | None = ends

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.ends is not None and getattr(func, "__name__", "") == ATTENTION:
            ends, self.ends = self.ends, None
            arguments = _plain(args, kwargs)
            if ends(arguments):
                raise FirstAttentionError(arguments)
        return func(*args, **kwargs)


def _plain(args: tuple, kwargs: dict[str, Any]) -> tuple:
    leaves = pytree.tree_leaves((args, kwargs))
    return tuple(constant_key(hint(leaf)) for leaf in leaves if not isinstance(leaf, torch.Tensor))


@contextmanager
def ended_at_attention(like: tuple | None = None) -> Iterator[None]:
    """While active, this thread's traces end at their first attention if it could be another in eager's branches.

    Before it, forward has asked whether it is traced. ``like``: in eager's branches, where that is an attempt: if it is
    given these arguments, as it was in the other ones.
    """
    asked = times_forward_asked()

    def ends(arguments: tuple) -> bool:
        return times_forward_asked() != asked if like is None else arguments == like

    with _ending(ends):
        yield


@contextmanager
def _ending(ends: Callable[[tuple], bool] | None) -> Iterator[None]:
    before = getattr(_thread, "ends", None)
    _thread.ends = ends
    try:
        yield
    finally:
        _thread.ends = before


def not_ended() -> AbstractContextManager:
    """While active, this thread's traces go on to their end."""
    return _ending(None)


def watched() -> AbstractContextManager:
    """The mode that a trace of this thread runs under."""
    ends = getattr(_thread, "ends", None)
    return nullcontext() if ends is None else _Watch(ends)


def is_attempt() -> bool:
    """Whether a trace of this thread is one in eager's branches, in whose place the other ones may be traced."""
    return takes_eagers_branches() and getattr(_thread, "ends", None) is not None
