"""Prepared twin: a module → the twin that a run of forward is made on, with the few layers that run another forward.

The outermost module has no hooks, which run around the compiled call as they do around forward. Hooks of inner modules
are part of what is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from bridge.base.torch_internals import MODULE_HOOKS
from bridge.capture.derived_attributes import DerivedAttributes
from bridge.capture.passes.cumulative import averages_cumulatively, cumulative_forward
from bridge.capture.twin import Twin
from bridge.state import Snapshot

__all__ = ["PreparedTwin"]


class PreparedTwin:
    """A twin on which forward runs.

    Args:
        module: the module, or an earlier twin in the state that a run has left.
        replace: a tensor of the module's → what the twin has in its place.

    Attributes:
        module: the twin.
        before: its Python state before anything runs; ``None`` where that is not ``watched``.
        twin: what it has in the place of what.
    """

    def __init__(
        self,
        module: nn.Module,
        replace: Callable[[torch.Tensor], torch.Tensor],
        *,
        watched: bool = False,
    ):
        self.twin = Twin(module, replace)
        self.module = self.twin.module
        for kind in MODULE_HOOKS:
            self.module.__dict__[kind] = type(self.module.__dict__[kind])()
        self.before = Snapshot(self.module) if watched else None
        self._layers: list[tuple[nn.Module, dict[str, Any]]] = []
        for layer in self.module.modules():
            if "forward" not in layer.__dict__ and averages_cumulatively(layer):
                self._put(layer, "forward", MethodType(cumulative_forward, layer))
        self._derived = DerivedAttributes(self.module)
        for layer in self.module.modules():
            for kind in MODULE_HOOKS if layer is not self.module else ():
                for key, hook in list(layer.__dict__[kind].items()):
                    watched = self._derived.watched(hook) or hook
                    if watched is not hook:
                        self._layers.append((layer, {kind: {key: hook}}))
                        layer.__dict__[kind][key] = watched
        self._derived.hide()

    def _put(self, layer: nn.Module, name: str, value: Any) -> None:
        self._layers.append((layer, {name: None}))
        layer.__dict__[name] = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs forward, past a ``__call__`` of the class's own, which will run around the compiled call."""
        self._derived.begin()
        result = nn.Module.__call__(self.module, *args, **kwargs)
        self._derived.check()
        return result

    def finish(self) -> None:
        """Puts back what was there before it was prepared: the twin may be the start of another one."""
        for layer, before in reversed(self._layers):
            for name, value in before.items():
                if value is None:
                    layer.__dict__.pop(name, None)
                else:
                    layer.__dict__[name].update(value)
        self._derived.put_back()
