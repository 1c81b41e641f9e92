"""Options of a dispatch, and its place on a module: partition, ``on_miss``, backend, … → a dispatcher that has them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from bridge.base.threads import free_in_children
from bridge.base.torch_internals import COMPILED_CALL
from bridge.compile import Backend
from bridge.dispatch.dispatcher import Dispatcher
from bridge.dispatch.outer_compiler import mark, unmark

__all__ = ["DispatchOptions", "dispatcher_of", "install", "uninstall"]

_INSTALLING = free_in_children(threading.RLock())


def dispatcher_of(module: nn.Module) -> Dispatcher | None:
    """The dispatcher that lies on a module itself."""
    found = module.__dict__.get(COMPILED_CALL)
    return found if isinstance(found, Dispatcher) else None


@dataclass(frozen=True)
class DispatchOptions:
    """What :func:`bridge.dispatch.api.add_tvm_dispatch` was told, checked."""

    partition: Any
    on_miss: str
    backend: Backend | None
    freeze: bool
    cuda_graphs: Any

    @classmethod
    def of(cls, dispatcher: Dispatcher) -> DispatchOptions:
        """Those that a dispatcher has."""
        graphs = dispatcher.graphs.mode
        return cls(dispatcher.partition, dispatcher.on_miss, dispatcher.backend, dispatcher.freeze, graphs)

    def dispatcher_for(self, module: nn.Module) -> Dispatcher:
        """The module's dispatcher, or a new one that is on no module yet."""
        known = dispatcher_of(module)
        return known or Dispatcher(module, partition=self.partition, on_miss=self.on_miss, backend=self.backend)

    @contextmanager
    def on(self, dispatcher: Dispatcher) -> Iterator[None]:
        """Gives a dispatcher these options; what is raised inside takes them back."""
        before = DispatchOptions.of(dispatcher)
        self.give(dispatcher)
        try:
            yield
        except BaseException:
            before.give(dispatcher)
            raise

    def give(self, dispatcher: Dispatcher) -> None:
        """Sets the options of a dispatcher."""
        dispatcher.partition, dispatcher.on_miss = self.partition, self.on_miss
        dispatcher.backend, dispatcher.freeze = self.backend, self.freeze
        dispatcher.graphs.mode = self.cuda_graphs


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
