"""The conditions on a module tree: modules and their dictionaries → values per place, compared with the expected."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import eq, is_, itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from bridge.base.errors import MODULE, GuardFailure
from bridge.base.torch_internals import COMPILED_CALL, MODULE_HOOKS
from bridge.dispatch.guards.arguments import AnyNumber, changed_number, same_or_any_number
from bridge.dispatch.guards.condition import Condition, differs
from bridge.guards import alike
from bridge.state import ModuleTensor, own_attributes, written_class

__all__ = ["Looked", "Tree", "TreeConditions", "owned_attributes", "read_tree", "tensor_places", "was_read"]

_STATE = itemgetter("_parameters", "_buffers", "_modules", "training", *MODULE_HOOKS)
_REGISTRY_OF = {"parameter": "_parameters", "buffer": "_buffers", "attribute": ""}
_SHOWN = (bool, int, float, str, type(None))
"""Types whose values are part of a message."""
_HELD = "held"
"""Pseudo-registry of free tensors: the name is a function that returns the tensor."""


class Tree(NamedTuple):
    """A module tree at a call: a value per module, in the order of the compilation.

    Attributes:
        dicts: the modules' ``__dict__``.
        parameters, buffers, children: their registries.
        training: their training flags; ``None`` for a module without one of its own.
        hooks: hook registries of inner modules, kind by kind; the root's hooks run around the compiled call.
    """

    modules: Sequence[nn.Module]
    dicts: Sequence[dict[str, Any]]
    parameters: Sequence[dict[str, torch.Tensor | None]]
    buffers: Sequence[dict[str, torch.Tensor | None]]
    children: Sequence[dict[str, nn.Module | None]]
    training: Sequence[bool | None]
    hooks: Sequence[Mapping[int, Any]]

    def held(self, place: tuple[str, int, str]) -> Any:
        """The value in a registry (``""``: the attributes) of a module under a name, or ``None``."""
        registry, owner, name = place
        if registry is _HELD:
            return name()
        return (self.dicts[owner][registry] if registry else self.dicts[owner]).get(name)


def read_tree(modules: Sequence[nn.Module], dicts: Sequence[dict[str, Any]]) -> Tree:
    """The tree of these modules, which have these dictionaries."""
    try:
        columns = zip(*map(_STATE, dicts), strict=True)
    except KeyError:  # torch.compile's wrapper has no flag of its own
        columns = zip(*(_STATE({"training": None, **each}) for each in dicts), strict=True)
    parameters, buffers, children, training, *hooks = columns
    return Tree(modules, dicts, parameters, buffers, children, training, [h for kind in hooks for h in kind[1:]])


class Looked(NamedTuple):
    """The attributes of a module that forward looked up (``"*"``: all); ``but``: attributes that it sets before."""

    names: Collection[str]
    but: Collection[str]


def was_read(looked: Looked, name: str) -> bool:
    """Whether forward looked an attribute up."""
    names, but = looked
    return name not in but and (name == "forward" or name in names or "*" in names)


def owned_attributes(modules: Sequence[nn.Module]) -> list[tuple[int, str, Any]]:
    """The attributes that the user's code set on the modules: position of the module, name, value."""
    return [(i, name, value) for i, module in enumerate(modules) for name, value in own_attributes(module)]


class TreeConditions:
    """The conditions of one entry on a tree.

    Args:
        tree: the current tree.
        paths: the modules' paths.
        attributes: the result of :func:`owned_attributes`.
        reads: per module, the attributes that forward looked up (:func:`was_read`).
        tensors: the module tensors that the compiled code reads.
        index: path → position of the module, with several paths for a shared module.
        numbers: position and name of the attributes that may be any number.
        ties: further places of tensors, with their names and readers.

    Attributes:
        before_tensors, after_tensors: conditions in order, around the conditions on single tensors.
        watched: all of them, in order; they can only fail after a write to a dictionary or a class.
        hooks: the condition on hooks of inner modules; ``training``: on training flags.
        attribute_places: position and name of the tensors that are plain attributes.
        references: functions that return the free tensors; their holders have conditions of their own.
        paths: the modules' paths.
    """

    def __init__(
        self,
        tree: Tree,
        paths: Sequence[str],
        attributes: Sequence[tuple[int, str, Any]],
        reads: Sequence[Looked],
        tensors: Sequence[ModuleTensor],
        index: Mapping[str, int],
        numbers: Mapping[tuple[int, str], AnyNumber] = MappingProxyType({}),
        ties: Sequence[tuple[int, str, Callable[[], Any]]] = (),
    ):
        self.paths = paths
        self._numbers = numbers
        self._places, tied = tensor_places(tensors, index)
        self._ties = [(position, place, place[2]) for position, place in tied]
        self._ties += [(position, (_HELD, 0, reader), name) for position, name, reader in ties]
        self.attribute_places = [(owner, name) for registry, owner, name in self._places if not registry]
        self.references = [name for registry, _, name in self._places if registry is _HELD]
        self.hooks = self._hooks(tree)
        self.training = self._training(tree)
        structure = [self._types(tree), self._submodules(tree), self._order(tree), self.hooks, self.training]
        self._constants = [each for each in attributes if not isinstance(each[2], torch.Tensor)]
        self._constant = self._attributes(self._constants)
        held = [
            self._attribute_names(tree, reads),
            self._constant,
            self._tensor_attributes([each for each in attributes if isinstance(each[2], torch.Tensor)]),
        ]
        self.before_tensors = [*structure, *held, self._absent(tree), self._nested(tensors)]
        self.after_tensors = [self._tied(tensors), *self._sizes(tree)]
        self.watched = [*self.before_tensors, *self.after_tensors]

    def find_tensors(self, tree: Tree) -> list[Any]:
        """The current values at the places of the compiled code's tensors."""
        return list(map(tree.held, self._places))

    def registered_tensors(self, tree: Tree) -> list[tuple[dict[str, torch.Tensor], str]]:
        """Registry and name of each parameter and buffer. ``KeyError`` if one is gone."""
        own = [each for each in self._places if each[0] and each[0] is not _HELD]
        found = [(tree.dicts[owner][registry], name) for registry, owner, name in own]
        for registry, name in found:
            registry[name]
        return found

    def changed_numbers(self, tree: Tree) -> dict[tuple[str, str], Any] | None:
        """Path and name → compiled value of the plain attributes that differ; ``None`` if one of them is not a number.

        ``KeyError`` if one is gone.
        """
        changed = {}
        values = zip(self._constants, self._constant.read(tree), self._constant.expected, strict=True)
        for (i, name, _), now, then in values:
            if not self._constant.same(now, then):
                if not changed_number(now, then):
                    return None
                changed[self.paths[i], name] = then
        return changed

    def _named(self, i: int) -> str:
        return _named(self.paths[i])

    def _types(self, tree: Tree) -> Condition:
        """fully_shard gives a module a new class, which counts as the user's class."""

        def same(now: type, then: type) -> bool:
            return now is then or written_class(now) is then

        def explain(i: int, then: type, now: type) -> GuardFailure:
            return differs(MODULE, f"type of {self._named(i)}", then.__name__, now.__name__)

        return Condition("types", lambda tree: map(type, tree.modules), [*map(type, tree.modules)], explain, same, same)

    def _submodules(self, tree: Tree) -> Condition:
        def explain(i: int, then: dict[str, Any], now: dict[str, Any]) -> GuardFailure:
            name = next((name for name in then if now.get(name) is not then[name]), None)
            verb = "replaced" if now.get(name) is not None else "removed"
            if name is None:
                name, verb = next(name for name in now if name not in then), "added"
            return GuardFailure(MODULE, f"submodule '{_join(self.paths[i], name)}' was {verb}")

        return Condition("submodules", lambda tree: tree.children, list(map(dict, tree.children)), explain, eq, eq)

    def _order(self, tree: Tree) -> Condition:
        several = [i for i, children in enumerate(tree.children) if len(children) > 1]

        def read(tree: Tree) -> list[list[str]]:
            return [list(tree.children[i]) for i in several]

        def explain(place: int, then: Any, now: Any) -> GuardFailure:
            return GuardFailure(MODULE, f"order of the submodules of {self._named(several[place])} changed")

        return Condition("order of submodules", read, read(tree), explain, eq, eq)

    def _hooks(self, tree: Tree) -> Condition:
        """The same hook objects as traced, in their order; the guard on reads covers the state that they read."""

        def read(tree: Tree) -> list[list[tuple[int, Any]]]:
            return [list(hooks.items()) if hooks else [] for hooks in tree.hooks]

        def explain(place: int, then: Any, now: Any) -> GuardFailure:
            kind, i = divmod(place, len(self.paths) - 1)
            return GuardFailure(MODULE, f"hook on submodule '{self.paths[i + 1]}' ({MODULE_HOOKS[kind][1:]})")

        return Condition("hooks", read, read(tree), explain, _same_hooks, _same_hooks)

    def _training(self, tree: Tree) -> Condition:
        def explain(i: int, then: Any, now: Any) -> GuardFailure:
            return differs(MODULE, f"training flag of {self._named(i)}", then, now)

        return Condition("training flags", lambda tree: tree.training, tree.training, explain)

    def _attribute_names(self, tree: Tree, reads: Sequence[Looked]) -> Condition:
        """Per module, the names looked up by forward that are the module's own attributes.

        The fast check first compares the number of attributes: the other conditions read every old one, and raise
        ``KeyError`` for a missing one. A different number alone is no failure: FSDP adds attributes.
        """
        counts = [len(held) - (COMPILED_CALL in held) for held in tree.dicts]
        counts[0] += 1  # at a call, the root has the dispatcher's attribute

        def read(tree: Tree) -> list[frozenset[str]]:
            pairs = zip(tree.modules, reads, strict=True)
            return [
                frozenset(name for name, _ in own_attributes(module) if was_read(names, name))
                for module, names in pairs
            ]

        def explain(i: int, then: frozenset[str], now: frozenset[str]) -> GuardFailure:
            name = "forward" if "forward" in now ^ then else min(now ^ then)
            verb = "was added to" if name in now else "was removed from"
            return _attribute_failure(self.paths[i], name, verb)

        names = read(tree)

        def quick(tree: Tree) -> bool:
            return list(map(len, tree.dicts)) == counts or read(tree) == names

        return Condition("attribute names", read, names, explain, eq, eq, quick)

    def _attributes(self, owned: Sequence[tuple[int, str, Any]]) -> Condition:
        """The values of plain attributes, except scalar inputs and counters, which may be any number."""
        names_of: dict[int, list[str]] = {}
        for i, name, _ in owned:
            names_of.setdefault(i, []).append(name)
        readers = [(i, _reader(names)) for i, names in names_of.items()]

        def explain(place: int, then: Any, now: Any) -> GuardFailure:
            i, name, _ = owned[place]
            failure = _attribute_failure(self.paths[i], name, "changed")
            if isinstance(then, _SHOWN) and isinstance(now, _SHOWN):
                failure = GuardFailure(MODULE, failure.field, f"from {then!r:.40} to {now!r:.40}")
            return failure

        return Condition(
            "attributes",
            lambda tree: [value for i, read in readers for value in read(tree.dicts[i])],
            [self._numbers.get((i, name), value) for i, name, value in owned],
            explain,
            exact=same_or_any_number if self._numbers else is_,
            same=same_or_any_number if self._numbers else alike,
        )

    def _tensor_attributes(self, owned: Sequence[tuple[int, str, torch.Tensor]]) -> Condition:
        """All tensor attributes, whether the compiled code reads them or not."""

        def explain(place: int, then: type, now: type) -> GuardFailure:
            i, name, _ = owned[place]
            return GuardFailure(MODULE, f"attribute '{name}' of {self._named(i)} is no tensor any more")

        return Condition(
            "tensor attributes",
            lambda tree: [type(tree.dicts[i][name]) for i, name, _ in owned],
            [type(value) for *_, value in owned],
            explain,
            same=lambda now, then: issubclass(now, torch.Tensor),
        )

    def _absent(self, tree: Tree) -> Condition:
        """Parameters and buffers that were ``None``."""
        places = [
            (registry, i, name)
            for registry, held in (("_parameters", tree.parameters), ("_buffers", tree.buffers))
            for i, each in enumerate(held)
            for name in each
            if each[name] is None
        ]

        def explain(place: int, then: None, now: torch.Tensor) -> GuardFailure:
            registry, i, name = places[place]
            kind = "parameter" if registry == "_parameters" else "buffer"
            return GuardFailure(MODULE, f"{kind} '{_join(self.paths[i], name)}' was None")

        return Condition("absent tensors", lambda tree: map(tree.held, places), [None] * len(places), explain)

    def _nested(self, tensors: Sequence[ModuleTensor]) -> Condition:
        """Checked before the tensors are compared, see :func:`bridge.base.tensor_properties.is_nested`."""

        def explain(place: int, then: bool, now: bool) -> GuardFailure:
            return GuardFailure(MODULE, f"layout of {tensors[place]}", "a nested tensor")

        return Condition(
            "nested tensors",
            lambda tree: [getattr(tree.held(place), "is_nested", False) for place in self._places],
            [False] * len(tensors),
            explain,
        )

    def _tied(self, tensors: Sequence[ModuleTensor]) -> Condition:
        """All names of a tied tensor hold the same object."""

        def explain(place: int, then: bool, now: bool) -> GuardFailure:
            first, _, name = self._ties[place]
            return GuardFailure(MODULE, f"{tensors[first]} is no longer tied to '{name}'")

        return Condition(
            "ties",
            lambda tree: [tree.held(other) is tree.held(self._places[first]) for first, other, _ in self._ties],
            [True] * len(self._ties),
            explain,
        )

    def _sizes(self, tree: Tree) -> list[Condition]:
        def explain(kind: str, i: int, then: int, now: int) -> GuardFailure:
            return differs(MODULE, f"number of {kind}s of {self._named(i)}", then, now)

        reads = {"parameter": lambda tree: map(len, tree.parameters), "buffer": lambda tree: map(len, tree.buffers)}
        return [
            Condition(f"number of {kind}s", read, list(read(tree)), partial(explain, kind), eq, eq)
            for kind, read in reads.items()
        ]


def tensor_places(
    tensors: Sequence[ModuleTensor], index: Mapping[str, int]
) -> tuple[list[tuple[str, int, str]], list[tuple[int, tuple[str, int, str]]]]:
    """The place of each tensor (registry, position of the module, name), and further places of tied tensors."""
    places, ties = [], []
    for position, spec in enumerate(tensors):
        if spec.held is not None:
            places.append((_HELD, 0, spec.held))
            continue
        split = [path.rpartition(".") for path in spec.names]
        first, *others = dict.fromkeys((_REGISTRY_OF[spec.kind], index[owner], name) for owner, _, name in split)
        places.append(first)
        ties += [(position, other) for other in others]
    return places, ties


def _same_hooks(now: Sequence[tuple[int, Any]], then: Sequence[tuple[int, Any]]) -> bool:
    return len(now) == len(then) and all(a == b and f is g for (a, f), (b, g) in zip(now, then, strict=True))


def _attribute_failure(path: str, name: str, verb: str) -> GuardFailure:
    if name == "forward":
        return GuardFailure(MODULE, f"forward of {_named(path)} was replaced")
    if verb == "changed":
        return GuardFailure(MODULE, f"attribute '{name}' of {_named(path)} changed")
    return GuardFailure(MODULE, f"attribute '{name}' {verb} {_named(path)}")


def _reader(names: Sequence[str]) -> Callable[[dict[str, Any]], tuple]:
    """A function: a dict → the tuple of its values under these names."""
    if len(names) > 1:
        return itemgetter(*names)
    (name,) = names
    return lambda held: (held[name],)


def _named(path: str) -> str:
    return f"submodule '{path}'" if path else "the module"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
