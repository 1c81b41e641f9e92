"""A dispatcher's place on its module, and its options for the time that something is added."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from bridge.base.threads import free_in_children
from bridge.base.torch_internals import COMPILED_CALL
from bridge.dispatch.dispatcher import Dispatcher, DispatchOptions
from bridge.dispatch.outer_compiler import mark, unmark

__all__ = ["dispatcher_of", "install", "options_of", "uninstall"]

_INSTALLING = free_in_children(threading.RLock())


def dispatcher_of(module: nn.Module) -> Dispatcher | None:
    """The dispatcher that lies on a module itself."""
    found = module.__dict__.get(COMPILED_CALL)
    return found if isinstance(found, Dispatcher) else None


@contextmanager
def options_of(dispatcher: Dispatcher, options: DispatchOptions) -> Iterator[None]:
    """Gives a dispatcher these options; what is raised inside takes them back."""
    before = dispatcher.options
    dispatcher.take(options)
    try:
        yield
    except BaseException:
        dispatcher.take(before)
        raise


def install(module: nn.Module, dispatcher: Dispatcher) -> None:
    """Puts a dispatcher on its module. One that another thread has put there meanwhile takes over what it has."""
    dispatcher.budget.clear()
    with _INSTALLING:  # or one thread takes off, for the None that it has seen, what another one has put there since
        if module.__dict__.get(COMPILED_CALL) is None:
            module.__dict__[COMPILED_CALL] = dispatcher
        installed = module.__dict__[COMPILED_CALL]
    if installed is not dispatcher:
        installed.adopt(dispatcher.entries.all)
        installed.learns |= dispatcher.learns
    mark(module)


def uninstall(module: nn.Module) -> None:
    """Takes the dispatcher off a module."""
    if dispatcher_of(module) is not None:
        module.__dict__.pop(COMPILED_CALL, None)
    unmark(module)  # where module.compile() has taken the dispatcher's place, too
