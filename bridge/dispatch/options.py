"""Installs a dispatcher on its module, and sets its options while an entry is added."""

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
    """The dispatcher installed on the module itself, or ``None``."""
    found = module.__dict__.get(COMPILED_CALL)
    return found if isinstance(found, Dispatcher) else None


@contextmanager
def options_of(dispatcher: Dispatcher, options: DispatchOptions) -> Iterator[None]:
    """Context that gives a dispatcher these options; an exception inside restores the previous ones."""
    before = dispatcher.options
    dispatcher.take(options)
    try:
        yield
    except BaseException:
        dispatcher.take(before)
        raise


def install(module: nn.Module, dispatcher: Dispatcher) -> None:
    """Installs a dispatcher on its module; one that another thread has installed meanwhile adopts the entries."""
    dispatcher.budget.clear()
    with _INSTALLING:  # check and assignment are atomic: no thread overwrites another's dispatcher
        if module.__dict__.get(COMPILED_CALL) is None:
            module.__dict__[COMPILED_CALL] = dispatcher
        installed = module.__dict__[COMPILED_CALL]
    if installed is not dispatcher:
        installed.adopt(dispatcher.entries.all)
        installed.learns |= dispatcher.learns
    mark(module)


def uninstall(module: nn.Module) -> None:
    """Removes the dispatcher from a module."""
    if dispatcher_of(module) is not None:
        module.__dict__.pop(COMPILED_CALL, None)
    unmark(module)  # also if module.compile() has replaced the dispatcher
