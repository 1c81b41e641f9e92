"""World outside of a call: objects that existed before → the places in them that forward read, each noted once.

An object is known when a known place leads to it; objects made by the call are not known. Nothing here runs the
objects' code: classes and dictionaries are read as they are stored.
"""

from __future__ import annotations

import functools
import os
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributions import Distribution

from bridge.base.tensor_properties import properties_of
from bridge.guards.changes import Changes, reads_later
from bridge.guards.kinds import PLAIN, implicit_of, is_a, key_of
from bridge.guards.machinery import is_machinery
from bridge.guards.objects import (
    ABSENT,
    FrameOf,
    Instance,
    Strangers,
    dict_of,
    function_or_object,
    inner_function,
    interesting,
    is_alive,
    is_changeable,
    is_ours,
    special_methods_of,
)
from bridge.guards.tensor_reads import asked_of, is_asked
from bridge.guards.watched import (
    Answer,
    CachedResult,
    Class,
    ClassName,
    ClosureCell,
    Code,
    Name,
    Place,
    Slot,
    class_entry,
    entry_of,
    slot_of,
)

__all__ = ["REGISTRIES", "World"]

_NOWHERE = Place("", "")
_STATE = ("__array_interface__", "__array_struct__", "__dlpack__", "ctypes", "data", "gi_frame", "cr_frame", "ag_frame")
"""Attributes that give an array's or a buffer's address to code in C, or a generator's frame to forward."""
REGISTRIES = ("_parameters", "_buffers", "_modules")
_OF_STATE_DICTS = ("_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks")


class AskedTensors:
    """A run's reads of tensors' properties and identities.

    Attributes:
        asked: (input, attribute) of each read (:mod:`bridge.guards.tensor_reads`).
        looked: inputs whose properties forward read, computed with or not. ``looks``: other tensors, by id.
        identities: inputs that were compared by identity. ``others``: other tensors that were compared, by id.
        hidden: ids of tensors that modules outside of the tree hold.
    """

    def __init__(self) -> None:
        self.asked: dict[tuple[int, str], None] = {}
        self.looked, self.identities, self.hidden = set[int](), set[int](), set[int]()
        self.looks: dict[int, torch.Tensor] = {}
        self.others: dict[int, torch.Tensor] = {}


class World(Changes):
    """A run's reads of the state outside of it.

    Args:
        originals: by the id of an object copied for the run: its original.
        modules: the modules that run, with their paths.
        instead: (a function under ``lru_cache``, :meth:`kept`) → the function called in its place; ``None``: no
            replacement.

    Attributes:
        modules: by the id of an ``nn.Module``: a reference to it and the names of its attributes that were looked up
            (``"*"``: all).
        bases: classes whose bases decided a branch.
        inputs: positions of the run's inputs, by id.
        passed: Python objects among the run's arguments. ``kin``: earlier objects of the same classes: ``==``, ``in``
            and keys can tell whether an argument is one of them. Functions are kin by equal code, if
            ``told_apart``: forward compares one by identity.
        containers: the lists, tuples and dictionaries among the arguments.
        tensors: the reads of tensors' properties and identities.
        validates: whether code of ``torch.distributions`` ran, whose argument checks are optional.
    """

    def __init__(
        self,
        originals: Mapping[int, Any],
        modules: Iterable[tuple[str, nn.Module]] = (),
        instead: Callable[..., Any] | None = None,
    ):
        super().__init__(instead)
        self.originals = originals
        self._known: dict[int, Any] = {}
        self._places: dict[int, Place] = {}
        self.modules: dict[int, tuple[weakref.ref[nn.Module], set[str]]] = {}
        self.bases: dict[type, None] = {}
        self.inputs: dict[int, int] = {}
        self.passed: list[Any] = []
        self.kin: list[Any] = []
        self.containers: list[Any] = []
        self.tensors, self.validates = AskedTensors(), False
        self.told_apart = False
        self._places[id(os.environ._data)] = Place("", "an environment variable", "", "an environment variable")
        self._held: dict[int, dict[str, Any]] = {}
        self.strangers = Strangers()
        for path, module in modules:
            self._held[id(module)] = dict(module.__dict__)
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                self.know(tensor, Place("", f"'{path}.{name}'" if path else f"'{name}'"))
            self._known[id(module)] = module
            self._places[id(module)] = Place("", path, f" of submodule '{path}'" if path else " of the module", "self")

    def know(self, value: Any, place: Place = _NOWHERE) -> None:
        """Notes that an object existed before the call."""
        value = self.cached_function(value)
        if type(value) in PLAIN or id(value) in self._known:
            return
        self._known[id(value)], _ = value, self._places.setdefault(id(value), place)
        if (told := implicit_of(value)) is not None:
            self.ask(told[0], (), {}, told[1])
        if is_a(value, FunctionType):
            self.function(value)
        elif is_a(value, type) and issubclass(value, torch.autograd.Function):
            for name in ("forward", "setup_context", "backward", "jvp", "vmap"):
                self.class_name(value, name)
            backward = inner_function(class_entry(value, "backward"))
            self.later |= {("class", id(value), "backward"), ("code", id(backward))}
        elif is_a(value, types.MethodType):
            self.know(value.__func__, place)
            self.know(value.__self__, place)
        elif is_a(value, staticmethod | classmethod):
            self.know(value.__func__, place)
        elif is_a(value, property):
            self.know(value.fget, place)
        elif is_a(value, types.BuiltinMethodType | types.MethodWrapperType):
            if not is_a(value.__self__, ModuleType | type(None)):
                self.know(value.__self__, place)
        elif is_a(value, functools.partial):
            for each in (value.func, *value.args, *value.keywords.values()):
                self.know(each, place)
            self.whole(value)

    def knows(self, value: Any) -> bool:
        return id(value) in self._known

    def place(self, value: Any) -> Place:
        return self._places.get(id(value), _NOWHERE)

    def original(self, value: Any) -> Any:
        return self.originals.get(id(value), value)

    # Places

    def name(self, space: dict[Any, Any], name: Any, place: Place, running: dict[Any, Any] | None = None) -> Any:
        """Notes the lookup of a name in a namespace; returns its value, or ``ABSENT``."""
        held = space if running is None else running
        value, key = entry_of(held, name), ("name", id(space), name)
        try:
            item = self._note(key, Name(space, name, place, None if running is space else running))
        except TypeError:  # an unhashable key
            return value
        if type(value) is functools._lru_cache_wrapper:
            self._replace(item, value)
        if value is not ABSENT and value is self.first[key]:  # otherwise the call has set it
            self.know(value, place)
        return value

    def kept(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> CachedResult:
        """Notes the result that a function under ``lru_cache`` keeps for these arguments: eager would return it."""
        named = tuple((name, key_of(each)) for name, each in kwargs.items())
        key = "kept", id(function), tuple(map(key_of, args)), named
        if key not in self.items:
            told = f"what {getattr(function, '__name__', 'a function')}() keeps"
            self.items[key] = CachedResult(function, args, kwargs, Place("", told))
        self.know(self.items[key].read(), self.items[key].place)
        return self.items[key]

    def function(self, function: Any) -> None:
        """Notes a Python function that may run: its code, default arguments and closure variables."""
        own = self.original(function)
        if ("code", id(own)) in self.items:
            self._note(("code", id(own)), None)
            return
        self._note(("code", id(own)), Code(own, Place("", f"code of {function.__qualname__}")))
        held = Place("", f"default arguments of {function.__qualname__}")
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.know(value, held)
            self.whole(value)
        for name in function.__kwdefaults__ or {}:
            self.name(function.__kwdefaults__, name, held)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), own.__closure__ or (), strict=False)
        for name, cell, of in cells:
            around = Place("variable", name, f" around {function.__qualname__}")
            item = self._note(("cell", id(of)), ClosureCell(of, around, None if cell is of else cell))
            value = self.first["cell", id(of)]
            self.know(value, around)
            if type(value) is functools._lru_cache_wrapper:
                self._replace(item, value)

    def class_name(self, kind: type, name: str) -> Any:
        """Notes the lookup of a name in a class and its bases; returns the raw entry."""
        value = class_entry(kind, name)
        of = f" of class {kind.__name__}"
        place = Place("attribute", name, of) if name != "forward" else Place("", f"forward{of}")
        self.bases.setdefault(kind)
        if is_ours(value):  # set for the run
            return ABSENT
        if name == "_validate_args" and issubclass(kind, Distribution):  # a mode with a guard of its own
            return ABSENT
        if ("class", id(kind), name) not in self.items:
            item = self._note(("class", id(kind), name), ClassName(kind, name, place))
            if type(value) is functools._lru_cache_wrapper:
                self._replace(item, value)
            for each in (value, inner_function(value)):
                if each is not ABSENT and each is not None:
                    self.know(each, place)
        return value

    def attribute(self, owner: Any, name: str) -> list[Any]:
        """Notes the lookup of an attribute; returns its possible values."""
        if is_a(owner, FrameOf):
            found = {"f_globals": owner.globals, "f_back": owner.back}.get(name)
            if name == "f_globals":
                self.know(found, Place("global", found.get("__name__", "")))
            return [] if found is None else [found]
        if is_a(owner, Instance):
            if is_changeable(owner.kind):
                self.class_name(owner.kind, name)
            return []
        if type(owner) in weakref.ProxyTypes:
            return self._behind_proxy(owner, name)
        kind, place = type(owner), self.place(owner)
        if kind is super:
            return self._of_super(owner, name)
        if kind is types.MethodType and name not in ("__self__", "__func__", "__class__"):
            return self.attribute(owner.__func__, name)
        if name == "__class__":
            self.know(kind, Place("class", kind.__name__))
            self._class(owner)
            return [kind]
        if name == "__dict__":
            return self._dict(owner)
        if issubclass(kind, ModuleType):
            self._class(owner)
            if is_changeable(kind):
                self.class_name(kind, name)
            value = self.name(owner.__dict__, name, Place("global", f"{owner.__name__}.{name}"))
            if value is ABSENT:
                value = self.name(owner.__dict__, "__getattr__", Place("global", f"{owner.__name__}.__getattr__"))
            return interesting(value)
        if issubclass(kind, type):
            return self._of_class(owner, kind, name, place)
        raw = self.class_name(kind, name) if is_changeable(kind) else class_entry(kind, name)
        if issubclass(kind, torch.Tensor) and (place_of := self.inputs.get(id(owner))) is not None:
            self.tensors.looked.add(place_of)
            if not is_asked(name):
                return function_or_object(raw)
            self.tensors.asked.setdefault((place_of, name))
            value = owner.__dict__.get(name, ABSENT)
            if value is not ABSENT:
                self.know(value, Place("attribute", name, " of a tensor"))
            return interesting(value)
        if issubclass(kind, nn.Module):
            return self._of_module(owner, name, raw)
        return self._of_object(owner, kind, name, place, raw)

    def _of_class(self, owner: type, kind: type, name: str, place: Place) -> list[Any]:
        """The values of a class's attribute; ``kind``: its metaclass."""
        if name in ("__mro__", "__bases__", "__base__"):
            self.bases.setdefault(owner)
            found = getattr(owner, name)
            for each in found if is_a(found, tuple) else (found,):
                self.know(each, Place("class", each.__name__))
            return [found]
        if hasattr(type(class_entry(kind, name)), "__set__") and not is_a(class_entry(kind, name), property):
            return self._slot(owner, name, place)
        self.validates |= name == "_validate_args" and issubclass(owner, Distribution)
        value, of_kind = self.class_name(owner, name), self.class_name(kind, name) if kind is not type else ABSENT
        return function_or_object(of_kind if value is ABSENT else value)

    def _of_object(self, owner: Any, kind: type, name: str, place: Place, raw: Any) -> list[Any]:
        """The values of any other object's attribute; ``raw``: the entry in its class."""
        if not (known := self.knows(owner)):
            self.strangers.note(owner, ("attribute", name))
        elif is_a(owner, torch.Tensor):
            self.look_at(owner)
        if known and is_a(owner, torch.Tensor) and is_asked(name) and hasattr(torch.Tensor, name):
            self.ask(asked_of, (self.original(owner), name), {}, f"{place}.{name}")
            return []
        self._class(owner)
        if name in _STATE and not is_a(owner, torch.Tensor):
            self.whole(owner)
        if raw is not ABSENT and hasattr(type(raw), "__set__"):  # it precedes the dictionary
            computed = is_a(raw, property) or is_a(class_entry(type(raw), "__get__"), FunctionType)
            if not computed and not is_a(owner, torch.Tensor) and name not in ("__dict__", "__class__"):
                return self._slot(owner, name, place)
            made = inner_function(raw)
            if known and made is not None and is_machinery(made.__code__, made.__globals__):
                self.ask(getattr, (self.original(owner), name), {}, f"{place}.{name}")
            return []
        if is_a(owner, threading.local):
            return self._slot(owner, name, place)
        if not known:
            held = dict_of(owner) or {}
            if self.knows(held):
                self.name(held, name, self.place(held).then(f".{name}"))
            return interesting(held[name]) if name in held else function_or_object(raw)
        held, own = dict_of(owner), dict_of(self.original(owner))
        if held is not None and own is not None:
            value = self.name(own, name, place.then(f".{name}"), None if held is own else held)
            if value is not ABSENT:
                return interesting(value)
        return function_or_object(raw) if raw is not ABSENT else self._computed(owner, kind, name)

    def look_at(self, tensor: torch.Tensor) -> None:
        """Notes that properties of a tensor were read."""
        if (place := self.inputs.get(id(tensor))) is not None:
            self.tensors.looked.add(place)
        elif self.knows(tensor):
            self.tensors.looks[id(tensor)] = self.original(tensor)

    def note_properties(self, inputs: Collection[int]) -> None:
        """Notes the tensors whose properties were read, except ``inputs`` (ids), which have conditions of their own."""
        for tensor in [each for key, each in self.tensors.looks.items() if key not in inputs]:
            place = Place("", f"a property of {self.place(tensor) or 'a tensor'}")
            self.items["properties", id(tensor)] = Answer(properties_of, (tensor,), {}, place)

    def _of_super(self, owner: Any, name: str) -> list[Any]:
        """The value of an attribute found by ``super()``, in the later classes of the MRO."""
        kind, value = owner.__self_class__, owner.__self__
        for base in kind.__mro__[kind.__mro__.index(owner.__thisclass__) + 1 :]:
            raw = self.class_name(base, name) if is_changeable(base) else class_entry(base, name)
            if name in vars(base):
                slot = is_a(raw, types.WrapperDescriptorType) and is_a(value, kind)
                return [raw.__get__(value)] if slot else function_or_object(raw)
        return []

    def _dict(self, owner: Any) -> list[Any]:
        if is_a(owner, nn.Module):
            self.all(owner)
            return []
        if is_a(owner, threading.local):
            return self._slot(owner, "__dict__", self.place(owner))
        held = vars(owner) if is_a(owner, type) else dict_of(owner)
        if held is None:
            return []
        if self.knows(owner) or is_a(owner, type | ModuleType):
            self._class(owner)
            own = vars(owner) if is_a(owner, type) else dict_of(self.original(owner))
            if own is not held:
                self.originals[id(held)] = own
            self.know(held, Place("class", owner.__name__) if is_a(owner, type) else self.place(owner))
        return [held]

    def _behind_proxy(self, owner: Any, name: str) -> list[Any]:
        try:
            behind = owner.__dir__.__self__
        except (ReferenceError, AttributeError):
            return []
        if self.knows(owner):
            self.know(behind, self.place(owner))
            self.ask(is_alive, (owner,), {}, f"{self.place(owner)}")
        return self.attribute(behind, name)

    def _computed(self, owner: Any, kind: type, name: str) -> list[Any]:
        """Notes an attribute that a function in C computes (``__getattr__ = dict.__getitem__``)."""
        computes = self.class_name(kind, "__getattr__") if is_changeable(kind) else ABSENT
        if computes is ABSENT or is_a(computes, FunctionType):
            return []
        if is_a(owner, dict):
            return self.entry(owner, name)
        self.ask(getattr, (self.original(owner), name, None), {}, f"{self.place(owner)}.{name}")
        return []

    def _class(self, owner: Any) -> None:
        """Notes a read of an object's class, dictionary and special methods."""
        if (place := self.inputs.get(id(owner))) is not None:
            self.tensors.asked.setdefault((place, "__class__"))
        elif self.knows(owner) and (is_changeable(type(owner)) or is_a(owner, ModuleType)) and not is_a(owner, type):
            own = self.original(owner)
            if ("type", id(own)) not in self.items:
                place = Place("", f"class of {self.place(owner) or type(own).__name__}")
                self._note(("type", id(own)), Class(own, place))
                self.special_methods(type(owner))

    def special_methods(self, kind: type) -> None:
        """Notes that special methods of a class may be looked up."""
        if is_changeable(kind):
            self.bases.setdefault(kind)
            self.ask(special_methods_of, (kind,), {}, f"a lookup of special methods in class {kind.__name__}")

    def _looked_up(self, module: nn.Module, name: str) -> None:
        self.modules.setdefault(id(module), (weakref.ref(module), set()))[1].add(name)

    def _of_module(self, owner: nn.Module, name: str, raw: Any) -> list[Any]:
        if not self.knows(owner):  # made by the call, or known later
            self.strangers.note(owner, ("attribute", name))
            spaces = (owner.__dict__, *(owner.__dict__.get(each, {}) for each in REGISTRIES))
            return function_or_object(next((space[name] for space in spaces if name in space), raw))
        own = self.original(owner)
        if is_a(owner, torch.jit.ScriptModule) and name not in dir(torch.jit.ScriptModule):
            self.ask(getattr, (own, name, None), {}, f"{self.place(owner)}.{name}")
        self._looked_up(own, name)
        for each in own.modules() if name == "state_dict" else ():
            for part in map(each.__dict__.get, _OF_STATE_DICTS):
                self.know(part, self.place(owner))
                self.whole(part)
        held = owner.__dict__
        if reads_later():
            place = Place("attribute", name, self.place(owner).of)
            for space in (own.__dict__, own.__dict__["_modules"], own.__dict__["_parameters"]):
                if name in space:
                    self.attributes["name", id(space), name] = Name(space, name, place)
        value = held.get(name, ABSENT)
        if value is ABSENT:
            value = next((held[each][name] for each in REGISTRIES if name in held.get(each, ())), raw)
        before = self._held.get(id(owner))
        made = before is not None and name in held and value is not before.get(name, ABSENT)
        if is_a(value, torch.Tensor) and before is None:
            self.tensors.hidden.add(id(value))
        if value is not raw and type(value) not in PLAIN and not made:
            of = self.place(owner)
            path = f"self.{of.text}.{name}" if of.text else f"self.{name}"
            is_inside = of.root == "self"
            self.know(value, Place("attribute", name, of.of, path) if is_inside else of.then(f".{name}"))
        return function_or_object(value)

    def _slot(self, owner: Any, name: str, place: Place) -> list[Any]:
        own, told, value = self.original(owner), place.then(f".{name}"), slot_of(owner, name)
        if self.knows(owner):
            self._note(("slot", id(own), name), Slot(own, name, told))
        if value is not ABSENT and self.knows(owner):
            self.know(value, told)
        return interesting(value)

    def note_kin(self) -> None:
        """Sets ``kin``, at the end of a run."""
        kinds = {_kind(each) for each in self.passed if self.told_apart or type(each) is not FunctionType}
        self.kin = [self.original(each) for each in self._known.values() if _kind(each) in kinds]

    def forget(self) -> None:
        """Drops the data that only the run needed; the guard keeps the rest."""
        held = self._known, self._held, self.first, self.inputs, self._places, self.tensors.looks
        for each in held:
            each.clear()
        self.passed.clear()
        self.containers.clear()
        self.originals = {}


def _kind(value: Any) -> Any:
    return value.__code__ if type(value) is FunctionType else type(value)
