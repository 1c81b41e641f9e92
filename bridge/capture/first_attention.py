"""First attention: what a forward gives fused attention first → whether its trace is worth to be gone on with.

Libraries ask whether they are traced, and make attention a mask of ones then where eager gives it none. What is to be
captured is what eager does (:func:`bridge.capture.pipeline.capture`): a trace that goes another way is ended at its
first attention, where most of it is still to be made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from bridge.base.torch_internals import pytree
from bridge.base.torch_shapes import hint
from bridge.capture.call_log import ATTENTION
from bridge.capture.tracing import takes_eagers_branches, times_forward_asked
from bridge.state import constant_key

__all__ = [
    "Attention",
    "FirstAttentionError",
    "TraceEndedError",
    "ended_at_attention",
    "goes_on_with_numbers",
    "is_attempt",
    "not_ended",
    "watched",
]

_thread = threading.local()

_RATE = 4
"""The place of attention's rate of dropout among its arguments."""


class TraceEndedError(Exception):
    """A trace is not wanted any more."""


class Attention(NamedTuple):
    """What a traced forward gives its first attention.

    Attributes:
        arguments: the plain constants, among them ``None`` for no mask.
        drops: whether it drops inside of a kernel, which eager may choose by numbers.
    """

    arguments: tuple
    drops: bool


class FirstAttentionError(TraceEndedError):
    """It has come to the first attention.

    Attributes:
        attention: what it gives it.
    """

    def __init__(self, attention: Attention):
        super().__init__("the trace ends at its first attention")
        self.attention = attention


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
                raise FirstAttentionError(Attention(arguments, _drops_inside(*args, **kwargs)))
        return func(*args, **kwargs)


def _plain(args: tuple, kwargs: dict[str, Any]) -> tuple:
    leaves = pytree.tree_leaves((args, kwargs))
    return tuple(constant_key(hint(leaf)) for leaf in leaves if not isinstance(leaf, torch.Tensor))


def _drops_inside(query: torch.Tensor, *args: Any, dropout_p: float = 0.0, **_: Any) -> bool:
    """Whether attention drops inside of one of a GPU's kernels, as far as that is known before it runs."""
    rate = args[_RATE - 1] if len(args) >= _RATE else dropout_p
    kernels = torch.backends.cuda
    is_fused = kernels.flash_sdp_enabled() or kernels.mem_efficient_sdp_enabled() or kernels.cudnn_sdp_enabled()
    return query.device.type == "cuda" and rate > 0 and query.dtype is not torch.float64 and is_fused


@contextmanager
def ended_at_attention(like: tuple | None = None, numbers: bool = False) -> Iterator[None]:
    """While active, this thread's traces end at their first attention if it could be another in eager's branches.

    Before it, forward has asked whether it is traced. ``like``: in eager's branches, where that is an attempt: if it is
    given these arguments, as it was in the other ones. ``numbers``: where forward reads numbers, the attempt goes on to
    the end.
    """
    asked = times_forward_asked()

    def ends(arguments: tuple) -> bool:
        return times_forward_asked() != asked if like is None else arguments == like

    with _ending(ends, numbers):
        yield


@contextmanager
def _ending(ends: Callable[[tuple], bool] | None, numbers: bool = False) -> Iterator[None]:
    before = getattr(_thread, "ends", None), getattr(_thread, "numbers", False)
    _thread.ends, _thread.numbers = ends, numbers
    try:
        yield
    finally:
        _thread.ends, _thread.numbers = before


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


def goes_on_with_numbers() -> bool:
    """Whether such an attempt is wanted where numbers decide in those branches, too."""
    return getattr(_thread, "numbers", False)
