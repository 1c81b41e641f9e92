"""``save_compiled``: a dispatched module → a folder that another process loads, runs and trains without its source.

compiled.index            names, structures, guards and steps of calls; a digest of every other file
parameters.safetensors    the module's tensors
*.program                 programs: instructions, kernels, constants (:mod:`bridge.compile.runtime.storage`)
forward.so                with ``native``: the forward for TVM's runtime (:mod:`bridge.export.native`)
"""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bridge.artifact import NoFormError, to_parts, to_text, write_artifact, write_safetensors
from bridge.compile import Program, save_program
from bridge.dispatch import Entry, signature_of, stats
from bridge.export.entry_data import data_of
from bridge.export.native import save_native
from bridge.state import ModuleTensor

__all__ = ["INDEX", "KIND", "PARAMETERS", "digest", "save_compiled"]

KIND = "compiled module"

INDEX, PARAMETERS, NATIVE = "compiled.index", "parameters.safetensors", "forward.so"


def save_compiled(module: nn.Module, path: str | os.PathLike, *, native: bool = False) -> None:
    """Implements :func:`bridge.save_compiled`."""
    entries = stats(module).entries
    if not entries:
        raise ValueError(f"{type(module).__name__} has no compiled call yet: give add_tvm_dispatch a sample")
    path = Path(path)
    if path.exists() and not (path / INDEX).is_file():
        raise FileExistsError(f"{path} is there and was not saved by save_compiled")
    device = entries[-1].lowered.captured.device
    found = [data_of(entry, module) for entry in entries]
    specs, owned = _tensors(module, entries)
    index: dict[str, Any] = {
        "name": type(module).__name__,
        "device": str(device),
        "tree": _tree(module, specs),
        "signature": _told(signature_of(module.forward)),
        "entries": (),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        for number, (entry, data) in enumerate(zip(entries, found, strict=True)):
            index["entries"] += (data | _programs(entry, folder, number),)
        write_safetensors(folder / PARAMETERS, {spec.name: each for spec, each in zip(specs, owned, strict=True)})
        if native:
            index["native"] = save_native(module, entries, folder / NATIVE)
        index["files"] = {each.name: digest(each) for each in sorted(folder.iterdir())}
        (folder / INDEX).write_bytes(write_artifact(KIND, "", to_parts(index), index["name"]))
        folder.chmod(0o755)
        _put(folder, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _told(signature: inspect.Signature | None) -> inspect.Signature | None:
    """The signature; ``None`` if a default value cannot be serialized."""
    try:
        to_text(signature)
    except NoFormError:
        return None
    return signature


def _tree(module: nn.Module, tensors: Sequence[ModuleTensor]) -> dict[str, Any]:
    """Paths and training flags of all modules; specifications of tensors; names of non-persistent buffers."""
    first: dict[int, str] = {}
    modules = []
    for path, child in module.named_modules(remove_duplicate=False):
        modules.append((path, first.setdefault(id(child), path), child.training))
    unsaved = ((path, name) for path, child in module.named_modules() for name in child._non_persistent_buffers_set)
    kept = sorted(f"{path}.{name}".lstrip(".") for path, name in unsaved)
    return {"modules": tuple(modules), "tensors": tuple(tensors), "non_persistent": tuple(kept)}


def _tensors(module: nn.Module, entries: Sequence[Entry]) -> tuple[list[ModuleTensor], list[torch.Tensor]]:
    """All tensors that entries read, each name once."""
    found: dict[str, tuple[ModuleTensor, torch.Tensor]] = {}
    for entry in entries:
        for spec, tensor in zip(entry.lowered.captured.module_tensors, entry.guard.tensors(module), strict=True):
            found.setdefault(spec.name, (spec, tensor))
    return [spec for spec, _ in found.values()], [tensor for _, tensor in found.values()]


def _programs(entry: Entry, folder: Path, number: int) -> dict[str, Any]:
    """Writes the programs of an entry → their file names and metadata."""
    made = entry.programs
    found: dict[str, Any] = {"forward": _write(made.forward.program, folder, f"{number}.forward")}
    found["outputs"] = made.num_outputs
    if made.is_frozen:
        found["constants"] = _write(made.constants.executable.program, folder, f"{number}.constants")
        found["weights"] = made.constants.weights
        return found
    found["backwards"] = ()
    if made.differentiable:
        made.backward_for(tuple(made.differentiable))
    for place, (outputs, run) in enumerate(sorted(made.backwards.items())):
        name = _write(run.program, folder, f"{number}.backward{place}")
        found["backwards"] += ((name, outputs, replace(run.step, grad_outs=outputs, nodes=())),)
    return found


def _write(program: Program, folder: Path, name: str) -> str:
    save_program(program, folder / f"{name}.program")
    return f"{name}.program"


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            found.update(block)
    return found.hexdigest()


def _put(folder: Path, path: Path) -> None:
    """Moves the finished folder to its path; replaces an existing one."""
    if path.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent)) / path.name
        path.rename(old)
        folder.rename(path)
        shutil.rmtree(old.parent)
    else:
        folder.rename(path)
