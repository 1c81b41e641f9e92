"""Snapshot of the Python state that a run of ``forward`` may change: everything that the guards would look at.

A compiled call runs no Python. A counter in a settings object, a list that collects losses, a global, a variable of
an enclosing function, Python's random generator: what a run changes at every call a compiled call would not change,
so such a module is refused, and what tracing changed is put back.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from bridge.state.attribute_reads import AttributeReads
from bridge.state.code import CodeGuard
from bridge.state.generators import MovedObjects
from bridge.state.module import Snapshot, hooks_of, own_attributes
from bridge.state.reachable import Contents, Reached
from bridge.state.values import kept

__all__ = ["PythonState"]


class PythonState(Snapshot):
    """A snapshot that looks further: into what attributes hold, and at what the modules' code refers to."""

    def __init__(self, root: nn.Module):
        super().__init__(root)
        modules = dict(root.named_modules())
        self._registered = list(modules.values())
        reached = Reached(registered=frozenset(modules.values()))
        for path, module in modules.items():
            for name, value in own_attributes(module):
                reached.add(f"{path}.{name}" if path else name, value)
            for kind, hook in hooks_of(module) if path else ():
                reached.add(f"{path}.{kind}", hook)
        self._inside: list[Contents] = reached.contents
        self._on_tensors = [
            Contents(f"{path}.{name}" if path else name, vars(tensor))
            for path, module in modules.items()
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        ]
        self._objects = reached.objects
        self._code = CodeGuard(dict.fromkeys((*map(type, modules.values()), *reached.kinds)), reached.functions)
        self._own_moving = [(f"self.{place}", value) for place, value in reached.moving]
        self._moved = MovedObjects(chain(self._own_moving, self._code.named_values()))

    def changes(self) -> list[str]:
        """What was set, deleted or changed in place since: ``"self.log"``, ``"global 'COUNT'"``."""
        inside = [each.place for each in (*self._inside, *self._on_tensors) if not each.unchanged()]
        attributes = [f"self.{name}" for name in sorted({*super().changes(), *inside})]
        return list(dict.fromkeys((*attributes, *self._code.differences(), *self._moved.moved())))

    def tensors(self) -> list[torch.Tensor]:
        """Tensors in attributes, in what those hold and in what the code refers to; parameters and buffers are none."""
        attributes = (value for module in self._registered for _, value in own_attributes(module))
        values = chain(attributes, *(contents.values for contents in self._inside), self._code.values())
        return [each for value in values for each in _in_tuples(value) if isinstance(each, torch.Tensor)]

    def attribute_reads(self) -> AttributeReads:
        """What will be read, in runs that are watched, of the objects that the modules hold."""
        return AttributeReads(self._objects)

    def mentions(self, *names: str) -> bool:
        """Whether one of these names occurs in the code."""
        return self._code.mentions(*names)

    def begin_run(self) -> None:
        """To be called before the code runs: names of iterators lead to others, until :meth:`end_run`."""
        self._code.take_apart()
        self._moved = MovedObjects(chain(self._own_moving, self._code.named_values()))

    def end_run(self) -> None:
        """Puts back generators of the user's own, which the run drew from, and iterators."""
        self._moved.restore()
        self._code.put_together()

    def restore(self) -> None:
        """Puts back attributes, contents of containers, fields of objects, globals, variables of enclosing scopes."""
        super().restore()
        for contents in (*self._inside, *self._on_tensors):
            contents.restore()
        self._code.restore()
        self._moved.restore()


def _in_tuples(value: Any) -> Iterator[Any]:
    """A value, or what a tuple holds, however deep."""
    if isinstance(value, tuple):
        for each in kept(value):
            yield from _in_tuples(each)
    else:
        yield value
