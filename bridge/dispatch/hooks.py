"""Hooks of a dispatched module: torch runs them around the compiled forward.

torch runs a module's hooks in ``nn.Module._call_impl``, around ``self.forward``. To put another forward there without
touching the module, which other threads may be calling, ``_call_impl`` is given a shell in the module's place: all the
module's state, that forward, and the module's hooks, each of which is called with the module itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from bridge.base.torch_internals import MODULE_HOOKS

__all__ = ["call_with_hooks"]


class _HooksOf(Mapping):
    """Hooks that take ``module`` for whatever module they are called with; those that it has at the moment."""

    def __init__(self, module: nn.Module, hooks: Mapping[int, Callable[..., Any]]):
        self._module = module
        self._hooks = hooks

    def __getitem__(self, key: int) -> Callable[..., Any]:
        module, hook = self._module, self._hooks[key]
        return lambda _, *rest: hook(module, *rest)

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._hooks))

    def __len__(self) -> int:
        return len(self._hooks)


class _Shell(nn.Module):
    def __init__(self, module: nn.Module, forward: Callable[..., Any]):
        attributes = self.__dict__
        attributes.update(module.__dict__)
        for kind in MODULE_HOOKS:
            attributes[kind] = _HooksOf(module, attributes[kind])
        attributes["forward"] = forward


def call_with_hooks(module: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """What ``module(*args, **kwargs)`` would give if its forward were ``forward``, hooks on all modules included."""
    return _Shell(module, forward)._call_impl(*args, **kwargs)
