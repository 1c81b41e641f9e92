"""Loaded module: a tree of plain modules with the saved parameters under their names, and a dispatcher in front of it.

It has no source: a call that no saved entry serves is an error with its reason. What entries ask of the tree (training
flags, tensors, hooks) they ask as of any module; so ``train()``, ``state_dict()`` and optimizers work as before.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bridge.base.errors import DispatchMiss
from bridge.dispatch import SAVED, Dispatcher, GuardFailure
from bridge.export.entry_data import from_plain, to_plain
from bridge.state import ModuleTensor, SampleCall

__all__ = ["LoadedDispatcher", "module_data", "module_from"]


class LoadedDispatcher(Dispatcher):
    """As a dispatcher whose misses are errors; entries with frozen tensors are frozen anew when these have changed."""

    def _miss(self, call: SampleCall, found: GuardFailure, eager: Any) -> Any:
        entry = self._frozen_anew(call) if found.field.startswith("frozen ") else None
        if entry is None:
            return super()._miss(call, found, eager)
        return entry(entry.guard.match(call), call.module)


def module_data(module: nn.Module, tensors: Sequence[ModuleTensor]) -> dict[str, Any]:
    """Paths and training flags of all modules inside, names of tensors, as plain data."""
    first: dict[int, str] = {}
    modules = []
    for path, child in module.named_modules(remove_duplicate=False):
        modules.append([path, first.setdefault(id(child), path), child.training])
    kept = {name for path, child in module.named_modules() for name in _not_saved(path, child)}
    return {"modules": modules, "tensors": [to_plain(each) for each in tensors], "non_persistent": sorted(kept)}


def _not_saved(path: str, module: nn.Module) -> list[str]:
    """Buffers that are in no ``state_dict``."""
    return [f"{path}.{name}".lstrip(".") for name in module._non_persistent_buffers_set]


def module_from(
    name: str, data: Mapping[str, Any], values: Mapping[str, torch.Tensor], signature: inspect.Signature | None
) -> tuple[nn.Module, tuple[ModuleTensor, ...]]:
    """The tree with its tensors, and what these are called.

    Args:
        name: of the module's class.
        values: dense tensors by first name.
        signature: of the saved module's forward.
    """
    root = _class_of(name, signature)()
    made: dict[str, nn.Module] = {"": root}
    for path, same_as, training in data["modules"]:
        if path not in made:
            made[path] = made[same_as] if same_as in made else nn.Module()
            parent, _, last = path.rpartition(".")
            made[parent].add_module(last, made[path])
        made[path].training = training
    tensors = tuple(map(from_plain, data["tensors"]))
    temporary = set(data["non_persistent"])
    for spec in tensors:
        tensor = _laid_out(values[spec.name], spec)
        for full in spec.names:
            path, _, last = full.rpartition(".")
            _register(made[path], last, tensor, spec.kind, full not in temporary)
    return root, tensors


def _laid_out(value: torch.Tensor, spec: ModuleTensor) -> torch.Tensor:
    made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=value.device).copy_(value)
    return (
        nn.Parameter(made, spec.requires_grad) if spec.kind == "parameter" else made.requires_grad_(spec.requires_grad)
    )


def _register(owner: nn.Module, name: str, tensor: torch.Tensor, kind: str, persistent: bool) -> None:
    if kind == "parameter":
        owner.register_parameter(name, tensor)
    elif kind == "buffer":
        owner.register_buffer(name, tensor, persistent=persistent)
    else:
        setattr(owner, name, tensor)


def _class_of(name: str, signature: inspect.Signature | None) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise DispatchMiss(
            f"{name} was loaded without its source, and runs saved calls only; a copy of it runs none: load it again"
        )

    if signature is not None:
        setattr(forward, SAVED, signature)
    return type(name, (nn.Module,), {"forward": forward, "__doc__": "Loaded by bridge.load_compiled."})
