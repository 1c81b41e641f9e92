"""Pytrees in words: the structure of a call's arguments → a name for each leaf, and how two structures differ."""

from __future__ import annotations

from typing import Any

from bridge.base.torch_internals import pytree

__all__ = ["leaf_names", "structure_difference"]


def leaf_names(spec: pytree.TreeSpec) -> list[str]:
    """Names of the leaves of ``(args, kwargs)`` in order, as in ``"args[0]['mask']"`` or ``"kwargs['x'].scale"``."""
    args, kwargs = spec.children()
    return [*_names(args, "args"), *_names(kwargs, "kwargs")]


def _names(spec: pytree.TreeSpec, path: str) -> list[str]:
    if spec.is_leaf():
        return [path]
    return [
        name for key, child in zip(_keys(spec), spec.children(), strict=True) for name in _names(child, f"{path}{key}")
    ]


def _keys(spec: pytree.TreeSpec) -> list[str]:
    """How each child is taken from a node: ``"[0]"``, ``"['x']"`` or ``".x"``."""
    count = spec.num_children
    fields = getattr(spec.context if isinstance(spec.context, type) else spec.type, "_fields", None)
    if fields is not None and len(fields) == count:
        return [f".{name}" for name in fields]
    keys = _dict_keys(spec)
    return [f"[{key!r}]" for key in (range(count) if keys is None else keys)]


def _dict_keys(spec: pytree.TreeSpec) -> list[Any] | None:
    context = spec.context
    if isinstance(context, list) and len(context) == 2 and isinstance(context[1], list):  # a defaultdict's
        context = context[1]
    is_keys = isinstance(context, list | tuple) and len(context) == spec.num_children
    return list(context) if is_keys and not issubclass(spec.type, tuple | list) else None


def structure_difference(then: pytree.TreeSpec, now: pytree.TreeSpec) -> tuple[str, str]:
    """What differs between two unequal structures of ``(args, kwargs)``, and how: both in words."""
    counts = then.child(0).num_children, now.child(0).num_children
    if counts[0] != counts[1]:
        return "number of positional arguments", f"compiled for {counts[0]}, called with {counts[1]}"
    for part, path in enumerate(("args", "kwargs")):
        if (found := _difference(then.child(part), now.child(part), path)) is not None:
            return found
    return "structure of the arguments", f"compiled for {then}, called with {now}"


def _difference(then: pytree.TreeSpec, now: pytree.TreeSpec, path: str) -> tuple[str, str] | None:
    if (then.type, then.context, then.num_children) != (now.type, now.context, now.num_children):
        return f"structure of argument {path}", f"compiled for {_described(then)}, called with {_described(now)}"
    for key, first, second in zip(_keys(then), then.children(), now.children(), strict=True):
        if (found := _difference(first, second, f"{path}{key}")) is not None:
            return found
    return None


def _described(spec: pytree.TreeSpec) -> str:
    if spec.is_leaf():
        return "a single value"
    keys = _dict_keys(spec)
    kind = spec.context if isinstance(spec.context, type) else spec.type
    return f"{kind.__name__} of {spec.num_children if keys is None else keys}"
