"""Undo: a module and recorded runs of its forward → restores the earlier Python state, inside and outside of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from bridge.guards.kinds import PLAIN, is_a
from bridge.guards.recording import Reads
from bridge.guards.watched import ABSENT, Contents, Name, Place, nested
from bridge.state import is_renewed, same

__all__ = ["Settling", "Snapshot", "Undo", "needs_first_call", "recorded_reads", "undo"]

_active = threading.local()


class Undo:
    """The earlier state of a module and of all places that recorded runs read; see :func:`undo`.

    Attributes:
        runs: the reads of these runs.
        is_later: whether the runs record a later call, after a different first one: then nothing repeats their writes.
    """

    is_later = False

    def __init__(self, module: nn.Module | None):
        self._tree = None if module is None else Snapshot(module)
        self.runs: list[Reads] = []

    def restore(self) -> None:
        """Restores the whole state."""
        for each in reversed(self.runs):
            each.restore()
        if self._tree is not None:
            self._tree.restore()

    def take_back(self) -> Settling | None:
        """Restores the places that the runs wrote; returns the writes to repeat, or ``None``."""
        written: dict[tuple, tuple[Any, Any, Any]] = {}
        for reads in self.runs:
            for key, then in reads.earlier.items():
                item = reads.items[key]
                if key not in written and getattr(item, "running", None) is None:
                    written[key] = item, then, item.read()
        found = [each for each in written.values() if not each[0].same(each[2], each[1])]
        found += [] if self._tree is None else self._tree.places()
        settling = Settling(found)
        settling.undo()
        if not found or self.is_later:
            return None
        settling.reads = [(item, item.read()) for reads in self.runs[:-1] for item in _read_by(reads)]
        return settling


def _read_by(reads: Reads) -> Iterator[Any]:
    """The places that a run has read: outside of modules, and plain attributes of modules."""
    yield from (item for key, item in reads.items.items() if key in reads.first)
    for module, names in [(each(), names) for each, names in reads.modules.values()]:
        held = vars(module)
        for name in held.keys() if "*" in names else held.keys() & names:
            if type(held[name]) in PLAIN:
                yield Name(held, name, Place("attribute", name, reads.place(module).of))


class Snapshot:
    """The Python state of a module tree: finds later changes and undoes them.

    Tensors are compared by identity; the fake run detects in-place changes of tensors.
    """

    def __init__(self, root: nn.Module):
        self._modules = [(name, module, dict(module.__dict__)) for name, module in root.named_modules()]
        held = [
            (module, key, value)
            for _, module, attributes in self._modules
            for key, value in attributes.items()
            if is_a(value, list | dict | set)
        ]
        held += [  # attributes that a user has set on parameters and buffers
            (module, name, vars(tensor))
            for _, module, _ in self._modules
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        ]
        items = [(module, key, Contents(value, Place("", "a container"))) for module, key, value in held]
        self._contents = [(module, key, item, item.read()) for module, key, item in items]

    def changes(self) -> list[str]:
        """Dotted names of attributes that were set, deleted or changed in place since the snapshot."""
        owners = {id(own): name for name, module, _ in self._modules for own in (module, module.__dict__)}
        found = [
            (owners[id(own)], key)
            for own, key, held in self.written()
            if not (held and key in own and same(nested(held[0]), nested(own[key])))
        ]
        for module, key, *held in self._contents:
            if not is_renewed(module, key) and _is_changed(*held):
                found.append((owners[id(module)], key))
        return sorted({f"{path}.{key}" if path else key for path, key in found})

    def has(self, path: str, name: str) -> bool:
        """Whether the module at ``path`` had the attribute."""
        return any(name in attributes for found, _, attributes in self._modules if found == path)

    def written(self) -> Iterator[tuple[dict[str, Any], str, list[Any]]]:
        """Attributes that hold another object than before: dictionary, name, list of the old value (empty: none)."""
        for _, module, before in self._modules:
            own = module.__dict__
            for name in dict.fromkeys((*before, *own)):
                if not is_renewed(module, name) and own.get(name, self) is not before.get(name, self):
                    yield own, name, [before[name]] if name in before else []

    def places(self) -> Iterator[tuple[Any, Any, Any]]:
        """The written attributes, and containers among the attributes, as places with their values then and now."""
        for own, name, held in self.written():
            item = Name(own, name, Place("attribute", name))
            yield item, held[0] if held else ABSENT, item.read()
        for module, key, item, then in self._contents:
            if not is_renewed(module, key) and not item.same(now := item.read(), then):
                yield item, then, now

    def value_of(self, path: str, name: str) -> Any:
        """The old value of an attribute of the module at ``path``, or ``None``."""
        return next(attributes.get(name) for found, _, attributes in self._modules if found == path)

    def restore(self) -> None:
        """Restores every attribute and the contents of every list, dict and set among them."""
        for _, module, before in self._modules:
            attributes = module.__dict__  # never emptied: another thread may be reading it
            for key in attributes.keys() - before.keys():
                del attributes[key]
            attributes.update(before)
        for _, _, item, then in self._contents:
            if _is_changed(item, then):
                item.write(then)


def _is_changed(item: Contents, then: Any) -> bool:
    """Whether a container has other contents than then; the order of a set does not matter."""
    now = item.read()
    return set(now) != set(then) if is_a(item.value, set) else not same(now, then)


class Settling:
    """Writes of a first call that later calls leave alone (``self.config.seen.add(name)``): repeated by the first hit.

    Args:
        places: the written places, with their values before and after.

    Attributes:
        done: whether they have been repeated.
        reads: places that the first call reads, perhaps it alone, with the values that the writes follow.
    """

    def __init__(self, places: Sequence[tuple[Any, Any, Any]]):
        self._places, self.done, self.reads = places, True, ()

    def is_before(self) -> bool:
        """Whether all places hold their values from before the writes."""
        return all(item.same(item.read(), before) for item, before, _ in self._places)

    def do(self) -> None:
        self.done = True
        for item, _, after in self._places:
            item.write(after)

    def undo(self) -> None:
        self.done = False
        for item, before, _ in self._places:
            item.write(before)


@contextmanager
def undo(module: nn.Module | None = None, always: bool = False) -> Iterator[Undo]:
    """Yields an :class:`Undo` of this thread's recorded runs of forward on ``module``; ``None``: on its twins.

    It restores the state after an error; ``always``: after any end.
    """
    made, outer = Undo(module), getattr(_active, "undos", ())
    _active.undos = (*outer, made)
    try:
        yield made
        if always:
            made.restore()
    except BaseException:
        made.restore()
        raise
    finally:
        _active.undos = outer


def needs_first_call() -> None:
    """Notes in each active :func:`undo` that the recorded call is a later one, which differs from the first."""
    for each in getattr(_active, "undos", ()):
        each.is_later = True


def recorded_reads(reads: Reads) -> Reads:
    """Adds the reads of a run to each active :func:`undo`."""
    for each in getattr(_active, "undos", ()):
        each.runs.append(reads)
    return reads
