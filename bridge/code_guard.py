"""What a module's code refers to outside of the module: attributes of its classes, global names, enclosing scopes.

``forward`` may read ``self.scale`` from the class, a flag of its file, a variable of the function that defines it, or
call a helper beside it; any of them may be changed between calls. Noted are the class attributes that a module in the
tree sees (of classes below ``nn.Module``), and the global and enclosing names that the functions among them use,
helpers of the same file included. They are compared by identity, and what is mutable by contents.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter, is_, itemgetter
from types import CellType, CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

from torch import nn

from bridge.attributes import Contents, contents_of, same_plain
from bridge.mismatch import MODULE, Mismatch

__all__ = ["CodeGuard"]

# Called when a module is built or printed, not when it is called.
_NOT_FORWARD = frozenset({"__init__", "__init_subclass__", "__new__", "__repr__", "extra_repr", "reset_parameters"})
_UNSET = object()


class CodeGuard:
    """The conditions of one entry on code.

    Args:
        classes: of the modules in the tree.
    """

    def __init__(self, classes: Iterable[type[nn.Module]]):
        self._read: list[tuple[Callable[[Any], Any], Any]] = []
        self._values: list[Any] = []
        self._reasons: list[str] = []
        functions: dict[CodeType, FunctionType] = {}
        for kind in classes:
            self._note_class(kind)
            functions.update((function.__code__, function) for function in _functions_of(kind))
        cells: dict[int, tuple[CellType, str]] = {}
        names: dict[int, tuple[dict[str, Any], list[str]]] = {}
        for function in _with_helpers(functions):
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                if _cell(cell) is not _UNSET:
                    cells.setdefault(id(cell), (cell, f"variable '{name}' around {function.__qualname__} changed"))
            space, used = names.setdefault(id(function.__globals__), (function.__globals__, []))
            used += [name for name in _names(function.__code__) if name not in used and _counts(space, name)]
        for space, used in names.values():
            if used:
                self._note(_tuple_of(itemgetter, used), space, [f"global '{name}' changed" for name in used])
        for cell, reason in cells.values():
            self._note(_cell_tuple, cell, [reason])
        self._contents = self._note_contents()

    def _note_class(self, kind: type[nn.Module]) -> None:
        found = [
            name
            for base in _written(kind)
            if not _is_torchs(base)
            for name in vars(base)
            if name not in _NOT_FORWARD and not (name.startswith("__") and name.endswith("__"))
            if getattr(kind, name, _UNSET) is getattr(kind, name, None)  # a classmethod is bound anew at every look
        ]
        names = list(dict.fromkeys(["forward", *found]))
        reasons = [
            f"{name} of class {kind.__name__} was replaced"
            if name == "forward"
            else f"attribute '{name}' of class {kind.__name__} changed"
            for name in names
        ]
        self._note(_tuple_of(attrgetter, names), kind, reasons)

    def _note(self, read: Callable[[Any], tuple], source: Any, reasons: Sequence[str]) -> None:
        self._read.append((read, source))
        self._values += read(source)
        self._reasons += reasons

    def _note_contents(self) -> list[Contents]:
        seen: dict[int, Any] = {}
        return [
            contents
            for value, reason in zip(self._values, self._reasons, strict=True)
            if _is_users(value)
            for contents in contents_of(reason, value, seen)
        ]

    def _now(self) -> list[Any]:
        return [value for read, source in self._read for value in read(source)]

    def unchanged(self) -> bool:
        """Whether all of it is the very same."""
        try:
            if not all(map(is_, self._now(), self._values)):
                return False
        except (KeyError, AttributeError):
            return False
        return all(contents.unchanged() for contents in self._contents)

    def match(self) -> None:
        """Raises :class:`Mismatch`, naming the first thing that is not what it was; equal plain values are."""
        reasons = iter(self._reasons)
        values = iter(self._values)
        for read, source in self._read:
            try:
                found = read(source)
            except (KeyError, AttributeError) as missing:
                raise Mismatch(MODULE, f"a name that the code uses is gone: {missing}") from None
            for now, then, reason in zip(found, values, reasons, strict=False):
                if not same_plain(now, then):
                    raise Mismatch(MODULE, reason)
        for contents in self._contents:
            if not contents.unchanged():
                raise Mismatch(MODULE, contents.place)


def _written(kind: type[nn.Module]) -> Iterator[type]:
    """The classes of a module that come before ``nn.Module``."""
    for base in kind.__mro__:
        if base is nn.Module:
            return
        yield base


def _is_torchs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def _functions_of(kind: type[nn.Module]) -> Iterator[FunctionType]:
    """What the classes define and a call may run; torch's own modules are taken as they are."""
    for base in _written(kind):
        for name, value in vars(base).items() if not _is_torchs(base) else ():
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if name not in _NOT_FORWARD and isinstance(function, FunctionType):
                yield function


def _with_helpers(functions: dict[CodeType, FunctionType]) -> list[FunctionType]:
    """These functions, those of the same file that they call, those that a decorator has wrapped, and so on."""
    found = dict(functions)
    waiting = list(functions.values())
    while waiting:
        function = waiting.pop()
        named = (function.__globals__.get(name) for name in _names(function.__code__))
        helpers = [h for h in named if isinstance(h, FunctionType) and h.__globals__ is function.__globals__]
        helpers += [h for h in map(_cell, function.__closure__ or ()) if isinstance(h, FunctionType)]
        for helper in helpers:
            if helper.__code__ not in found:
                found[helper.__code__] = helper
                waiting.append(helper)
    return list(found.values())


def _names(code: CodeType) -> list[str]:
    """Names that code looks up outside of itself (attribute names are among them), inner functions included."""
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names(constant)]
    return list(dict.fromkeys((*code.co_names, *inner)))


def _counts(space: dict[str, Any], name: str) -> bool:
    return name in space and not name.startswith("__") and not isinstance(space[name], ModuleType)


def _is_users(value: Any) -> bool:
    """Whether an object's fields are settings of the user's, not the state of some library's machinery."""
    if type(value) in (list, dict, set, tuple, argparse.Namespace, SimpleNamespace):
        return True
    library = type(value).__module__.partition(".")[0]
    return library != "torch" and library not in sys.stdlib_module_names


def _tuple_of(getter: Callable[..., Callable[[Any], Any]], names: Sequence[str]) -> Callable[[Any], tuple]:
    """``itemgetter`` or ``attrgetter`` of these names; a tuple also for a single one."""
    if len(names) > 1:
        return getter(*names)
    single = getter(*names)
    return lambda source: (single(source),)


def _cell(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _UNSET


def _cell_tuple(cell: CellType) -> tuple[Any]:
    return (_cell(cell),)
