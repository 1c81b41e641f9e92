"""Attribute reads: objects, while a module runs → the names of their attributes that its code asks for.

A configuration object holds more than a layer's ``forward`` reads, and some of it changes while a model is trained:
transformers writes ``problem_type`` at the first loss and ``architectures`` when it saves. What a run did depends on
nothing but what it read: the same values would have it ask for the same names again, and so on to its end. So a call
is compiled for those alone.

Classes get a ``__getattribute__`` for the time of the run. Whoever asks for an object's dictionary, copies or pickles
it, reads everything (its special attributes are how that is done); so does who gets a value that lies elsewhere than
under the name that was asked for (``attribute_map`` of transformers, ``__getattr__``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType
from typing import Any

__all__ = ["AttributeReads", "original_of", "words_of"]

_GETATTRIBUTE = "__getattribute__"
_OURS = __name__.partition(".")[0]
_ABSENT = object()


class AttributeReads:
    """Which attributes of objects are read while :meth:`watched`.

    Args:
        objects: with a ``__dict__``; of a class that cannot be watched, all attributes count as read.
    """

    def __init__(self, objects: Iterable[Any]):
        self._objects = {id(each): each for each in objects}
        self._names: dict[int, set[str] | None] = {each: None for each in self._objects}

    def of(self, value: Any) -> frozenset[str] | None:
        """The names that were asked for; ``None``: everything has to count as read."""
        names = self._names.get(id(value))
        return None if names is None else frozenset(names)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notes what code other than this package's reads."""
        with ExitStack() as stack:
            for kind in dict.fromkeys(map(type, self._objects.values())):
                if _is_torchs(kind):
                    continue
                own = vars(kind).get(_GETATTRIBUTE, _ABSENT)
                original = kind.__getattribute__
                try:
                    type.__setattr__(kind, _GETATTRIBUTE, self._reader(original))
                except TypeError:  # a class of an extension's
                    continue
                stack.callback(_put_back, kind, own)
                for each in [key for key, value in self._objects.items() if type(value) is kind]:
                    self._names[each] = set(_written_in(original))
            yield

    def _reader(self, original: Any) -> Any:
        names = self._names

        def read(self: Any, name: str) -> Any:
            known = names.get(id(self))
            if known is None or _is_ours(sys._getframe(1).f_globals.get("__name__")):
                return original(self, name)
            known.add(name)
            try:
                value = original(self, name)
            except AttributeError:
                if hasattr(type(self), "__getattr__"):  # what that reads beside attributes is not known
                    names[id(self)] = None
                raise
            if name != "__class__" and (_is_special(name) or not _lies_under(self, name, value)):
                names[id(self)] = None
            return value

        read.__wrapped__ = original
        return read


def original_of(function: FunctionType) -> FunctionType | None:
    """The function itself; of a reader, what it stands for while objects are watched, if that is Python's."""
    if function.__module__ != __name__:
        return function
    inner = function.__dict__.get("__wrapped__")
    return inner if isinstance(inner, FunctionType) else None


def _is_ours(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] == _OURS


def _is_torchs(kind: type) -> bool:
    """Whether a class is one of torch's, whose C++ code may ask for attributes where no Python is to run.

    Dynamo asks its callback at every call of a Python function, which a reader is.
    """
    return kind.__module__.partition(".")[0] == "torch"


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _lies_under(owner: Any, name: str, value: Any) -> bool:
    """Whether a value is the object's own attribute of that name, or its class's."""
    held = object.__getattribute__(owner, "__dict__").get(name, _ABSENT)
    if held is value:
        return True
    for base in type(owner).__mro__:
        if name in vars(base):
            inside = vars(base)[name]  # a property, a method: what it reads is noted where it reads it
            return inside is value or hasattr(type(inside), "__get__")
    return False


def _written_in(getattribute: Any) -> Iterator[str]:
    """Names that a class's own ``__getattribute__`` may read by ``super()``, past every watch."""
    return words_of(getattribute.__code__) if isinstance(getattribute, FunctionType) else iter(())


def words_of(code: CodeType) -> Iterator[str]:
    """Names and texts in code, inner functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from words_of(constant)


def _put_back(kind: type, own: Any) -> None:
    if own is _ABSENT:
        type.__delattr__(kind, _GETATTRIBUTE)
    else:
        type.__setattr__(kind, _GETATTRIBUTE, own)
