"""Tensors in containers: what forward read → where a call finds tensors that are no parameter, buffer or attribute.

A free one that lies in one place that is known, inside of lists, tuples and dictionaries of it or by itself, is an
input that may be another tensor at each call; what is around it has to be the same. Any other has to be the very one.
Where a parameter, buffer or attribute lies in such a place, too, that place has to lead to it.
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

from bridge.guards import Name, Reads, alike
from bridge.state import ModuleTensor, dict_of

__all__ = ["Found", "free_tensors"]

_DEEPEST = 4
"""Containers in each other that are looked into."""

_PARTS: Mapping[type, Callable[[Any], Iterator[tuple[Any, Any]]]] = {
    list: lambda value: enumerate(list.__iter__(value)),
    tuple: lambda value: enumerate(tuple.__iter__(value)),
    dict: lambda value: iter(dict.items(value)),
}


class Found(NamedTuple):
    """What is known of a list of tensors.

    Attributes:
        tensors: with readers of those that may change.
        attributes: that these answer for, by place of the module and name; ``places``: what holds those that they
            answer for elsewhere, and the key there.
        ties: further places of those that lie in a module: place in the list, name, reader.
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
    """Where tensors are in the places that forward read.

    Args:
        tensors: the call's, as they are ``now``, and where they ``lie``: registry, module, name.
        attributes: of the modules: place of the module, name and value.
        reads: what forward read. A tensor that it compared, or asked more than autograd and operators do, is the very
            one.
    """
    place_of = {id(each): place for place, each in enumerate(now) if each is not None}
    asked = {part for kind, *key in reads.items if kind not in _OF_PLAIN for part in key if type(part) is int}
    asked |= {*reads.others}
    named = {part for kind, *key in reads.items if kind in _OF_PLAIN for part in key if type(part) is int}
    free = {key for key, place in place_of.items() if tensors[place].held is not None and not reads.identities}
    for key, each in [(key, now[place_of[key]]) for key in free]:
        ids = {key, id(dict_of(each))}
        if asked & ids or (named & ids and not _is_plain(each)):
            free.discard(key)
    holders = [(partial(_attribute, weakref.ref(modules[i]), name), value, name) for i, name, value in attributes]
    keys: list[Any] = [(i, name) for i, name, _ in attributes]
    seen = {id(each) for _, value, _ in holders for each, _ in _inside(value)}
    for item in reads.items.values():
        if type(item) is Name and not item.exact and id(item.space) not in seen:
            holders.append((item.read, item.read(), item.place.text))
            keys.append((item.space, item.name))
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
    """All containers in a value, itself among them, with each of their keys."""
    for part, each in _parts(value) if deep else ():
        yield value, part
        yield from _inside(each, deep - 1)


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    return _PARTS[type(value)](value) if type(value) in _PARTS else iter(())


def _paths(value: Any, free: Collection[int], deep: int = _DEEPEST) -> Iterator[tuple]:
    """The ways to the tensors."""
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
    """The tensor that is there now; ``None`` where what is around it is not what it was."""
    value = read()
    if fits is not None and not fits(value):
        return None
    try:
        return _at(value, path)
    except (LookupError, TypeError):
        return None


class _Form(NamedTuple):
    """A container: its class, its keys, and for each a form or value; ``_ANY`` or ``_PLAIN`` of a tensor that may
    change, and may be any or has to be plain."""

    kind: type
    keys: list[Any]
    parts: list[Any]


_ANY, _PLAIN = object(), object()
_OF_PLAIN = ("type", "name")
"""What was asked of an object, its class and names in its dictionary, that is the same of all tensors without any."""


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor of torch's own class, without attributes of the user's."""
    return type(value) is torch.Tensor and not dict_of(value)


def _form(value: Any, free: Collection[int]) -> Any:
    """A value, or a form of it where tensors inside of it may change."""
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
