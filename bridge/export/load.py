"""``load_compiled``: a folder of :func:`bridge.export.save.save_compiled` → a module that runs and trains."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bridge.base.devices import HOST
from bridge.base.torch_internals import COMPILED_CALL
from bridge.compile import Backend, backend_for, load_program
from bridge.dispatch import (
    Backward,
    BackwardRun,
    DispatchOptions,
    Entry,
    EntryGuard,
    EntryOptions,
    Executable,
    FrozenPrograms,
    Programs,
)
from bridge.export.entry_data import modes_of, refuse_other_draws, refuse_other_settings, saved_call, signature_from
from bridge.export.module import LoadedDispatcher, module_from
from bridge.export.save import FORMAT, INDEX, PARAMETERS, digest, digest_of_index, read_safetensors
from bridge.state import ModuleTensor

__all__ = ["load_compiled"]


def load_compiled(path: str | os.PathLike) -> nn.Module:
    """As :func:`bridge.load_compiled`, which tells what it takes, returns and raises."""
    folder = Path(path)
    index = _index(folder)
    device = torch.device(index["device"])
    backend = backend_for(None if device == HOST else str(device))
    try:
        values = {name: value.to(device) for name, value in read_safetensors(folder / PARAMETERS).items()}
        signature = signature_from(index["signature"])
        module, tensors = module_from(index["name"], index["tree"], values, signature)
        final = {each: each.training for each in module.modules()}
        dispatcher = LoadedDispatcher(module, DispatchOptions("min_cut", "error", backend))
        for data in index["entries"]:
            dispatcher.entries.add(_entry(module, data, folder, tensors, backend))
    except KeyError as error:
        raise ValueError(f"{folder} does not hold what {FORMAT!r} does: {error!r}") from error
    for each, training in final.items():
        each.training = training
    module.__dict__[COMPILED_CALL] = dispatcher
    return module


def _index(folder: Path) -> dict[str, Any]:
    """What is saved, after every file was looked at."""
    try:
        index = json.loads((folder / INDEX).read_text())
        said, found = index.pop("sha256"), index.get("format")
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"{folder} was not saved by save_compiled: {error!r}") from error
    if found != FORMAT:
        raise ValueError(f"{folder} has the format {found!r}, wanted {FORMAT!r}")
    if digest_of_index(index) != said:
        raise ValueError(f"{folder / INDEX} is damaged: its checksum does not fit")
    for name, wanted in index["files"].items():
        if Path(name).name != name or digest(folder / name) != wanted:
            raise ValueError(f"{folder / name} is damaged: its checksum does not fit")
    return index


def _entry(
    module: nn.Module, data: dict[str, Any], folder: Path, tensors: tuple[ModuleTensor, ...], backend: Backend
) -> Entry:
    refuse_other_settings(data, backend.device)
    known = {spec.name: spec for spec in tensors}
    owned = tuple(known[name] for name in data["tensors"])
    call, arguments, steps = saved_call(data, type(module).__name__, owned, backend.device)
    refuse_other_draws(data, steps, backend.device)
    for path, child in module.named_modules():
        child.training = data["training"][path]
    frozen = "constants" in data
    with modes_of(data, backend.device):
        guard = EntryGuard(
            module, call.captured, arguments, (), data["uncounted"] if frozen else None, data["exact_modes"]
        )
        forward = load_program(folder / data["forward"], backend)
        if frozen:
            constants = load_program(folder / data["constants"], backend)
            pair = Executable.loaded(constants), Executable.loaded(forward)
            programs: Programs = FrozenPrograms(*pair, data["weights"], data["outputs"], guard.frozen.tensors)
        else:
            runs = {tuple(each["outputs"]): _backward(each, folder, backend) for each in data["backwards"]}
            losses = min(runs, key=len, default=())  # the fewest outputs
            made, outputs, nodes = partial(_saved, runs), data["outputs"], (tuple(range(len(call.wanted))),)
            programs = Programs(Executable.loaded(forward), outputs, call.differentiable, made, losses, nodes)
        return Entry(guard, call, programs, EntryOptions("min_cut", backend), steps)


def _backward(data: dict[str, Any], folder: Path, backend: Backend) -> BackwardRun:
    fields = {name: tuple(data[name]) for name in ("gradients", "copied", "absent")}
    step = Backward(data["name"], tuple(data["outputs"]), **fields)
    return BackwardRun(Executable.loaded(load_program(folder / data["program"], backend)), step)


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
