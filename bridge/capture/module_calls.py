"""Calls of a module while it is captured: other threads' wait, this thread's run ``forward`` as it must be traced."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

from torch import nn

from bridge.base.interrupts import raise_deferred
from bridge.base.replaced import replaced
from bridge.base.torch_internals import FakeTensor, pytree
from bridge.capture.passes.cumulative import averages_cumulatively, cumulative_forward
from bridge.capture.patched_globals import here_only
from bridge.capture.tracing import is_capturing

__all__ = ["called_plainly", "calls_wait", "forward_here", "forwards_here", "is_copied_with_its_forward"]


@contextmanager
def forwards_here(root: nn.Module) -> Iterator[None]:
    """Layers that must be traced in another form than they are written run another forward in this thread."""
    layers = [layer for layer in root.modules() if "forward" not in layer.__dict__]
    with ExitStack() as stack:
        for layer in layers:
            if (forward := _forward_here(layer)) is not None:
                stack.enter_context(forward_here(layer, forward))
        yield


@contextmanager
def forward_here(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """While active, ``module`` runs ``forward`` instead of its own in the thread that captures."""
    attributes, own = module.__dict__, module.__dict__.get("forward")
    attributes["forward"] = chosen = here_only(forward, module.forward)
    chosen.is_of_capture = True
    try:
        yield
    finally:
        del attributes["forward"]
        if own is not None:
            attributes["forward"] = own


def is_copied_with_its_forward(module: nn.Module, twin: nn.Module) -> bool:
    """Whether a deep copy runs on its own tensors: a function in the place of forward is no copy of itself.

    What :func:`forward_here` has put there is taken off the copy.
    """
    for original, copied in zip(module.modules(), twin.modules(), strict=True):
        forward = copied.__dict__.get("forward")
        if forward is not None and forward is original.__dict__.get("forward"):
            if not getattr(forward, "is_of_capture", False):
                return False
            del copied.__dict__["forward"]
    return True


def _forward_here(layer: nn.Module) -> Callable[..., Any] | None:
    if averages_cumulatively(layer):
        return MethodType(cumulative_forward, layer)
    if type(layer) in (nn.RNN, nn.LSTM, nn.GRU):  # these note the parameters that they see, here the swapped ones
        twin = object.__new__(type(layer))
        twin.__dict__.update((name, copy.copy(v) if type(v) is list else v) for name, v in layer.__dict__.items())
        return twin.forward
    return None


_PATIENCE = 30
"""Seconds to wait for the end of a capture: the traced forward might wait for the waiting thread."""


@contextmanager
def calls_wait(root: nn.Module) -> Iterator[None]:
    """Calls of ``root`` and of what is inside it that other threads make wait for the end of this context."""
    busy = frozenset(map(id, root.modules()))
    over = threading.Event()
    original = nn.Module.__call__

    @functools.wraps(original)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise_deferred()
        if id(module) in busy and not (over.is_set() or is_capturing() or _is_traced(args, kwargs)):
            over.wait(_PATIENCE)
        return original(module, *args, **kwargs)

    nn.Module.__call__ = call
    try:
        yield
    finally:
        if nn.Module.__call__ is call:  # else someone traces beside us, and will put ours back, which does no harm
            nn.Module.__call__ = original
        over.set()


@contextmanager
def called_plainly(root: nn.Module) -> Iterator[None]:
    """What a ``__call__`` of ``root``'s own class does around ``nn.Module``'s is left out of what is captured.

    It will run around the compiled call, as it runs around ``forward`` now.
    """
    kind = next(base for base in type(root).__mro__ if "__call__" in vars(base))
    if kind.__module__.partition(".")[0] == "torch":
        yield
        return
    written = vars(kind)["__call__"]

    @functools.wraps(written)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = module is root and is_capturing()
        return nn.Module.__call__(module, *args, **kwargs) if plain else written(module, *args, **kwargs)

    with replaced(kind, __call__=call):
        yield


def _is_traced(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether the traced forward itself makes this call, in a thread of its own: it would wait for its own end."""
    return any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((args, kwargs)))
