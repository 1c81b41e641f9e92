"""Objects as they are stored: their dictionaries, the functions behind them, stand-ins for objects that are not kept.

Strangers: objects that forward read without a known place → those among them that existed before the run.

The garbage collector tells them apart: the run freezes all earlier objects, which it then does not list. Where the user
has frozen objects, the list of earlier objects is taken before the run instead.
"""

from __future__ import annotations

import gc
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, FunctionType, ModuleType
from typing import Any
from weakref import ProxyTypes, ref

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from bridge.base.collector import are_frozen, has_frozen
from bridge.base.threads import free_in_children
from bridge.guards.kinds import CONTAINERS, PLAIN, is_a
from bridge.state import dict_of

__all__ = ["ABSENT", "ANY", "FrameOf", "Instance", "Strangers", "binds", "class_entry", "classes_in", "dict_of"]
__all__ += ["fields_of", "function_or_object", "identity_of", "inner_function", "interesting", "is_alive"]
__all__ += ["is_changeable", "is_held", "is_in_function", "is_library", "is_ours", "names_of", "special_methods_of"]

ABSENT, ANY = object(), object()
"""Mark a missing value, and more plain values than are followed one by one."""
_MADE_ANEW = (super, types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
_IMMUTABLE_TYPE = 1 << 8
_NOTES = ("__abstractmethods__", "_abc_impl", "__doc__", "__weakref__", "__dict__", "__annotations__")


@dataclass(frozen=True)
class Instance:
    """Placeholder for a value that the analysis does not hold, such as a computed tensor: its class alone."""

    kind: type


@dataclass(frozen=True)
class FrameOf:
    """Stands for a frame object: the state that can be read through it."""

    globals: Any
    back: Any

    @classmethod
    def of(cls, frame: FrameType | None, deep: int = 4) -> FrameOf | None:
        return None if frame is None or not deep else cls(frame.f_globals, cls.of(frame.f_back, deep - 1))


def is_changeable(kind: type) -> bool:
    """Whether Python code may set attributes of a class."""
    return not kind.__flags__ & _IMMUTABLE_TYPE


def is_library(kind: type) -> bool:
    """Whether a class is built in or of Python's standard library: it does not change."""
    return not is_changeable(kind) or kind.__module__.partition(".")[0] in sys.stdlib_module_names


def is_alive(reference: Any) -> bool:
    """Whether the referent of a weak reference or proxy is alive."""
    try:
        return reference.__dir__ is not None if type(reference) in ProxyTypes else ref.__call__(reference) is not None
    except ReferenceError:
        return False


def inner_function(value: Any) -> Any:
    """The Python function behind a method, a property or a static method of a class; ``None`` if there is none."""
    if is_a(value, property):
        value = value.fget
    elif is_a(value, staticmethod | classmethod):
        value = value.__func__
    return value if is_a(value, FunctionType) else None


def is_ours(value: Any) -> bool:
    """Whether an object's class, or the function behind it, is of this package."""
    made = inner_function(value)
    return type(value).__module__.startswith("bridge.") or (
        made is not None and str(made.__module__).startswith("bridge.")
    )


def names_of(kind: type) -> list[tuple[str, Any]]:
    """The entries of a class and its bases, without torch's and Python's own notes."""
    held = [each for base in kind.__mro__ if is_changeable(base) for each in vars(base).items()]
    return [each for each in held if each[0] not in _NOTES]


_BUILT_IN = (
    object,
    int,
    float,
    complex,
    str,
    list,
    dict,
    set,
    types.FunctionType,
    types.GeneratorType,
    types.ModuleType,
)
_SPECIAL = {name for kind in _BUILT_IN for name, held in vars(kind).items() if name[:2] == "__" and callable(held)}
_SPECIAL |= {f"__i{name[2:]}" for name in _SPECIAL} | {
    f"__{name}__" for name in "matmul rmatmul imatmul complex".split()
}
_SPECIAL |= {
    f"__{name}__" for name in "getattr missing enter exit bytes fspath copy deepcopy array torch_function".split()
}
_TEXTS = {f"__{name}__" for name in "repr str format dir reduce_ex deepcopy".split()}
"""Special methods of tensors that other packages replace, to show them."""
_OF_COMPILED_CALLS = set("bernoulli_ clone contiguous copy_ detach expand mean new_empty new_zeros permute".split())
_OF_COMPILED_CALLS |= set("requires_grad_ reshape softmax squeeze sum transpose unflatten unsqueeze view".split())
"""Methods of tensors that compiled calls run: a replaced one would change their numbers."""

_OF_DYNAMO = (nn.Module, "__init__")
"""The process's first ``torch.compile`` replaces it, by one that calls it; calls of it in forward are followed."""


def special_methods_of(kind: type) -> list[tuple[str, Any]]:
    """The special methods of a class and its bases: Python looks them up without a mention in forward's code."""
    special = _SPECIAL - _TEXTS | _OF_COMPILED_CALLS if kind is torch.Tensor else _SPECIAL
    found = [(base, name) for base in kind.__mro__ if is_changeable(base) for name in base.__dict__ if name in special]
    return [(name, base.__dict__[name]) for base, name in found if (base, name) != _OF_DYNAMO]


def fields_of(value: Any) -> list[str]:
    """Names in a class, or in an object's class; without methods for modules and tensors."""
    kind = value if is_a(value, type) else type(value)
    methods = FunctionType if issubclass(kind, nn.Module | torch.Tensor) else ()
    return [name for name, held in names_of(kind) if not name.startswith("__") and not is_a(held, methods)]


def identity_of(value: Any) -> Any:
    """The identity of an object; equal for tuples, methods and proxies that are made anew of the same objects."""
    if type(value) is Instance:
        return value.kind
    if is_a(value, tuple):
        named = [identity_of(each) if type(each) in (tuple, Instance) else id(each) for each in tuple.__iter__(value)]
        return type(value), *named
    if is_a(value, types.MappingProxyType):
        return tuple(map(id, gc.get_referents(value)))
    if is_a(value, _MADE_ANEW):
        return id(value.__self__), getattr(value, "__thisclass__", None) or value.__name__
    return id(value)


def interesting(value: Any) -> list[Any]:
    """A list of the object; empty if it is absent or of an immutable type, whose reads need no guard."""
    return [] if value is ABSENT or type(value) in PLAIN else [value]


def function_or_object(raw: Any) -> list[Any]:
    """A class's raw entry as a list; a static or class method gives its function."""
    return interesting(raw.__func__ if is_a(raw, staticmethod | classmethod) else raw)


def class_entry(kind: type, name: str) -> Any:
    """The raw entry of a class or its bases under a name; ``ABSENT`` if there is none."""
    for base in kind.__mro__:
        held = base.__dict__
        if name in held:
            return held[name]
    return ABSENT


def is_in_function(frame: FrameType | None) -> bool:
    """Whether an ``autograd.Function`` runs: each call runs it as it is, where it cannot be traced."""
    while frame is not None and not any(is_a(each, FunctionCtx) for each in frame.f_locals.values()):
        frame = frame.f_back
    return frame is not None


def is_held(value: Any, name: Any) -> bool:
    """Whether ``getattr`` gives the entry of the object's own dictionary."""
    return type(name) is str and name in (dict_of(value) or ()) and class_entry(type(value), name) is ABSENT


def binds(owner: Any, name: str, function: Any) -> bool:
    """Whether an attribute lookup binds a function in C to its owner."""
    raw = class_entry(owner if is_a(owner, type) else type(owner), name)
    return is_a(raw, classmethod) if is_a(owner, type) else raw is function


def classes_in(value: Any) -> list[type]:
    """The classes in the second argument of ``isinstance``: a class, or nested tuples of classes."""
    if is_a(value, tuple):
        return [each for part in value for each in classes_in(part)]
    return [value] if is_a(value, type) else []


_OWN_REFERENCES = 2
"""References to an object under inspection that this code holds: a variable and an argument."""
_address = object.__hash__
"""Like ``id``, which raises an audit event: with an audit hook, a call of Python for every object of the process."""
_lock = free_in_children(threading.Lock())
_frozen: list[bool] = []
"""An item for each active run: whether the first of them froze the collector."""
Read = tuple[Any, ...]


class Strangers:
    """Objects that no known place leads to → the ones that existed before the run, with their reads."""

    def __init__(self) -> None:
        self._held: dict[int, Any] = {}
        self._reads: dict[int, dict[Read, None]] = {}
        self._tells = False
        self._before: list[Any] = []

    @contextmanager
    def lifetimes(self) -> Iterator[None]:
        """While active, the call's new objects can be told from earlier ones."""
        with _lock:
            freezes = _frozen[-1] if _frozen else not are_frozen() and not has_frozen()
            if freezes and not _frozen:
                gc.freeze()
            _frozen.append(freezes)
        self._before = [] if freezes else gc.get_objects()  # kept alive, so that no new object takes an old id
        self._tells = True
        try:
            yield
        finally:
            self._tells = False
            self._before.clear()
            self._held.clear()
            self._reads.clear()
            with _lock:
                if _frozen.pop() and not _frozen:
                    gc.unfreeze()

    def note(self, value: Any, *read: Read) -> None:
        """Notes an object and its reads; skips tensors, containers of them and generators: the call's own."""
        if not self._tells or type(value) in PLAIN:
            return
        if (held := self._held.get(id(value))) is None or (is_a(held, weakref.ref) and held() is not value):
            if is_a(value, torch.Tensor | Instance | FrameOf | ModuleType | type | types.GeneratorType):
                return
            if is_a(value, CONTAINERS):
                parts = dict.values(value) if is_a(value, dict) else value
                if any(is_a(each, torch.Tensor) for each in parts):
                    return
            try:
                self._held[id(value)] = weakref.ref(value)
            except TypeError:
                self._held[id(value)] = value
            self._reads[id(value)] = {}
        self._reads[id(value)].update(dict.fromkeys(read))

    def known_before(self) -> list[tuple[Any, list[Read]]]:
        """The objects that existed before the run, with the reads of each."""
        if not self._held:
            return []
        alive, found = (held() if is_a(held, weakref.ref) else held for held in self._held.values()), []
        made = set(map(_address, alive))
        made.intersection_update(map(_address, gc.get_objects()))
        made.difference_update(map(_address, self._before))
        for of in list(self._held):
            value = self._held.pop(of)
            value = value() if is_a(value, weakref.ref) else value
            if value is None:
                continue
            if _address(value) not in made if gc.is_tracked(value) else sys.getrefcount(value) > _OWN_REFERENCES:
                found.append((value, list(self._reads[of])))
        return found
