"""Conditions on a module tree: a dispatched module → its tensors, if the module is still as compiled.

Tensors are looked up in the tree at every call, so optimizers, ``load_state_dict`` and replaced parameters just work.
The other conditions are places of :mod:`bridge.guards`, compared after a write to their dictionaries; at every call the
check looks at the places whose writes nothing counts, and at the tensors' metadata.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import attrgetter, getitem
from typing import Any, NamedTuple

import torch
from torch import nn

from bridge.base.errors import MODULE, GuardFailure
from bridge.capture import Captured
from bridge.dispatch.guards.arguments import AnyNumber, changed_number
from bridge.dispatch.guards.condition import CheckSource
from bridge.dispatch.guards.free_tensors import free_tensors
from bridge.dispatch.guards.tensors import LocalTensors, TensorGuard
from bridge.guards import ATTRIBUTE, TRAINING, ModulePlace, ReadGuard, Reads, rebound_count, walks
from bridge.state import ModuleTensor, dict_versions, own_attributes, write_counter

__all__ = ["ModuleGuard"]

_DICT = attrgetter("__dict__")
_REGISTRY_OF = {"parameter": "_parameters", "buffer": "_buffers", "attribute": ""}
_WALKED = {"_parameters", "_buffers", "*"}
_HELD = "held"
"""Pseudo-registry of free tensors: the name is a function that returns the tensor."""
_Where = tuple[str, int, Any]
"""Registry, position of the module, and name of a tensor."""


class _Unwritten(NamedTuple):
    """Dictionaries that were checked, with their write counts.

    Attributes:
        versions: write counts of the modules' own dictionaries, then of ``dicts``; ``None``: not available.
        dicts: the dictionaries that the places are in. ``empty``: dictionaries that must stay empty.
        holders, names: registry and name of each parameter and buffer that the compiled code reads.
        rebound: the count of :func:`bridge.guards.rebound_count`; ``None``: it has just changed.
    """

    versions: list[int] | None
    dicts: Sequence[dict]
    empty: Sequence[dict]
    holders: list[dict[str, torch.Tensor]]
    names: list[str]
    rebound: float | None


class _Tensors:
    """Where the compiled code's tensors are in the tree, and where they must be as well.

    Args:
        tensors: the module tensors that the compiled code reads.
        index: path → position of the module, with several paths for a shared module.
        ties: further places of tensors: place in the list, name, reader.

    Attributes:
        places: of the tensors, in order.
        attributes: position and name of the tensors that are plain attributes.
        references: functions that return the free tensors; their holders have conditions of their own.
    """

    def __init__(self, tensors: Sequence[ModuleTensor], index: Mapping[str, int], ties: Sequence[tuple] = ()):
        self.places: list[_Where] = []
        self._names, self._ties = [*map(str, tensors)], []
        for position, spec in enumerate(tensors):
            if spec.held is not None:
                self.places.append((_HELD, 0, spec.held))
                continue
            split = [path.rpartition(".") for path in spec.names]
            first, *others = dict.fromkeys((_REGISTRY_OF[spec.kind], index[owner], name) for owner, _, name in split)
            self.places.append(first)
            self._ties += [(position, other, other[2]) for other in others]
        self._ties += [(position, (_HELD, 0, reader), name) for position, name, reader in ties]
        self.attributes = [(owner, name) for registry, owner, name in self.places if not registry]
        self.references = [reader for registry, _, reader in self.places if registry is _HELD]
        self._registered = [each for each in self.places if each[0] and each[0] is not _HELD]

    def read(self, own: Sequence[dict[str, Any]]) -> list[Any]:
        """The tensors now, in modules with these dictionaries."""
        return [_held(own, each) for each in self.places]

    def holders(self, own: Sequence[dict[str, Any]]) -> tuple[list[dict[str, torch.Tensor]], list[str]]:
        """Registry and name of each parameter and buffer."""
        found = [own[owner][registry] for registry, owner, _ in self._registered]
        return found, [name for *_, name in self._registered]

    def failure(self, own: Sequence[dict[str, Any]]) -> GuardFailure | None:
        """A nested tensor (:func:`bridge.base.tensor_properties.is_nested`), or a tie that is cut."""
        found = self.read(own)
        for each, name in zip(found, self._names, strict=True):
            if getattr(each, "is_nested", False):
                return GuardFailure(MODULE, f"layout of {name}", "a nested tensor")
        for place, other, name in self._ties:
            if _held(own, other) is not found[place]:
                return GuardFailure(MODULE, f"{self._names[place]} is no longer tied to '{name}'")
        return None


def _held(own: Sequence[dict[str, Any]], where: _Where) -> Any:
    registry, owner, name = where
    if registry is _HELD:
        return name()
    return (own[owner][registry] if registry else own[owner]).get(name)


def _tensor_guard(found: Sequence[torch.Tensor], tensors: Sequence[ModuleTensor], saves: bool) -> TensorGuard:
    """The conditions on the tensors that the compiled code reads."""
    parameter, either = (nn.Parameter,), (torch.Tensor, nn.Parameter)
    return TensorGuard(
        found,
        kinds=[parameter if spec.kind == "parameter" and spec.sharding is None else either for spec in tensors],
        names=[*map(str, tensors)],
        stage=MODULE,
        saves=saves,
        explain_type=_explain_type,
    )


class ModuleGuard:
    """The conditions of one entry on the module tree: types, flags, plain attributes, hooks inside, tensors, code.

    Args:
        root: the module in its current state. The guard keeps only its submodules alive: the root owns its entries.
        captured: the captured call: its module tensors, counters and attributes that it sets.
        saves: whether autograd saves tensors of the call.
        numbers: path and name → type of the attributes that are scalar inputs.
        reads: forward's recorded reads.

    Attributes:
        sets_attributes: whether a call updates counters or sets attributes.
        reads: the conditions on reads outside the tree.
        unwritten: write counts that make :meth:`look` unnecessary, or ``None``.
    """

    def __init__(
        self, root: nn.Module, captured: Captured, *, saves: bool, numbers: Mapping[tuple[str, str], type], reads: Reads
    ):
        tensors, kept = captured.module_tensors, captured.state.kept
        named = list(root.named_modules(remove_duplicate=False))
        paths: dict[int, str] = {}  # by id, since a class may override ``__eq__`` and ``__hash__``
        for path, module in named:
            paths.setdefault(id(module), path)
        modules = list({id(module): module for _, module in named}.values())
        self._modules, own = modules[1:], list(map(_DICT, modules))
        places = {id(module): i for i, module in enumerate(modules)}
        index = {path: places[id(module)] for path, module in named}
        self._number_places = [(index[path], name) for path, name in numbers]
        self._kept = [(None if each.path is None else index[each.path], each) for each in kept]
        self._counters = [(index[each.path], each.name, each.step) for each in captured.state.counters]
        expected = defaultdict[int, dict[str, AnyNumber]](dict)
        for (i, name), kind in zip(self._number_places, numbers.values(), strict=True):
            expected[i][name] = AnyNumber(kind)
        for i, name, _ in self._counters:
            expected[i][name] = AnyNumber(int, counts=True)
        but = defaultdict[int, set[str]](set)  # attributes that a call sets before it reads them
        for i, each in self._kept:
            if i is not None and not each.is_read:
                but[i].add(each.key)
        names = [set(reads.modules.get(id(module), ((), ()))[1]) for module in modules]
        looked = [
            (i, name, value)
            for i, module in enumerate(modules)
            for name, value in own_attributes(module)
            if not names[i].isdisjoint((name, "*")) and name not in but[i]
        ]
        where = _Tensors(tensors, index)
        found = free_tensors(tensors, where.read(own), where.places, modules, looked, reads)
        tensors = found.tensors
        for i, name in found.attributes:
            but[i].add(name)
        for i, module in enumerate(modules):
            names[i] |= {name for name, value in own_attributes(module) if isinstance(value, torch.Tensor)}
            names[i] |= {name for owner, name in self._number_places if owner == i}
        is_walked = any(walks(each) or not _WALKED.isdisjoint(each) for each in names)
        ordered = ("parameter", "buffer") if is_walked else ()
        tree = [
            ModulePlace(module, paths[id(module)], names[i], but[i], ordered=ordered, numbers=expected[i])
            for i, module in enumerate(modules)
        ]
        self.reads = ReadGuard(reads, tree, [*((each.original, each.key) for each in kept), *found.places])
        self._where = _Tensors(tensors, index, found.ties)
        self._locals = LocalTensors([*map(str, tensors)], [spec.sharding for spec in tensors])
        self._tensors = _tensor_guard(self._found(own), tensors, saves)
        self.sets_attributes = bool(captured.state.counters or kept)
        self._rebound, self._last_rebound = rebound_count(), -1.0
        self.unwritten: _Unwritten | None = None

    @property
    def training(self) -> dict[str, bool]:
        """First path of each module → expected training flag."""
        return {place.path: then[TRAINING, ""] for place, then in self.reads.modules}

    def write(self, source: CheckSource, inference: str) -> None:
        """Writes the conditions; the generated code assigns the module's tensors to ``owned``.

        ``inference``: expression for whether inference mode is on.
        """
        tree, get = source.name(self, "tree"), source.name(getitem, "getitem")
        submodules, attributes = source.name(tuple(self._modules), "submodules"), source.name(_DICT, "attributes of")
        modules = f"(module, *{submodules})"
        written = "True"
        if (version := write_counter()) is not None:
            rebound = source.name(self._rebound, "rebound")
            dicts = f"[*map({attributes}, {modules}), *known.dicts]"
            written = f"thorough or known is None or known.rebound != {rebound}[0] or known.versions is None"
            written += f" or [*map({source.name(version, 'dict version')}, {dicts})] != known.versions"
            written += " or any(known.empty)"
        source.add(f"known = {tree}.unwritten", f"if {written}:")
        source.add(f"    known = {tree}.look(module, thorough)", "    if known is None:", "        return None")
        found = [f"*map({get}, known.holders, known.names)"]
        if self._where.attributes:
            owners, names = zip(*self._where.attributes, strict=True)
            owners, names = source.name(owners, "owners"), source.name(names, "attribute names")
            owning = f"map({get}, {source.name(repeat, 'repeat')}({modules}), {owners})"
            found.append(f"*map({get}, map({attributes}, {owning}), {names})")
        if self._where.references:  # their holders have no write count
            held = [f"{source.name(reference, 'held tensor')}()" for reference in self._where.references]
            source.add(f"held = [{', '.join(held)}]")
            found.append("*held")
        source.add(f"owned = [{', '.join(found)}]")
        if self._locals:
            local = source.name(self._locals, "local tensors")
            source.add("given = owned", f"owned = {local}.of(given)")
            source.refuse("owned is None", f"{local}.failure(given)")
        self._tensors.write(source, "owned", inference, nested="held" if self._where.references else "")
        if (uncounted := self.reads.uncounted) is not None:
            same = source.name(uncounted, "uncounted reads unchanged")
            source.add(f"if not thorough and not {same}():", "    return None")

    def look(self, module: nn.Module, thorough: bool) -> _Unwritten | None:
        """Checks all places → their write counts, for a quick test at later calls; ``None``: changed.

        ``thorough``: accepts equivalent contents; raises :class:`GuardFailure` otherwise.
        """
        own, known = list(map(_DICT, (module, *self._modules))), self.unwritten
        reads, spaces = self.reads, self.reads.spaces
        # counts are read before the comparisons: a concurrent write is seen at the next call
        versions, rebound, before = dict_versions((*own, *spaces.dicts)), self._rebound[0], self._last_rebound
        is_rebound = known is None or known.rebound != rebound
        if thorough:
            reads.match(versions, is_rebound)
            if (failure := self._where.failure(own)) is not None:
                raise failure
            return _Unwritten(None, (), (), *self._where.holders(own), None)
        self._last_rebound, self.unwritten = rebound, None
        if reads.unchanged(versions, is_rebound) and self._where.failure(own) is None:
            rebound = rebound if rebound == before else None
            self.unwritten = _Unwritten(versions, spaces.dicts, spaces.empty, *self._where.holders(own), rebound)
        return self.unwritten

    def tensors(self, root: nn.Module) -> list[torch.Tensor]:
        """The module's current tensors, in the order of the compiled code's inputs."""
        return self._found(list(map(_DICT, (root, *self._modules))))

    def _found(self, own: Sequence[dict[str, Any]]) -> list[Any]:
        found = self._where.read(own)
        if (failure := self._locals.failure(found)) is not None:
            raise failure
        return self._locals.of(found)

    def failure(self, root: nn.Module) -> GuardFailure | None:
        """The first condition that fails now, training flags aside."""
        for failure in self.reads.failures():
            if not failure.field.startswith(TRAINING):
                return failure
        own = list(map(_DICT, (root, *self._modules)))
        try:
            return self._where.failure(own) or self._tensors.failure(self._found(own))
        except GuardFailure as failure:
            return failure

    def numbers(self, root: nn.Module) -> list[Any]:
        """The current values of the attributes that are scalar inputs."""
        modules = [root, *self._modules]
        return [modules[owner].__dict__[name] for owner, name in self._number_places]

    def set_attributes(self, root: nn.Module, kept: Sequence[Any] = ()) -> None:
        """Increments the counters and sets the attributes, as a call of forward does."""
        modules = [root, *self._modules]
        for owner, name, step in self._counters:
            modules[owner].__dict__[name] += step
        for (owner, place), value in zip(self._kept, kept, strict=True):
            place.leave(value, place.original if owner is None else modules[owner].__dict__)

    def changed_numbers(self) -> dict[tuple[str, str], Any] | None:
        """Path and name → compiled value of the attributes that differ; ``None`` if one of them is not a number."""
        found = {}
        for place, then in self.reads.modules:
            for (kind, name), before, now in place.changes(place.read(), then):
                if kind == ATTRIBUTE and not changed_number(now, before):
                    return None
                if kind == ATTRIBUTE:
                    found[place.path, name] = before
        return found


def _explain_type(what: str, now: Any) -> GuardFailure:
    if type(now) is torch.Tensor:
        return GuardFailure(MODULE, f"{what} is a plain tensor, not a Parameter (torch.func.functional_call?)")
    found = "None" if now is None else f"a {type(now).__name__}"
    return GuardFailure(MODULE, f"{what}: compiled for a tensor, called with {found}")
