"""Objects as they are stored: their dictionaries, the functions behind them, stand-ins for what is not kept alive."""

from __future__ import annotations

import gc
import sys
import types
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import Any
from weakref import ProxyTypes, ref

import torch
from torch import nn

from bridge.guards.kinds import PLAIN, is_a
from bridge.state import dict_of

__all__ = ["ABSENT", "FrameOf", "Instance", "binds", "class_entry", "classes_in", "dict_of", "fields_of"]
__all__ += ["function_or_object", "identity_of", "inner_function", "interesting", "is_alive"]
__all__ += ["is_changeable", "is_library", "is_ours", "names_of"]

ABSENT = object()
"""In the place of what is not there."""
_MADE_ANEW = (super, types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
_IMMUTABLE_TYPE = 1 << 8
_NOTES = ("__abstractmethods__", "_abc_impl", "__doc__", "__weakref__", "__dict__", "__annotations__")


@dataclass(frozen=True)
class Instance:
    """In the place of a value that is not kept: a tensor, say, that the call computes."""

    kind: type


@dataclass(frozen=True)
class FrameOf:
    """In the place of a frame object: what can be read through it."""

    globals: Any
    back: Any

    @classmethod
    def of(cls, frame: FrameType | None, deep: int = 4) -> FrameOf | None:
        return None if frame is None or not deep else cls(frame.f_globals, cls.of(frame.f_back, deep - 1))


def is_changeable(kind: type) -> bool:
    """Whether Python code may set attributes of a class."""
    return not kind.__flags__ & _IMMUTABLE_TYPE


def is_library(kind: type) -> bool:
    """Whether a class is of C or of Python's own library, which nobody changes."""
    return not is_changeable(kind) or kind.__module__.partition(".")[0] in sys.stdlib_module_names


def is_alive(reference: Any) -> bool:
    """Whether there still is what a weak reference or a proxy leads to."""
    try:
        return reference.__dir__ is not None if type(reference) in ProxyTypes else ref.__call__(reference) is not None
    except ReferenceError:
        return False


def inner_function(value: Any) -> Any:
    """The function in Python behind a method, a property or a static method of a class; ``None`` if it is none."""
    if is_a(value, property):
        value = value.fget
    elif is_a(value, staticmethod | classmethod):
        value = value.__func__
    return value if is_a(value, FunctionType) else None


def is_ours(value: Any) -> bool:
    made = inner_function(value)
    return type(value).__module__.startswith("bridge.") or (
        made is not None and str(made.__module__).startswith("bridge.")
    )


def names_of(kind: type) -> list[tuple[str, Any]]:
    """What a class and its bases hold, but for what torch and Python note there."""
    held = [each for base in kind.__mro__ if is_changeable(base) for each in vars(base).items()]
    return [each for each in held if each[0] not in _NOTES]


def fields_of(value: Any) -> list[str]:
    """Names in an object's class, or in a class, but for methods of a module or a tensor."""
    kind = value if is_a(value, type) else type(value)
    methods = FunctionType if issubclass(kind, nn.Module | torch.Tensor) else ()
    return [name for name, held in names_of(kind) if not name.startswith("__") and not is_a(held, methods)]


def identity_of(value: Any) -> Any:
    """What tells an object from others; the same for pairs, methods and proxies that are made anew of the same ones."""
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
    """An object as a list; none, if it is not there or never changes."""
    return [] if value is ABSENT or type(value) in PLAIN else [value]


def function_or_object(raw: Any) -> list[Any]:
    """What a class holds under a name, as a list: of a static or class method its function."""
    return interesting(raw.__func__ if is_a(raw, staticmethod | classmethod) else raw)


def class_entry(kind: type, name: str) -> Any:
    """What a class or its bases hold under a name, as it is stored."""
    for base in kind.__mro__:
        held = base.__dict__
        if name in held:
            return held[name]
    return ABSENT


def binds(owner: Any, name: str, function: Any) -> bool:
    """Whether a function in C is given the object that it is found in: by the object's class."""
    raw = class_entry(owner if is_a(owner, type) else type(owner), name)
    return is_a(raw, classmethod) if is_a(owner, type) else raw is function


def classes_in(value: Any) -> list[type]:
    """The classes that ``isinstance`` is given: one, or tuples of them."""
    if is_a(value, tuple):
        return [each for part in value for each in classes_in(part)]
    return [value] if is_a(value, type) else []
