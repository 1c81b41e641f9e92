"""Snapshot of the Python state that a run of ``forward`` may change: everything that the guards would look at.

A compiled call runs no Python. A counter in a settings object, a list that collects losses, a global, a variable of
an enclosing function, Python's random generator: what a run changes at every call a compiled call would not change,
so such a module is refused, and what tracing changed is put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from bridge.state.attribute_reads import AttributeReads
from bridge.state.code import CodeGuard, set_name
from bridge.state.generators import MovedObjects
from bridge.state.module import Snapshot, hooks_of, own_attributes
from bridge.state.reachable import Contents, Reached
from bridge.state.values import kept

__all__ = ["PythonState", "Settling"]


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

    def begin_run(self, instead: Callable[[Any], Any] = lambda value: None) -> None:
        """To be called before the code runs: names of iterators lead to others, until :meth:`end_run`.

        ``instead``: what names of other values lead to; ``None``: to these.
        """
        self._code.take_apart(instead)
        self._moved = MovedObjects(chain(self._own_moving, self._code.named_values()))

    def end_run(self) -> None:
        """Puts back generators of the user's own, which the run drew from, and iterators."""
        self._moved.restore()
        self._code.put_together()

    def written(self) -> Settling:
        """What was written into objects and names that are not the modules' own, whether or not it is as it was."""
        held = (*self._inside, *self._on_tensors, *self._code.contents)
        return Settling([(each, each.again()) for each in held], self._code.set_since())

    def take_back(self) -> Settling | None:
        """Puts back what was written into objects and names that are not the modules' own; gives what does it again."""
        held = [each for each in (*self._inside, *self._on_tensors, *self._code.contents) if not each.unchanged()]
        found = Settling([(each, each.again()) for each in held], self._code.set_since())
        found.undo()
        return found if held or found.names else None

    def restore(self) -> None:
        """Puts back attributes, contents of containers, fields of objects, globals, variables of enclosing scopes."""
        super().restore()
        for contents in (*self._inside, *self._on_tensors):
            contents.restore()
        self._code.restore()
        self._moved.restore()


class Settling:
    """What a first call writes and later ones leave (``self.config.seen.add(name)``): done by the first hit.

    Attributes:
        contents: of each object that is written the contents before and after it.
        names: namespaces, names in them, and their values before and after it.
        done: whether it has been done.
    """

    def __init__(self, contents: Sequence[tuple[Contents, Contents]], names: Sequence[tuple[Any, str, Any, Any]]):
        self.contents, self.names, self.done = contents, names, False

    def is_before(self) -> bool:
        """Whether nothing of it is done."""
        return all(before.unchanged() for before, _ in self.contents) and all(
            (owner.get(name) if isinstance(owner, dict) else getattr(owner, name, None)) is before
            for owner, name, before, _ in self.names
        )

    def changed(self) -> list[str]:
        """What leads to contents that are no longer those after it."""
        return [str(after.place) for _, after in self.contents if not after.unchanged()]

    def do(self) -> None:
        self.done = True
        for _, after in self.contents:
            after.restore()
        for owner, name, _, after in self.names:
            set_name(owner, name, after)

    def undo(self) -> None:
        self.done = False
        for before, _ in self.contents:
            before.restore()
        for owner, name, before, _ in self.names:
            set_name(owner, name, before)


def _in_tuples(value: Any) -> Iterator[Any]:
    """A value, or what a tuple holds, however deep."""
    if isinstance(value, tuple):
        for each in kept(value):
            yield from _in_tuples(each)
    else:
        yield value
