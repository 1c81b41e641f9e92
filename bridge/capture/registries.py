"""Two-sided registries: a module's parameters, buffers and hooks as the capturing thread sees them, and all others.

While a module is captured, its tensors are swapped for fake ones in the registries that the capturing thread sees; a
call in another thread goes on with the real ones.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from bridge.base.errors import Unsupported, UnsupportedModule
from bridge.base.torch_internals import MODULE_HOOKS
from bridge.capture.derived_attributes import DerivedAttributes
from bridge.capture.tracing import is_capturing

__all__ = ["registries_here"]


class TwoSidedRegistry(dict):
    """A registry of a module: one content for the thread that captures, the real one for all others.

    What reads a dictionary's memory directly, as Dynamo's guards do, sees the real content.
    """

    def __init__(self, real: dict[str, Any], here: dict[str, Any]):
        super().__init__(real)
        self._real = real
        self._here = here

    def _side(self) -> dict[str, Any]:
        return self._here if is_capturing() else self._real

    def __contains__(self, name: object) -> bool:  # these two at each read of a parameter, without a call between
        return name in (self._here if is_capturing() else self._real)

    def __getitem__(self, name: str) -> Any:
        return (self._here if is_capturing() else self._real)[name]

    def __getattr__(self, name: str) -> Any:  # what an OrderedDict has besides
        return getattr(self._side(), name)

    def __reduce_ex__(self, protocol: int) -> Any:
        return type(self._real), (list(self._side().items()),)


def _of_side(name: str) -> Callable[..., Any]:
    def method(self: TwoSidedRegistry, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._side(), name)(*args, **kwargs)

    return method


for _name in (
    *("__delitem__", "__eq__", "__ior__", "__iter__", "__len__", "__ne__", "__or__"),
    *("__repr__", "__reversed__", "__ror__", "__setitem__", "clear", "copy", "get", "items", "keys", "pop", "popitem"),
    *("setdefault", "update", "values"),
):
    setattr(TwoSidedRegistry, _name, _of_side(_name))

_REGISTRIES = ("_parameters", "_buffers")


@contextmanager
def registries_here(root: nn.Module, derived: DerivedAttributes) -> Iterator[None]:
    """This thread may swap parameters and buffers, and sees no hooks on ``root``: they run around the compiled call.

    Hooks on inner modules run; one that returns nothing and sets no derived attribute is there for what it does
    besides, and is refused.

    What it leaves changed (swaps are undone by those who make them) is changed for all in the end.
    """
    sides = [
        (module.__dict__, kind, module.__dict__[kind], module.__dict__[kind].copy())
        for module in root.modules()
        for kind in _REGISTRIES
    ]
    before = [here.copy() for _, _, _, here in sides]
    hooks = [(root.__dict__, kind, root.__dict__[kind], OrderedDict()) for kind in MODULE_HOOKS]
    for path, module in root.named_modules():
        for kind in MODULE_HOOKS if module is not root else ():
            if held := module.__dict__[kind]:
                watched = [
                    (key, derived.watched(hook) or _giving_a_result(hook, type(root).__name__, path, kind))
                    for key, hook in held.items()
                ]
                hooks.append((module.__dict__, kind, held, OrderedDict(watched)))
    for attributes, kind, real, here in sides + hooks:
        attributes[kind] = TwoSidedRegistry(real, here)
    try:
        yield
    finally:
        for (_, _, real, here), then in zip(sides, before, strict=True):
            real.update((name, value) for name, value in here.items() if name not in then or then[name] is not value)
            for name in then.keys() - here.keys():
                real.pop(name, None)
        for attributes, kind, real, _ in sides + hooks:
            attributes[kind] = real


_OBSERVED = ("make_inputs_require_grads", "output_capturing_hook")
"""Hooks of transformers' by name, whose effects are seen: on what requires grad, and on what the same call returns."""


def _giving_a_result(hook: Callable[..., Any], name: str, path: str, kind: str) -> Callable[..., Any]:
    if getattr(hook, "__name__", "") in _OBSERVED:
        return hook

    @functools.wraps(hook, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        result = hook(*args, **kwargs)
        if result is None:
            reason = "a hook that returns nothing is there for what it does besides; a compiled call runs no Python"
            problem = Unsupported(
                f"{kind[1:]} on '{path}'", f"{name}.{path}", reason, "remove it, or add it afterwards"
            )
            raise UnsupportedModule(name, [problem])
        return result

    return run
