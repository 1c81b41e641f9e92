"""Modules as watched places: a module → the state that a call may read of it, by labels; a change → the miss's reason.

torch's own code reads a module's class, training flag, children and hooks without a mention in forward's. Forward's
reads add attributes by name. Parameters and buffers of the tree are inputs of the compiled code: here they only are
there, or ``None``.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import is_
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from bridge.base.errors import MODULE, GuardFailure
from bridge.base.torch_internals import MODULE_HOOKS
from bridge.guards.watched import ABSENT, Place, Watched, alike
from bridge.state import is_own_attribute, own_attributes, written_class

__all__ = ["ATTRIBUTE", "TRAINING", "ModulePlace", "walks"]

_REGISTRIES = {"submodule": "_modules", "parameter": "_parameters", "buffer": "_buffers"}
_TENSOR = object()
"""Stands for any tensor."""
_TYPE, TRAINING, ATTRIBUTE, _ORDER = "type", "training flag", "attribute", "order"
_WALKS = frozenset(
    """
    children named_children modules named_modules parameters named_parameters buffers named_buffers state_dict apply
    get_submodule get_parameter get_buffer
    """.split()
)
"""Methods of modules that walk through their submodules, parameters or buffers."""
_NONE: Mapping[str, Any] = MappingProxyType({})
_SHOWN = (bool, int, float, str, type(None))
"""Types whose values are part of a message."""
Label = tuple[str, Any]
"""Kind and name of a value: ``("attribute", "scale")``, ``("submodule", "0")``, ``("_forward_hooks", 7)``."""


def walks(names: Iterable[str]) -> bool:
    """Whether forward looked up a name that iterates over a module's tree (``parameters``, ``modules``, …)."""
    return not _WALKS.isdisjoint(names)


class ModulePlace(Watched):
    """A module: its class and flag, its children, parameters and buffers, its hooks, the attributes that were read.

    Args:
        module: the module, which is not kept alive. ``path``: in the tree; ``None``: outside of the tree.
        place: its name, outside of the tree.
        names: attributes that forward looked up (``"*"``: all). ``but``: attributes that it sets before.
        ordered: kinds of registered objects whose order matters, besides submodules.
        numbers: attribute → an object whose ``fits`` tells whether a value is one of the expected ones.

    Attributes:
        hooks: the kinds of hooks that are watched; the root's run around the compiled call.
    """

    def __init__(
        self,
        module: nn.Module,
        path: str | None,
        names: Collection[str],
        but: Collection[str] = (),
        place: Place | None = None,
        ordered: Collection[str] = (),
        numbers: Mapping[str, Any] = _NONE,
    ):
        self.module, self.path, self.hooks = weakref.ref(module), path, MODULE_HOOKS if path != "" else ()
        self.place = place or Place("", f"submodule '{path}'" if path else "the module")
        self._ordered = ordered
        self._every, self._but, self._numbers = "*" in names and path is not None, {*but}, numbers
        if path is not None:
            names = [name for name in (*names, "forward") if is_own_attribute(module, name)]
        elif "*" in names:
            names = {*names, *module.__dict__}
        self._names = sorted({*names}.difference(self._but))

    def read(self, run: bool = False) -> dict[Label, Any]:
        module = self.module()
        if module is None:
            return {}
        own, is_inside = module.__dict__, self.path is not None
        found: dict[Label, Any] = {(_TYPE, ""): written_class(type(module))}
        if is_inside:
            found[TRAINING, ""] = own.get("training")
        for kind, registry in _REGISTRIES.items():
            for name, held in own[registry].items():
                is_any = kind != "submodule" and held is not None and (is_inside or name not in self._names)
                found[kind, name] = _TENSOR if is_any else held
        for kind in self.hooks:
            found.update(((kind, number), hook) for number, hook in own.get(kind, _NONE).items())
        held = own_attributes(module) if self._every else ((name, own[name]) for name in self._names if name in own)
        for name, value in held:
            if name not in self._but:
                found[ATTRIBUTE, name] = _TENSOR if is_inside and isinstance(value, torch.Tensor) else value
        return found

    def expected(self) -> dict[Label, Any]:
        """The values that later calls have to find."""
        found = self.read()
        return found | {(ATTRIBUTE, name): then for name, then in self._numbers.items() if (ATTRIBUTE, name) in found}

    @property
    def registries(self) -> list[Any]:
        """The dictionaries that hold the values; the module's own only outside of the tree."""
        own = getattr(self.module(), "__dict__", {})
        return [*(own.get(each, _NONE) for each in _REGISTRIES.values()), *([own] if self.path is None else [])]

    @property
    def registries_of_hooks(self) -> list[Any]:
        own = getattr(self.module(), "__dict__", {})
        return [own.get(each, _NONE) for each in self.hooks]

    def unchanged(self, then: Mapping[Label, Any]) -> bool:
        """Whether all values are the very same objects, except numbers that may be others."""
        now = self.read()
        if not now or ([*now] == [*then] and all(map(is_, now.values(), then.values()))):
            return True
        return all(self._is_number(*each) for each in self._differences(now, then))

    def _is_number(self, label: Label, before: Any, value: Any) -> bool:
        return before is self._numbers.get(label[1], self) and before.fits(value)

    def same(self, now: Mapping[Label, Any], then: Mapping[Label, Any]) -> bool:
        """True for a module that is gone: no call can meet it."""
        return not now or next(self.changes(now, then), None) is None

    def changes(self, now: Mapping[Label, Any], then: Mapping[Label, Any]) -> Iterator[tuple[Label, Any, Any]]:
        """The labels whose values differ, with the values before and now."""
        for label, before, value in self._differences(now, then):
            if not self._is_number(label, before, value) and not (label[0] == ATTRIBUTE and alike(value, before)):
                yield label, before, value

    def _differences(self, now: Mapping[Label, Any], then: Mapping[Label, Any]) -> Iterator[tuple[Label, Any, Any]]:
        for label in dict.fromkeys((*then, *now)):
            before, value = then.get(label, ABSENT), now.get(label, ABSENT)
            if value is not before:
                yield label, before, value
        for kind in ("submodule", *self._ordered, *self.hooks):
            if [each for each in then if each[0] == kind] != [each for each in now if each[0] == kind]:
                yield (_ORDER, kind), None, None

    def failures(self, then: Mapping[Label, Any]) -> Iterator[GuardFailure]:
        """The reasons of a miss, for each changed value."""
        now = self.read()
        for label, before, value in self.changes(now, then) if now else ():
            if self.path is None and label[0] in (ATTRIBUTE, *_REGISTRIES):
                yield GuardFailure(MODULE, f"{self.place.then(f'.{label[1]}')} changed")
            else:
                yield GuardFailure(MODULE, *self._told(*label, before, value, [then, now]))

    def _told(self, kind: str, name: Any, before: Any, value: Any, looks: Sequence[Mapping[Label, Any]]) -> list[str]:
        """A change in words: the changed place, and the details."""
        of = str(self.place)
        if kind == _TYPE:
            return [f"type of {of}", f"compiled for {before.__name__}, called with {value.__name__}"]
        if kind == TRAINING:
            return [f"training flag of {of}", f"compiled for {before}, called with {value}"]
        if kind == _ORDER:
            return [f"order of the {name if name in self.hooks else f'{name}s'} of {of} changed"]
        if kind in self.hooks:
            return [f"hook on {of} ({kind[1:]})"]
        verb = "was added" if before is ABSENT else "was removed" if value is ABSENT else "was replaced"
        if kind == "submodule":
            return [f"submodule '{self._inside(name)}' {'was removed' if value is None else verb}"]
        if kind != ATTRIBUTE:
            counts = [sum(each[0] == kind for each in look) for look in looks]
            if counts[0] != counts[1]:
                return [f"number of {kind}s of {of}", f"compiled for {counts[0]}, called with {counts[1]}"]
            if value is None:
                return [f"{kind} '{self._inside(name)}'", "compiled for a tensor, called with None"]
            return [f"{kind} '{self._inside(name)}' {'was None' if before is None else verb}"]
        if name == "forward":
            return [f"forward of {of} was replaced"]
        if before is ABSENT or value is ABSENT:
            return [f"attribute '{name}' {verb} {'to' if before is ABSENT else 'from'} {of}"]
        if before is _TENSOR:
            return [f"attribute '{name}' of {of} is no tensor any more"]
        shown = isinstance(before, _SHOWN) and isinstance(value, _SHOWN)
        return [f"attribute '{name}' of {of} changed", f"from {before!r:.40} to {value!r:.40}" if shown else ""]

    def _inside(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name
