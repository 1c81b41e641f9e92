"""Arguments and results of recorded calls: what Python code gives a function -> what kinds of calls are compared by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from bridge.capture.loops.calls import HERE, NUMBER
from bridge.state import constant_key

__all__ = ["Arguments", "NotComparedError", "Told", "key_of", "leaves_of", "told"]


class NotComparedError(Exception):
    """An argument is no tensor and no constant: what it is."""


class Told(NamedTuple):
    """A call's arguments: ``args`` and ``kwargs`` as its kind has them, each with its key.

    Attributes:
        number: of the function with these keys.
    """

    number: int
    args: tuple
    constants: Any
    kwargs: dict[str, Any]
    named_constants: Any


_MOST = 1 << 12
_PLAIN = type(None), bool, int, float, complex, str, bytes, type(Ellipsis)
_CONSTANTS = frozenset((*_PLAIN, torch.dtype, torch.device, torch.layout, torch.memory_format))


class Arguments:
    """Arguments of calls, each told once: those of a loop's steps are, but for the tensors, the same objects again."""

    def __init__(self) -> None:
        self._numbers: dict[tuple, int] = {}
        self._by_identity: dict[tuple, tuple[Told, list]] = {}

    def told(self, func: Any, args: tuple, kwargs: dict[str, Any], given: list[torch.Tensor]) -> Told:
        """Those of a call; the tensors in them are appended to ``given``, which is empty."""
        key, others = [func], []
        _note(args, key, others, given)
        for name, arg in kwargs.items():
            key.append(name)
            _note((arg,), key, others, given)
        known = self._by_identity.get(place := tuple(key))
        if known is not None:
            return known[0]
        given.clear()
        own, constants = told(args, given)
        named, named_constants = told(kwargs, given)
        number = self._numbers.setdefault((func, constants, named_constants), len(self._numbers))
        found = Told(number, own, constants, named, named_constants)
        if len(self._by_identity) < _MOST and all(map(_cannot_change, others)):
            self._by_identity[place] = found, others  # which live as long, so that no other object has their identity
        return found


def _note(args: Iterable[Any], key: list, others: list, given: list[torch.Tensor]) -> None:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            given.append(arg)
            key.append(HERE)
        else:
            others.append(arg)
            key.append(id(arg))


def _cannot_change(arg: Any) -> bool:
    return type(arg) in _CONSTANTS or (type(arg) in (tuple, torch.Size) and all(map(_cannot_change, arg)))


def told(arg: Any, given: list[torch.Tensor]) -> tuple[Any, Any]:
    """An argument as its kind has it, and its :func:`key_of`; the tensors in it are appended to ``given``."""
    if isinstance(arg, torch.Tensor):
        given.append(arg)
        return HERE, HERE
    if type(arg) is tuple or type(arg) is list:
        both = [told(item, given) for item in arg]
        return type(arg)([item for item, _ in both]), (type(arg), tuple([key for _, key in both]))
    if type(arg) is dict:
        both = {name: told(item, given) for name, item in arg.items()}
        return {name: item for name, (item, _) in both.items()}, tuple([(name, key) for name, (_, key) in both.items()])
    if isinstance(arg, tuple | list):  # a shape, as of tensors, or a named tuple
        return told(tuple(arg) if isinstance(arg, tuple) else list(arg), given)
    if type(arg) is slice:
        if any(isinstance(bound, torch.Tensor) for bound in (arg.start, arg.stop, arg.step)):
            raise NotComparedError("a tensor as a bound")
        return arg, key_of(arg)
    key = key_of(arg)
    if key is None:
        raise NotComparedError(f"an argument of type {type(arg).__name__}")
    return arg, key


def key_of(arg: Any) -> Any:
    """Hashable, and equal for equal arguments of kinds; ``None`` for what is no constant."""
    if isinstance(arg, tuple | list):
        return type(arg), tuple(map(key_of, arg))
    if type(arg) is dict:
        return tuple((name, key_of(item)) for name, item in arg.items())
    if type(arg) is slice:
        return "slice", *map(key_of, (arg.start, arg.stop, arg.step))
    return arg if arg is HERE or arg is NUMBER or arg is Ellipsis else constant_key(arg)


def leaves_of(result: Any) -> Iterator[Any]:
    """What a function returns, ``None`` passed over."""
    if isinstance(result, tuple | list):
        for item in result:
            yield from leaves_of(item)
    elif result is not None:
        yield result
