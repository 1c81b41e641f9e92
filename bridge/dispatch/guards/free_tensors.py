"""Free tensors: tensors that forward read from globals or containers → readers that find them at each call.

A free tensor is no parameter, buffer or tensor attribute. If it occurs in exactly one known place (directly, or nested
in lists, tuples and dictionaries), it is an input that may be another tensor at each call, and the containers around it
must be the same. Any other free tensor must be the same object. If a parameter, buffer or attribute also occurs in a
known place, that place must still hold the same tensor (a tie).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from bridge.guards import Name, Reads, Slot, alike
from bridge.state import ModuleTensor, dict_of

__all__ = ["Found", "free_tensors"]

_DEEPEST = 4
"""Greatest depth of nested containers that are searched."""

_PARTS: Mapping[type, Callable[[Any], Iterator[tuple[Any, Any]]]] = {
    list: lambda value: enumerate(list.__iter__(value)),
    tuple: lambda value: enumerate(tuple.__iter__(value)),
    dict: lambda value: iter(dict.items(value)),
}


class Found(NamedTuple):
    """The result of :func:`free_tensors`.

    Attributes:
        tensors: the call's tensors, with readers of the free ones that may change.
        attributes: attributes that these readers check, as (place of the module, name); ``places``: other checked
            places, as (holder, key).
        ties: further places of tensors of the module: place in the list, name, reader.
    """

    tensors: list[ModuleTensor]
    attributes: list[tuple[int, str]]
    places: list[tuple[Any, Any]]
    ties: list[tuple[int, str, Callable[[], Any]]]


def free_tensors(
    tensors: Sequence[ModuleTensor],
    now: Sequence[torch.Tensor],
    lie: Sequence[tuple[str, int, str]],
    modules: Sequence[nn.Module],
    attributes: Sequence[tuple[int, str, Any]],
    reads: Reads,
) -> Found:
    """Finds the call's tensors in the places that forward read → :class:`Found`.

    Args:
        tensors: the call's tensors; ``now``: the tensor objects; ``lie``: their registry, module and name.
        attributes: the modules' attributes: place of the module, name and value.
        reads: forward's recorded reads. A tensor that forward compared by identity, or whose Python attributes it read,
            must be the same object.
    """
    place_of = {id(each): place for place, each in enumerate(now) if each is not None}
    asked = {part for kind, *key in reads.items if kind not in _OF_PLAIN for part in key if type(part) is int}
    asked |= {*reads.tensors.others}
    named = {part for kind, *key in reads.items if kind in _OF_PLAIN for part in key if type(part) is int}
    free = {key for key, place in place_of.items() if tensors[place].held is not None and not reads.tensors.identities}
    for key, each in [(key, now[place_of[key]]) for key in free]:
        ids = {key, id(dict_of(each))}
        if asked & ids or (named & ids and not _is_plain(each)):
            free.discard(key)
    holders = [(partial(_attribute, weakref.ref(modules[i]), name), value, name) for i, name, value in attributes]
    keys: list[Any] = [(i, name) for i, name, _ in attributes]
    seen = {id(each) for _, value, _ in holders for each, _ in _inside(value)}
    for item in reads.items.values():
        space = item.space if type(item) is Name else item.value if type(item) is Slot else None
        if space is not None and not getattr(item, "exact", False) and id(space) not in seen:
            holders.append((item.read, item.read(), item.place.text))
            keys.append((space, item.name))
            seen |= {id(each) for each, _ in _inside(holders[-1][1])}
    paths = [[(path, id(_at(value, path))) for path in _paths(value, place_of)] for _, value, _ in holders]
    often = Counter(key for each in paths for _, key in each)
    once = {key for key in free if often[key] == 1}
    found = Found(list(tensors), [], [], [])
    for (read, value, name), key, each in zip(holders, keys, paths, strict=True):
        fits, is_attribute = partial(_fits, then=_form(value, once)), isinstance(key[0], int)
        for path, tensor in each:
            place, told = place_of[tensor], name + "".join(f"[{part!r}]" for part in path)
            if tensor in once:
                reader, fits = partial(_read, read, path, fits), None
                found.tensors[place] = replace(tensors[place], kind="attribute", names=(told,), held=reader)
            elif tensors[place].held is None and (path or ("", *key) != lie[place]):
                found.ties.append((place, told, partial(_read, read, path, None)))
        if fits is None:
            (found.attributes if is_attribute else found.places).append(key)
            found.places.extend(_inside(value))
    return found


def _attribute(module: Callable[[], nn.Module | None], name: str) -> Any:
    return getattr(module(), "__dict__", {}).get(name)


def _inside(value: Any, deep: int = _DEEPEST) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) pair in a value, the value itself included."""
    for part, each in _parts(value) if deep else ():
        yield value, part
        yield from _inside(each, deep - 1)


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    return _PARTS[type(value)](value) if type(value) in _PARTS else iter(())


def _paths(value: Any, free: Collection[int], deep: int = _DEEPEST) -> Iterator[tuple]:
    """The paths of keys to the tensors with these ids."""
    if id(value) in free:
        yield ()
    for part, each in _parts(value) if deep else ():
        for path in _paths(each, free, deep - 1):
            yield part, *path


def _at(value: Any, path: tuple) -> Any:
    for part in path:
        value = value[part]
    return value


def _read(read: Callable[[], Any], path: tuple, fits: Callable[[Any], bool] | None) -> Any:
    """The tensor currently at a path; ``None`` if the containers around it differ."""
    value = read()
    if fits is not None and not fits(value):
        return None
    try:
        return _at(value, path)
    except (LookupError, TypeError):
        return None


class _Form(NamedTuple):
    """Template of a container: its class, its keys, and per key a template or value, or for a tensor that may change
    ``_ANY`` (any tensor) or ``_PLAIN`` (a plain one)."""

    kind: type
    keys: list[Any]
    parts: list[Any]


_ANY, _PLAIN = object(), object()
_OF_PLAIN = ("type", "name")
"""Kinds of reads with equal results for all plain tensors: the class, and names in the object's dictionary."""


def _is_plain(value: Any) -> bool:
    """Whether a value is a ``torch.Tensor``, no subclass, without attributes of the user's."""
    return type(value) is torch.Tensor and not dict_of(value)


def _form(value: Any, free: Collection[int]) -> Any:
    """A value, or its template if tensors in it may change."""
    if id(value) in free:
        return _PLAIN if _is_plain(value) else _ANY
    if not any(True for _ in _paths(value, free)):
        return value
    pairs = list(_parts(value))
    return _Form(type(value), [key for key, _ in pairs], [_form(each, free) for _, each in pairs])


def _fits(now: Any, then: Any) -> bool:
    if then is _PLAIN:
        return _is_plain(now)
    if then is _ANY:
        return isinstance(now, torch.Tensor)
    if type(then) is not _Form:
        return alike(now, then)
    if type(now) is not then.kind:
        return False
    pairs = list(_parts(now))
    return alike([key for key, _ in pairs], then.keys) and all(map(_fits, (each for _, each in pairs), then.parts))
