"""``load_compiled``: a folder of :func:`bridge.export.save.save_compiled` → a module that runs and trains.

The loaded module is a tree of plain modules with the saved parameters under their names, and a dispatcher. It has no
source: a call without a saved entry raises an error with the reason. It has the usual guards on the tree (training
flags, tensors, hooks), so ``train()``, ``state_dict()`` and optimizers work.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bridge.artifact import from_parts, read_artifact, read_safetensors
from bridge.base.devices import HOST
from bridge.base.errors import DispatchMiss
from bridge.base.torch_internals import COMPILED_CALL
from bridge.compile import Backend, backend_for, load_program
from bridge.dispatch import (
    SAVED,
    BackwardRun,
    Constants,
    Dispatcher,
    DispatchOptions,
    Entry,
    EntryGuard,
    EntryOptions,
    Executable,
    GuardFailure,
    Programs,
)
from bridge.export.entry_data import modes_of, refuse_other_draws, refuse_other_settings, saved_call
from bridge.export.save import INDEX, KIND, PARAMETERS, digest
from bridge.state import ModuleTensor, SampleCall

__all__ = ["load_compiled"]


def load_compiled(path: str | os.PathLike) -> nn.Module:
    """Implements :func:`bridge.load_compiled`."""
    folder = Path(path)
    index = _index(folder)
    device = torch.device(index["device"])
    backend = backend_for(None if device == HOST else str(device))
    try:
        values = {name: value.to(device) for name, value in read_safetensors(folder / PARAMETERS).items()}
        module, tensors = _module_from(index["name"], index["tree"], values, index["signature"])
        final = {each: each.training for each in module.modules()}
        dispatcher = _LoadedDispatcher(module, DispatchOptions("min_cut", "error", backend))
        for data in index["entries"]:
            dispatcher.entries.add(_entry(module, data, folder, tensors, backend))
    except KeyError as error:
        raise ValueError(f"{folder} does not hold what a {KIND} does: {error!r}") from error
    for each, training in final.items():
        each.training = training
    module.__dict__[COMPILED_CALL] = dispatcher
    return module


def _index(folder: Path) -> dict[str, Any]:
    """The folder's index; verifies the checksum of every file."""
    if folder.exists() and not (folder / INDEX).is_file():
        raise ValueError(f"{folder} was not saved by save_compiled: it has no {INDEX}")
    try:
        _, parts = read_artifact((folder / INDEX).read_bytes(), KIND)
        index = from_parts(parts)
    except ValueError as error:
        raise ValueError(f"{folder} was not saved by save_compiled: {INDEX} {error}") from error
    for name, wanted in index["files"].items():
        if Path(name).name != name or digest(folder / name) != wanted:
            raise ValueError(f"{folder / name} is damaged: its checksum does not fit")
    return index


def _entry(
    module: nn.Module, data: dict[str, Any], folder: Path, tensors: tuple[ModuleTensor, ...], backend: Backend
) -> Entry:
    """An entry from its data, its program files and the loaded module's tensors."""
    refuse_other_settings(data, backend.device)
    known = {spec.name: spec for spec in tensors}
    owned = tuple(known[name] for name in data["tensors"])
    saved, arguments, steps = saved_call(data, type(module).__name__, owned, backend.device)
    refuse_other_draws(data, steps, backend.device)
    for path, child in module.named_modules():
        child.training = data["training"][path]
    frozen = "constants" in data
    with modes_of(data, backend.device):
        guard = EntryGuard(
            module, saved.captured, arguments, (), data["uncounted"] if frozen else None, data["exact_modes"]
        )
        forward = load_program(folder / data["forward"], backend)
        if frozen:
            constants = Constants(Executable.loaded(load_program(folder / data["constants"], backend)), data["weights"])
            call = constants.bound(Executable.loaded(forward), guard.frozen.tensors)
            programs = Programs(call, data["outputs"], constants=constants)
        else:
            runs = {
                outputs: BackwardRun(Executable.loaded(load_program(folder / name, backend)), step)
                for name, outputs, step in data["backwards"]
            }
            losses = min(runs, key=len, default=())  # the fewest outputs
            made, outputs, nodes = partial(_saved, runs), data["outputs"], (tuple(range(len(saved.wanted))),)
            programs = Programs(Executable.loaded(forward), outputs, saved.differentiable, made, losses, nodes)
        return Entry(guard, saved, programs, EntryOptions("min_cut", backend), steps)


def _saved(runs: Mapping[tuple[int, ...], BackwardRun], outputs: tuple[int, ...], sizes: None) -> BackwardRun:
    """The backward for gradients of these outputs. ``RuntimeError`` if none was saved."""
    found = runs.get(outputs)
    if found is None:
        there = "; ".join(", ".join(map(str, each)) for each in runs)
        wanted = ", ".join(map(str, outputs))
        raise RuntimeError(
            f"no backward was saved for gradients of outputs {wanted} alone (there are {there}): run such a "
            "backward before save_compiled"
        )
    return found


class _LoadedDispatcher(Dispatcher):
    """A dispatcher whose misses are errors; refreezes entries whose frozen tensors have changed."""

    def _miss(self, call: SampleCall, found: GuardFailure, eager: Any) -> Any:
        entry = self._frozen_anew(call) if found.field.startswith("frozen ") else None
        if entry is None:
            return super()._miss(call, found, eager)
        return entry(entry.guard.match(call), call.module)


def _module_from(
    name: str, data: Mapping[str, Any], values: Mapping[str, torch.Tensor], signature: inspect.Signature | None
) -> tuple[nn.Module, tuple[ModuleTensor, ...]]:
    """Builds the module tree with its tensors → the root and the tensors' specifications.

    Args:
        name: name of the module's class.
        values: first name → contiguous tensor.
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
    tensors = data["tensors"]
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
