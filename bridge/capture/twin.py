"""Twin: a module tree → a copy of the same classes with other tensors, which a run of forward may change.

The twin copies the modules, and every object that their attributes reach and that reaches a module or a replaced
tensor: containers, bound methods, closures, partial functions, references and plain objects. It shares all other
objects with eager: settings, loggers, enumerations, caches.
"""

from __future__ import annotations

import copy
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from bridge.base.torch_internals import COMPILED_CALL
from bridge.state import dict_of, kept, kind_of_container

_MOST = 200_000
"""The most objects that the copy explores; objects reached after that are shared."""

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    types.ModuleType,
    types.CodeType,
    types.BuiltinFunctionType,
)
_PLAIN += (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_SHARED_MODULES = ("logging", "threading", "_thread", "torch._", "weakref", "contextvars", "numpy", "asyncio")
"""Packages whose objects are always shared, whatever they refer to."""


class Twin:
    """The twin of a module tree.

    Args:
        root: the outermost module.
        replace: a tensor in the tree → the twin's tensor, which may be the same.

    Attributes:
        module: the twin's outermost module.
    """

    def __init__(self, root: nn.Module, replace: Callable[[torch.Tensor], torch.Tensor]):
        self._copier = _Copier(root, replace, set(map(id, root.modules())))
        self.module = self._copier.copy(root)

    def has_copied(self, value: Any) -> bool:
        """Whether an object is one of the twin's copies."""
        return any(made is value for made in self._copier.copies.values())

    @property
    def originals(self) -> dict[int, Any]:
        """Id of each copy -> its original."""
        kept, found = self._copier.kept, {}
        for key, made in self._copier.copies.items():
            if (original := kept.get(key, made)) is made:
                continue
            found[id(made)] = original
            if _is(made, nn.Module):  # its registries
                pairs = ((own, original.__dict__.get(name)) for name, own in made.__dict__.items())
                found.update((id(own), each) for own, each in pairs if own is not each and _is(own, _CONTAINERS))
        return found

    def in_place_of(self, value: Any) -> Any:
        """The twin's copy of an object, or of an object's ``__dict__``; the object itself if it is shared."""
        kept, copies = self._copier.kept, self._copier.copies
        if id(value) in copies or type(value) is not dict:
            return copies.get(id(value), value)
        for key, made in copies.items():
            original = kept.get(key, made)
            own = None if made is original else dict_of(original)
            if own is value:
                return dict_of(made)
            if own is not None and _is(original, nn.Module):  # its registries
                for name, each in own.items():
                    if each is value:
                        return made.__dict__[name]
        return value

    def original(self, value: Any) -> Any:
        """A value of the twin's, with originals in the place of copies inside it."""
        kept, copies = self._copier.kept, self._copier.copies
        back = {id(made): kept[key] for key, made in copies.items() if made is not kept[key]}
        return _Copier(value, lambda tensor: back.get(id(tensor), tensor), (), back).copy(value)


class _Copier:
    """Copies every object that reaches a target: an object in ``own`` or ``copies``, or a replaced tensor.

    Args:
        root: the object from which the exploration starts.
        replace: a tensor → the tensor in its copy's place.
        own: ids of objects that are always copied.
        copies: id of an object -> its existing copy.
    """

    def __init__(
        self,
        root: Any,
        replace: Callable[[torch.Tensor], torch.Tensor],
        own: Collection[int],
        copies: Mapping[int, Any] | None = None,
    ):
        self.copies: dict[int, Any] = dict(copies or {})
        self.kept: dict[int, Any] = {}
        self._replace = replace
        self._reaching = self._explore(root, own)

    def _explore(self, root: Any, own: Collection[int]) -> set[int]:
        """Ids of the targets and of the objects that reach one."""
        seen: dict[int, Any] = {}
        readers: dict[int, list[int]] = {}
        targets: list[int] = []
        given = set(self.copies)
        waiting: list[Any] = [root]
        while waiting:
            value = waiting.pop()
            if id(value) in seen:
                continue
            seen[id(value)] = value
            if id(value) in given:
                targets.append(id(value))
                continue
            if id(value) in own:
                targets.append(id(value))
            if _is(value, torch.Tensor):
                replaced = self.copies[id(value)] = self._replace(value)
                if replaced is not value:
                    targets.append(id(value))
                continue
            for part in _parts(value):
                if not _is(part, _PLAIN):
                    readers.setdefault(id(part), []).append(id(value))
                    if len(seen) < _MOST:
                        waiting.append(part)
        self.kept = seen
        found: set[int] = set()
        while targets:
            each = targets.pop()
            if each not in found:
                found.add(each)
                targets += readers.get(each, ())
        return found

    def copy(self, value: Any) -> Any:
        """The twin's copy of a value; the value itself if it is shared."""
        if id(value) in self.copies:
            return self.copies[id(value)]
        if id(value) not in self._reaching:
            return value
        return self._copied(value)

    def _note(self, value: Any, made: Any) -> Any:
        self.copies[id(value)] = made
        return made

    def _copied(self, value: Any) -> Any:
        if _is(value, nn.Module):
            return self._object(value)
        if _is(value, dict):
            made = self._note(value, _shallow(value))
            for key, each in [*dict.items(value)]:
                dict.__setitem__(made, key, self.copy(each))
            return self._with_attributes(value, made)
        if _is(value, list):
            made = self._note(value, _shallow(value))
            list.__setitem__(made, slice(None), [self.copy(each) for each in kept(value)])
            return self._with_attributes(value, made)
        if _is(value, tuple):
            return self._note(value, tuple.__new__(type(value), [self.copy(each) for each in kept(value)]))
        if _is(value, (set, frozenset)):
            return self._note(value, type(value)(self.copy(each) for each in kept(value)))
        if _is(value, deque):
            return self._note(value, deque((self.copy(each) for each in value), value.maxlen))
        if _is(value, types.MethodType):
            return self._note(value, types.MethodType(self.copy(value.__func__), self.copy(value.__self__)))
        if _is(value, types.FunctionType):
            return self._function(value)
        if _is(value, types.CellType):
            made = self._note(value, types.CellType())
            made.cell_contents = self.copy(value.cell_contents)
            return made
        if _is(value, partial):
            arguments = [self.copy(each) for each in value.args]
            words = {name: self.copy(each) for name, each in value.keywords.items()}
            return self._note(value, type(value)(self.copy(value.func), *arguments, **words))
        if _is(value, weakref.ref):
            return self._note(value, weakref.ref(self.copy(value())))
        return self._object(value)

    def _object(self, value: Any) -> Any:
        try:
            made = object.__new__(_without_finalizer(type(value)))
        except TypeError:  # a class without plain construction: the object is shared
            return self._note(value, value)
        self._note(value, made)
        for name, each in _slots(value):
            object.__setattr__(made, name, self.copy(each))
        if _is(value, nn.Module):
            given = value.__dict__.items()
            made.__dict__.update((name, self._attribute(each)) for name, each in given if name != COMPILED_CALL)
            return made
        return self._with_attributes(value, made)

    def _attribute(self, value: Any) -> Any:
        """The copy of a module's attribute; dicts and sets, its registries, are always copied."""
        made = self.copy(value)
        return _shallow(made) if made is value and _is(value, (dict, set)) else made

    def _with_attributes(self, value: Any, made: Any) -> Any:
        own = dict_of(value)
        if type(own) is dict:
            made.__dict__.update((name, self.copy(each)) for name, each in own.items())
        return made

    def _function(self, value: types.FunctionType) -> types.FunctionType:
        cells = None if value.__closure__ is None else tuple(self.copy(cell) for cell in value.__closure__)
        defaults = self.copy(value.__defaults__)
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, defaults, cells)
        self._note(value, made)
        made.__kwdefaults__ = self.copy(value.__kwdefaults__)
        made.__module__, made.__qualname__, made.__doc__ = value.__module__, value.__qualname__, value.__doc__
        made.__annotations__ = value.__annotations__
        made.__dict__.update((name, self.copy(each)) for name, each in value.__dict__.items())
        return made


@cache
def _without_finalizer(kind: type) -> type:
    """A class, or a subclass with an empty ``__del__``: a copy must not release a resource that the original owns."""
    if not hasattr(kind, "__del__"):
        return kind
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind)(kind.__name__, (kind,), {**names, "__slots__": (), "__del__": lambda self: None})


def _is(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Whether an object is an instance of a class; unlike ``isinstance``, runs none of its code."""
    return issubclass(type(value), kinds)


def _parts(value: Any) -> Iterable[Any]:
    """The objects that an object holds and a copy of it would replace."""
    if _is(value, _CONTAINERS):
        yield from kept(value)
        yield from _attributes(value)
    elif _is(value, types.MethodType):
        yield value.__func__
        yield value.__self__
    elif _is(value, types.FunctionType):
        yield from value.__closure__ or ()
        yield value.__defaults__
        yield value.__kwdefaults__
        yield from value.__dict__.values()
    elif _is(value, types.CellType):
        try:
            yield value.cell_contents
        except ValueError:  # empty
            return
    elif _is(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif _is(value, weakref.ref):
        if (referent := value()) is not None:
            yield referent
    elif _is(value, nn.Module):
        yield from (each for name, each in value.__dict__.items() if name != COMPILED_CALL)
        yield from (each for _, each in _slots(value))
    elif not type(value).__module__.startswith(_SHARED_MODULES):
        yield from _attributes(value)
        yield from (each for _, each in _slots(value))


def _shallow(value: Any) -> Any:
    """A shallow copy of a dict, a list or a set; if the user's subclass raises, a copy of the stored items."""
    if type(value) is OrderedDict:
        return OrderedDict(value)
    try:
        return copy.copy(value)
    except Exception:  # noqa: BLE001 - whatever the user's class raises
        kind = kind_of_container(value)
        made = kind.__new__(type(value))
        if not issubclass(kind, dict):
            getattr(kind, "extend" if kind is list else "update")(made, kept(value))
            return made
        for key, each in [*kind.items(value)]:
            kind.__setitem__(made, key, each)
        return made


def _attributes(value: Any) -> Iterable[Any]:
    own = dict_of(value)
    return list(own.values()) if type(own) is dict else ()


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of an object's slots."""
    for kind in type(value).__mro__:
        for name, each in vars(kind).items():
            if isinstance(each, types.MemberDescriptorType) and not kind.__module__.startswith(
                ("builtins", "functools")
            ):
                try:
                    yield name, each.__get__(value)
                except AttributeError:
                    continue
