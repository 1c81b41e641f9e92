"""Free names of code: functions → the names that they look up outside of themselves, and where.

A name is looked for wherever the code could reach it in one step after another: ``settings.model.SCALE`` in the file's
globals, in the module ``settings``, in its class ``model``. Which namespace an attribute's name is looked up in is not
known, so a name may be watched that the code never reads there; never the other way round. Calls of the user's own
helpers are followed into other files, those of installed packages only within theirs.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from bridge.state.attribute_reads import original_of
from bridge.state.reachable import is_installed

__all__ = [
    "NOT_FORWARD",
    "UNSET",
    "Space",
    "cell_value",
    "function_class",
    "functions_of",
    "is_torchs",
    "names_of",
    "spaces_of",
    "with_helpers",
    "written_bases",
]

# Called when a module is built or printed, not when it is called.
NOT_FORWARD = frozenset({"__init__", "__init_subclass__", "__new__", "__repr__", "extra_repr", "reset_parameters"})
UNSET = object()
# Instructions that look for a name among the globals, in functions and in the bodies of classes inside them.
_ENDINGS = ("_GLOBAL", "_NAME", "_FROM_DICT_OR_GLOBALS")
_FLAGS = {"LOAD_GLOBAL": 1 if sys.version_info >= (3, 11) else 0}
"""Bits of an argument below the name's number."""
_LOOK_UPS = {code: _FLAGS.get(name, 0) for name, code in dis.opmap.items() if name.endswith(_ENDINGS)}


def written_bases(kind: type) -> Iterator[type]:
    """The classes that come before ``nn.Module`` (or ``object``), except torch's and Python's own."""
    for base in kind.__mro__:
        if base is nn.Module or base is object:
            return
        yield base


def is_torchs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def functions_of(kind: type) -> Iterator[FunctionType]:
    """What a class and its bases define and a call may run; torch's own modules are taken as they are."""
    for base in written_bases(kind):
        for name, value in vars(base).items() if not is_torchs(base) else ():
            function = as_function(value)
            function = None if function is None else original_of(function)
            if name not in NOT_FORWARD and function is not None:
                yield function


def as_function(value: Any) -> FunctionType | None:
    """The Python function behind a method, a property, a cached or otherwise wrapped function."""
    for inner in ("fget", "__func__", "__wrapped__"):
        found = getattr(value, inner, None) if not isinstance(value, FunctionType) else None
        if isinstance(found, FunctionType):
            return found
    return value if isinstance(value, FunctionType) else None


def function_class(value: Any) -> type | None:
    """The ``autograd.Function`` that a value is, or is the ``apply`` of: its methods run where that is called."""
    if isinstance(value, MethodType | BuiltinMethodType):
        value = value.__self__
    return value if isinstance(value, type) and issubclass(value, torch.autograd.Function) else None


def with_helpers(functions: Iterable[FunctionType]) -> list[FunctionType]:
    """These functions, those that they call, those that a decorator has wrapped, and so on."""
    found = {id(function): function for function in functions}
    waiting = list(found.values())
    while waiting:
        function = waiting.pop()
        values = [space.namespace[name] for space in spaces_of(function) for name in space.names]
        for helper in map(as_function, (*values, *map(cell_value, function.__closure__ or ()))):
            if helper is None or id(helper) in found:
                continue
            if helper.__globals__ is function.__globals__ or not is_installed(helper):
                found[id(helper)] = helper
                waiting.append(helper)
    return list(found.values())


@dataclass(frozen=True)
class Space:
    """Names that code may read in one namespace.

    Attributes:
        owner: the module, class or function whose namespace it is; a function's globals are their own owner.
        prefix: how a reason calls what is in it, as in ``"settings."``; empty for a function's own globals.
        is_users: whether what it holds is the user's to change, or the own file's.
    """

    owner: Any
    namespace: Mapping[str, Any]
    names: tuple[str, ...]
    prefix: str
    is_users: bool


def spaces_of(function: FunctionType) -> list[Space]:
    """The namespaces that the function's code reaches, each with those of its names that are there."""
    names = names_of(function.__code__)
    looked_up = global_names(function.__code__)
    waiting = [(function.__globals__, function.__globals__, "")]
    waiting += [inner for cell in function.__closure__ or () for inner in _inside(cell_value(cell))]
    seen: dict[int, Any] = {}
    found = []
    while waiting:
        owner, namespace, prefix = waiting.pop()
        if id(owner) in seen:
            continue
        seen[id(owner)] = owner
        reads = looked_up if owner is function.__globals__ else names
        here = tuple(name for name in reads if name in namespace and not name.startswith("__"))
        waiting += [inner for name in here for inner in _inside(namespace[name])]
        is_users = owner is function.__globals__ or not is_installed(owner)
        if not is_users:  # a library's modules stay where they are
            here = tuple(name for name in here if not isinstance(namespace[name], ModuleType))
        if here:
            found.append(Space(owner, namespace, here, prefix, is_users))
    return found


def _inside(value: Any) -> list[tuple[Any, Mapping[str, Any], str]]:
    """The namespaces of a module, a class of the user's, or a function that carries attributes."""
    if isinstance(value, ModuleType):
        return [(value, vars(value), f"{value.__name__}.")]
    if isinstance(value, type):
        bases = [] if is_installed(value) else [base for base in written_bases(value) if not is_installed(base)]
        return [(base, vars(base), f"{base.__qualname__}.") for base in bases]
    carries = isinstance(value, FunctionType) and vars(value)
    return [(value, vars(value), f"{value.__qualname__}.")] if carries else []


@cache
def names_of(code: CodeType) -> tuple[str, ...]:
    """Names that code looks up outside of itself (attribute names are among them), inner functions included."""
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in names_of(constant)]
    return tuple(dict.fromkeys((*code.co_names, *inner)))


@cache
def global_names(code: CodeType) -> tuple[str, ...]:
    """Names that code looks up among the globals, inner functions included: not ``model`` of ``self.model``."""
    here = _looked_up(code)
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in global_names(constant)]
    return tuple(dict.fromkeys((*here, *inner)))


def _looked_up(code: CodeType) -> Iterator[str]:
    """Names that the code's own instructions look up, one after the other, as ``dis`` reads them, but for its texts."""
    raw, more = code.co_code, 0
    for at in range(0, len(raw), 2):
        operation, argument = raw[at], raw[at + 1] | more
        more = argument << 8 if operation == dis.EXTENDED_ARG else 0
        if operation in _LOOK_UPS:
            yield code.co_names[argument >> _LOOK_UPS[operation]]


def cell_value(cell: Any) -> Any:
    """What an enclosing scope's variable holds; ``UNSET`` while it is not assigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return UNSET
