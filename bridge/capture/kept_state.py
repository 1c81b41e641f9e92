"""Kept state: places that every call of forward sets → their values, as further results of the call.

``self.aux_loss = loss``, ``self.dist = Normal(mean, std)``, ``features["x"] = out`` in a hook: the compiled call
returns these values beside the module's results and puts them where eager does. That is exact if a run with the places
empty does the same, because then forward reads none of the old values. A tensor that forward reads, and sets to one
with the same metadata (``self.hidden = step(x, self.hidden)``), is an input as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import is_
from types import CellType
from typing import Any

import torch
from torch import nn

from bridge.base.pytrees import packed
from bridge.base.torch_internals import pytree
from bridge.capture.twin import Twin
from bridge.guards import ABSENT, ClosureCell, Contents, Name, Reads, Slot, Snapshot, slot_of


@dataclass(frozen=True)
class KeptPlace:
    """A place that every call sets.

    Attributes:
        name: its name for messages.
        path: dotted path of the module whose attribute it is; ``None`` for a place outside of modules.
        holder: the dictionary, list, object or cell of the run that holds it; ``original``: the user's.
        key: its name or key in the holder; ``None`` for all contents of a list or a cell.
        is_read: whether calls read the last call's value.
        appends: the number of entries that a call appends to a list; 0: the call makes all of them.
    """

    name: str
    path: str | None
    holder: Any
    original: Any
    key: Any = None
    is_read: bool = False
    appends: int = 0

    def read(self) -> Any:
        holder = self.holder
        if isinstance(holder, dict):
            return dict.get(holder, self.key, ABSENT)
        if isinstance(holder, list):
            return list(holder)
        if isinstance(holder, CellType):
            return holder.cell_contents
        return slot_of(holder, self.key)

    def leave(self, value: Any, holder: Any) -> None:
        """Leaves a value in a holder as a call does: appends or sets it."""
        if self.appends:
            list.extend(holder, value)
        else:
            self.write(value, holder)

    def write(self, value: Any, holder: Any) -> None:
        """Sets the place in a holder to a value; ``ABSENT`` empties it."""
        if isinstance(holder, dict):
            if value is ABSENT:
                dict.pop(holder, self.key, None)
            else:
                dict.__setitem__(holder, self.key, value)
        elif isinstance(holder, list):
            list.__setitem__(holder, slice(None), () if value is ABSENT else value)
        elif isinstance(holder, CellType):
            if value is ABSENT:
                del holder.cell_contents
            else:
                holder.cell_contents = value
        elif value is ABSENT:
            object.__delattr__(holder, self.key)
        else:
            object.__setattr__(holder, self.key, value)


@dataclass(frozen=True)
class KeptState:
    """All places that a call sets."""

    places: Sequence[KeptPlace]

    @property
    def carried(self) -> list[str]:
        """Paths of the attributes that calls read and set."""
        return [each.name.removeprefix("self.") for each in self.places if each.is_read]

    def of(self, twin: Twin) -> KeptState:
        """The same places in a twin of the module that ran."""
        return KeptState([replace(each, holder=twin.in_place_of(each.holder)) for each in self.places])

    def values(self) -> list[Any]:
        """The places' values; ``ValueError`` if a list that was emptied has not ``appends`` entries."""
        values = [each.read() for each in self.places]
        for each, value in zip(self.places, values, strict=True):
            if each.appends and len(value) != each.appends:
                raise ValueError(f"{each.name} grows otherwise where it is empty")
        return values

    def empty(self) -> None:
        """Empties the places that are not read."""
        for each in self.places:
            if not each.is_read:
                each.write(ABSENT, each.holder)

    def last(self) -> list[Any]:
        """The values that the last call left."""
        return [each.read()[-each.appends :] if each.appends else each.read() for each in self.places]

    @staticmethod
    def constants(values: list[Any]) -> tuple[Any, list[Any]]:
        """The structure of values, and the leaves that are no tensors."""
        leaves, spec = pytree.tree_flatten(packed(values))
        return spec, [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    @contextmanager
    def absent(self) -> Iterator[None]:
        """While active, the places that are not read are empty."""
        before = [(each, each.read()) for each in self.places]
        self.empty()
        try:
            yield
        finally:
            for each, value in before:
                each.write(value, each.holder)

    def put_back(self, first: Reads) -> None:
        """Restores the places outside of the module from before the first run; lists that it made become empty."""
        items = [(item, first.first[key]) for key, item in first.items.items() if key in first.first]
        for each in self.places:
            for item, then in items if each.path is None else ():
                held = next((getattr(item, name) for name in ("space", "cell", "value") if hasattr(item, name)), None)
                if held is each.original and isinstance(item, Contents) and isinstance(held, dict):
                    value = dict(then).get(each.key, ABSENT)
                elif held is each.original and getattr(item, "name", None) == each.key:
                    value = then
                else:
                    continue
                if getattr(item, "running", None) is None:
                    each.write(value, each.original)
                break
            else:
                if isinstance(each.original, list):
                    each.write(ABSENT, each.original)

    def reading_tensors(self, earlier: Snapshot, paths: Collection[str] | None = None) -> KeptState:
        """The same places; attributes (all, or ``paths``) that held a tensor with the same metadata count as read."""

        def is_carried(each: KeptPlace) -> bool:
            if paths is not None and each.name.removeprefix("self.") not in paths:
                return False
            then, now = (None, None) if each.path is None else (earlier.value_of(each.path, each.key), each.read())
            if not (isinstance(then, torch.Tensor) and isinstance(now, torch.Tensor)):
                return False
            return (then.shape, then.dtype, then.requires_grad) == (now.shape, now.dtype, now.requires_grad)

        return KeptState([replace(each, is_read=is_carried(each)) for each in self.places])


def kept_state(twin: nn.Module, before: Snapshot, reads: Reads, counted: Sequence[str]) -> KeptState | None:
    """The places that a run has set; ``None`` if it changed state in another way as well.

    Args:
        twin: the module that ran; ``before``: its state before; ``reads``: state outside of it that the run read.
        counted: dotted names of attributes that it counts up.
    """
    modules, found, inside = dict(twin.named_modules()), [], set()
    for name in before.changes():
        path, _, key = name.rpartition(".")
        held = modules[path].__dict__ if path in modules else {}
        if f"self.{name}" in counted:
            continue
        if key not in held or key in _REGISTRIES:
            return None
        if type(held[key]) in _NUMBERS or not before.has(path, key):
            return None
        if held[key] is before.value_of(path, key):
            inside.add(f"self.{name}")
        else:
            found.append(KeptPlace(f"self.{name}", path, held, None, key))
    seen: set[tuple[int, Any]] = set()
    for key, then in reads.first.items():
        item = reads.items[key]
        now = item.read(run=True)
        if now is then or item.same(now, then) or item.place.changed in counted:
            continue
        inside.discard(item.place.changed)
        for holder, original, name in _places(item, then, now):
            if original is None:
                return None
            if (id(holder), name) not in seen:
                seen.add((id(holder), name))
                grown = isinstance(holder, list) and len(then) < len(now) and all(map(is_, then, now))
                appends = len(now) - len(then) if grown else 0
                found.append(KeptPlace(item.place.changed, None, holder, original, name, appends=appends))
    return None if inside else KeptState(found)


_NUMBERS = (int, float, complex, str)
"""Types whose values, if every call changes them, are computed from the last call's value."""
_REGISTRIES = ("_parameters", "_buffers", "_modules")


def _places(item: Any, then: Any, now: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yields ``(the run's holder, the user's holder, key)`` of each change in an item that was read; ``None`` thrice
    for a change that a compiled call cannot make."""
    if type(now) in _NUMBERS or then is ABSENT:  # the last call has set it as well
        yield None, None, None
    elif isinstance(item, Name) and now is not ABSENT:
        yield item.space if item.running is None else item.running, item.space, item.name
    elif isinstance(item, Slot) and now is not ABSENT:
        yield item.value, item.value, item.name
    elif isinstance(item, ClosureCell) and now is not ABSENT:
        yield item.cell if item.running is None else item.running, item.cell, None
    elif isinstance(item, Contents) and type(item.value) in (dict, list):
        running = item.value if item.running is None else item.running
        if isinstance(running, list):
            yield running, item.value, None
            return
        earlier = dict(then)
        if earlier.keys() != running.keys():
            yield None, None, None
        for name in running:
            if running[name] is not earlier.get(name):
                yield running, item.value, name
    else:
        yield None, None, None
