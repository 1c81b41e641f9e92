"""Conditions on a module tree: a dispatched module → its tensors, if the module is still as compiled.

Tensors are looked up in the tree at every call, so optimizers, ``load_state_dict`` and replaced parameters just work.
Most conditions are on dictionaries (attributes, parameters, buffers, children, names that forward read), and CPython
counts the writes to a dictionary, and reports writes to classes and code. So the fast check evaluates these conditions
only after a write; at every call it checks objects without a write count, and the tensors' metadata.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import repeat
from operator import attrgetter, getitem
from typing import Any, NamedTuple

import torch
from torch import nn

from bridge.base.errors import MODULE, GuardFailure
from bridge.capture import Captured, KeptPlace
from bridge.dispatch.guards.arguments import AnyNumber
from bridge.dispatch.guards.condition import CheckSource, Condition
from bridge.dispatch.guards.free_tensors import free_tensors
from bridge.dispatch.guards.module_conditions import (
    Looked,
    Tree,
    TreeConditions,
    owned_attributes,
    read_tree,
    tensor_places,
    was_read,
)
from bridge.dispatch.guards.tensors import LocalTensors, TensorGuard
from bridge.guards import ReadGuard, Reads, rebound_count
from bridge.state import ModuleTensor, dict_versions, write_counter

__all__ = ["ModuleGuard"]

_DICT = attrgetter("__dict__")


class _Unwritten(NamedTuple):
    """Dictionaries that were checked, with their write counts.

    Attributes:
        versions: write counts of the modules' own dictionaries, then of ``registries``; ``None``: not available.
        registries: the non-empty registries of parameters, buffers and children.
        empty: the empty registries, and empty hook registries of inner modules: they must stay empty.
        hooked: whether inner modules have hooks, which are checked at every call.
        holders, names: registry and name of each parameter and buffer that the compiled code reads.
        rebound: the count of :func:`bridge.guards.rebound_count`; ``None``: it has just changed.
        all_versions, dicts, all_empty: the same as the first three, with the dictionaries that forward read elsewhere.
    """

    versions: list[int] | None
    registries: list[dict]
    empty: list[dict]
    hooked: bool
    holders: list[dict[str, torch.Tensor]]
    names: list[str]
    rebound: float | None = None
    all_versions: list[int] | None = None
    dicts: Sequence[dict] = ()
    all_empty: Sequence[dict] = ()

    def holds(self, dicts: Sequence[dict[str, Any]], rebound: float) -> bool:
        """Whether nothing was written to the modules, whose own dictionaries these are."""
        if self.versions is None or self.rebound != rebound or any(self.empty):
            return False
        return dict_versions((*dicts, *self.registries)) == self.versions


def _names_looked_at(
    modules: Sequence[nn.Module], paths: Mapping[int, str], kept: Sequence[KeptPlace], reads: Reads
) -> list[Looked]:
    """Per module, the guarded attributes: the attributes that forward reads, unless a call sets them before reading."""
    set_on: dict[str, set[str]] = {}
    for each in kept:
        if each.path is not None and not each.is_read:
            set_on.setdefault(each.path, set()).add(each.key)
    return [
        Looked(reads.modules.get(id(module), (None, frozenset()))[1], set_on.get(paths[id(module)], frozenset()))
        for module in modules
    ]


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
        self._modules = modules[1:]
        tree = read_tree(modules, list(map(_DICT, modules)))
        names = _names_looked_at(modules, paths, kept, reads)
        attributes = [
            (i, name, value)
            for i, name, value in owned_attributes(modules)
            if name not in names[i].but
            if isinstance(value, torch.Tensor) or was_read(names[i], name) or (paths[id(modules[i])], name) in numbers
        ]
        places = {id(module): i for i, module in enumerate(modules)}
        index = {path: places[id(module)] for path, module in named}
        lie = tensor_places(tensors, index)[0]
        looked = [each for each in attributes if was_read(names[each[0]], each[1])]
        found = free_tensors(tensors, list(map(tree.held, lie)), lie, modules, looked, reads)
        tensors = found.tensors
        attributes = [each for each in attributes if each[:2] not in found.attributes]
        kinds = {(index[path], name): AnyNumber(kind) for (path, name), kind in numbers.items()}
        but = [*((each.original, each.key) for each in kept), *found.places]
        self.reads = ReadGuard(reads, modules, but)
        self._number_places = list(kinds)
        self._kept = [(None if each.path is None else index[each.path], each) for each in kept]
        self._counters = [(index[each.path], each.name, each.step) for each in captured.state.counters]
        kinds.update(((i, name), AnyNumber(int, counts=True)) for i, name, _ in self._counters)
        self._conditions = TreeConditions(
            tree, list(paths.values()), attributes, names, tensors, index, kinds, found.ties
        )
        self._locals = LocalTensors([*map(str, tensors)], [spec.sharding for spec in tensors])
        self._tensors = _tensor_guard(self._found(tree), tensors, saves)
        self.sets_attributes = bool(captured.state.counters or kept)
        self._rebound, self._last_rebound = rebound_count(), -1.0
        self.unwritten: _Unwritten | None = None

    @property
    def training(self) -> dict[str, bool]:
        """First path of each module → expected training flag."""
        return dict(zip(self._conditions.paths, self._conditions.training.expected, strict=True))

    def write(self, source: CheckSource, inference: str) -> None:
        """Writes the conditions; the generated code assigns the module's tensors to ``owned``.

        ``inference``: expression for whether inference mode is on.
        """
        tree, get = source.name(self, "tree"), source.name(getitem, "getitem")
        submodules, attributes = source.name(tuple(self._modules), "submodules"), source.name(_DICT, "attributes of")
        modules = f"(module, *{submodules})"
        rebound = source.name(self._rebound, "rebound")
        written = f"thorough or known is None or known.rebound != {rebound}[0]"
        if (version := write_counter()) is not None:
            dicts = f"[*map({attributes}, {modules}), *known.dicts]"
            written += " or known.all_versions is None"
            written += f" or [*map({source.name(version, 'dict version')}, {dicts})] != known.all_versions"
        else:
            written = "True"
        source.add(f"known = {tree}.unwritten", f"if {written} or any(known.all_empty):")
        source.add(f"    known = {tree}.look(module, thorough)", "    if known is None:", "        return None")
        same_hooks, read = source.name(self._conditions.hooks.holds, "same hooks"), source.name(read_tree, "read tree")
        source.refuse(f"known.hooked and not {same_hooks}({read}({modules}, list(map({attributes}, {modules}))))")
        found = [f"*map({get}, known.holders, known.names)"]
        if self._conditions.attribute_places:
            owners, names = zip(*self._conditions.attribute_places, strict=True)
            owners, names = source.name(owners, "owners"), source.name(names, "attribute names")
            owning = f"map({get}, {source.name(repeat, 'repeat')}({modules}), {owners})"
            found.append(f"*map({get}, map({attributes}, {owning}), {names})")
        if self._conditions.references:  # their holders have no write count
            held = [f"{source.name(reference, 'held tensor')}()" for reference in self._conditions.references]
            source.add(f"held = [{', '.join(held)}]")
            found.append("*held")
        source.add(f"owned = [{', '.join(found)}]")
        if self._locals:
            local = source.name(self._locals, "local tensors")
            source.add("given = owned", f"owned = {local}.of(given)")
            source.refuse("owned is None", f"{local}.failure(given)")
        self._tensors.write(source, "owned", inference, nested="held" if self._conditions.references else "")
        is_rebound = f"{tree}.unwritten is None or {tree}.unwritten.rebound != {rebound}[0]"
        source.add("if thorough:", f"    {source.name(self.reads, 'reads')}.match({is_rebound})")
        if (uncounted := self.reads.uncounted) is not None:
            same = source.name(uncounted, "uncounted reads unchanged")
            source.add(f"elif not {same}():", "    return None")

    def look(self, module: nn.Module, thorough: bool) -> _Unwritten | None:
        """Checks modules, in the quick path also values that forward read elsewhere → their write counts,
        for a quick test at later calls; ``None``: changed.

        ``thorough``: accepts equivalent contents; raises :class:`GuardFailure` otherwise.
        """
        modules, known = [module, *self._modules], self.unwritten
        dicts, reads = list(map(_DICT, modules)), self.reads
        if thorough:
            return self._look_at_tree(read_tree(modules, dicts), thorough)
        # counts are read before the comparisons: a concurrent write is seen at the next call
        versions, rebound, before = dict_versions(reads.dicts), self._rebound[0], self._last_rebound
        self._last_rebound, found = rebound, known
        if known is None or not known.holds(dicts, rebound):
            found = self._look_at_tree(read_tree(modules, dicts), thorough)
        is_rebound = known is None or known.rebound != rebound
        if found is not None and not reads.unchanged(versions, is_rebound):
            found = None
        if found is not None:
            counted = found.versions is not None and versions is not None
            found = found._replace(
                rebound=rebound if rebound == before else None,
                all_versions=[*found.versions, *versions] if counted else None,
                dicts=[*found.registries, *reads.dicts],
                all_empty=[*found.empty, *reads.empty],
            )
        self.unwritten = found
        return found

    def _look_at_tree(self, tree: Tree, thorough: bool) -> _Unwritten | None:
        if thorough and (failure := self._failure(tree)) is not None:
            raise failure
        registries = [*tree.parameters, *tree.buffers, *tree.children]
        written = list(filter(None, registries))
        counted = not thorough and all(isinstance(each, dict) for each in written)  # other mappings have no write count
        versions = dict_versions((*tree.dicts, *written)) if counted else None
        with suppress(KeyError):
            if thorough or all(condition.holds(tree) for condition in self._conditions.watched):
                tensors = self._conditions.registered_tensors(tree)
                empty = [registry for registry in (*tree.hooks, *registries) if not registry]
                places = [holder for holder, _ in tensors], [name for _, name in tensors]
                return _Unwritten(versions, written, empty, any(tree.hooks), *places)
        return None

    def _failure(self, tree: Tree, but: Condition | None = None) -> GuardFailure | None:
        """The first condition that fails for a tree; ``but``: a condition to skip."""
        for condition in self._conditions.before_tensors:
            if condition is not but and (failure := condition.failure(tree)) is not None:
                return failure
        if (failure := self._locals.failure(self._conditions.find_tensors(tree))) is not None:
            return failure
        if (failure := self._tensors.failure(self._found(tree))) is not None:
            return failure
        failures = (condition.failure(tree) for condition in self._conditions.after_tensors)
        return next(filter(None, failures), None)

    def tensors(self, root: nn.Module) -> list[torch.Tensor]:
        """The module's current tensors, in the order of the compiled code's inputs."""
        return self._found(self._tree(root))

    def _found(self, tree: Tree) -> list[Any]:
        found = self._conditions.find_tensors(tree)
        if (failure := self._locals.failure(found)) is not None:
            raise failure
        return self._locals.of(found)

    def failure(self, root: nn.Module) -> GuardFailure | None:
        """The first condition that fails now, training flags aside."""
        tree = self._tree(root)
        try:
            return self._failure(tree, but=self._conditions.training) or self.reads.match()
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

    def changed_numbers(self, root: nn.Module) -> dict[tuple[str, str], Any] | None:
        """:meth:`TreeConditions.changed_numbers` of the current tree."""
        return self._conditions.changed_numbers(self._tree(root))

    def _tree(self, root: nn.Module) -> Tree:
        modules = [root, *self._modules]
        return read_tree(modules, list(map(_DICT, modules)))


def _explain_type(what: str, now: Any) -> GuardFailure:
    if type(now) is torch.Tensor:
        return GuardFailure(MODULE, f"{what} is a plain tensor, not a Parameter (torch.func.functional_call?)")
    found = "None" if now is None else f"a {type(now).__name__}"
    return GuardFailure(MODULE, f"{what}: compiled for a tensor, called with {found}")
