"""``save_compiled``: a dispatched module → a folder that another process runs and trains, without the user's source.

compiled.json             names, structures, guards and steps of calls; a digest of every other file
parameters.safetensors    the module's tensors
*.program                 programs: instructions, kernels, constants (:mod:`bridge.compile.runtime.storage`)
forward.so                with ``native``: the forward for TVM's runtime (:mod:`bridge.export.native`)

The safetensors format: named tensors ↔ a file; nothing in it is executed when it is read.

Eight bytes with the header's length, the header as JSON (element type, shape and place of each tensor), then the
elements. Other tools read these files, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bridge.base.errors import Unsupported, UnsupportedModule
from bridge.capture import Captured
from bridge.compile import Program, bytes_of, form_of, save_program, tensor_of
from bridge.dispatch import Entry, signature_of, stats
from bridge.export.entry_data import data_of, signature_data
from bridge.export.module import module_data
from bridge.export.native import save_native
from bridge.state import ModuleTensor

__all__ = ["FORMAT", "INDEX", "PARAMETERS", "digest", "digest_of_index", "read_safetensors", "save_compiled"]
__all__ += ["write_safetensors"]


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes tensors, of any strides and devices, densely. ``KeyError`` for an element type that the format lacks."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = form_of(tensor) | {"data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(bytes_of(tensor))


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, dense, on the host.

    Raises:
        ValueError: it is no such file.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        try:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            first = file.tell()
            found = {}
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                file.seek(first + begin)
                found[name] = tensor_of(entry, file.read(end - begin))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no file of tensors: {error!r}") from error
    return found


FORMAT = "bridge compiled 1"
INDEX, PARAMETERS, NATIVE = "compiled.json", "parameters.safetensors", "forward.so"


def save_compiled(module: nn.Module, path: str | os.PathLike, *, native: bool = False) -> None:
    """As :func:`bridge.save_compiled`, which tells what it takes, returns and raises."""
    entries = stats(module).entries
    if not entries:
        raise ValueError(f"{type(module).__name__} has no compiled call yet: give add_tvm_dispatch a sample")
    path = Path(path)
    if path.exists() and not (path / INDEX).is_file():
        raise FileExistsError(f"{path} is there and was not saved by save_compiled")
    if any(_has_complex(entry.lowered.captured) for entry in entries):
        problem = Unsupported("complex numbers", type(module).__name__, "have no form in a saved call")
        raise UnsupportedModule(type(module).__name__, [problem])
    device = entries[-1].lowered.captured.device
    found = [data_of(entry, module) for entry in entries]
    specs, owned = _tensors(module, entries)
    index: dict[str, Any] = {
        "format": FORMAT,
        "name": type(module).__name__,
        "device": str(device),
        "tree": module_data(module, specs),
        "signature": signature_data(signature_of(module.forward)),
        "entries": [],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        for number, (entry, data) in enumerate(zip(entries, found, strict=True)):
            index["entries"].append(data | _programs(entry, folder, number))
        write_safetensors(folder / PARAMETERS, {spec.name: each for spec, each in zip(specs, owned, strict=True)})
        if native:
            index["native"] = save_native(module, entries, folder / NATIVE)
        index["files"] = {each.name: digest(each) for each in sorted(folder.iterdir())}
        (folder / INDEX).write_text(json.dumps(index | {"sha256": digest_of_index(index)}, allow_nan=False))
        folder.chmod(0o755)
        _put(folder, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _has_complex(captured: Captured) -> bool:
    """Whether complex tensors enter or leave a call: its programs know their parts."""
    tensors = (*captured.module_tensors, *captured.arguments, *(each for each in captured.outputs if each.is_tensor))
    return any(each.dtype.is_complex for each in tensors)


def _tensors(module: nn.Module, entries: Sequence[Entry]) -> tuple[list[ModuleTensor], list[torch.Tensor]]:
    """All tensors that entries read, once by name."""
    found: dict[str, tuple[ModuleTensor, torch.Tensor]] = {}
    for entry in entries:
        for spec, tensor in zip(entry.lowered.captured.module_tensors, entry.guard.tensors(module), strict=True):
            found.setdefault(spec.name, (spec, tensor))
    return [spec for spec, _ in found.values()], [tensor for _, tensor in found.values()]


def _programs(entry: Entry, folder: Path, number: int) -> dict[str, Any]:
    """Writes the programs of an entry; their names, with what belongs to each."""
    made = entry.programs
    found: dict[str, Any] = {"forward": _write(made.forward.program, folder, f"{number}.forward")}
    found["outputs"] = made.num_outputs
    if made.is_frozen:
        found["constants"] = _write(made.constants.program, folder, f"{number}.constants")
        found["weights"] = list(made.weights)
        return found
    found["backwards"] = []
    if made.differentiable:
        made.backward_for(tuple(made.differentiable))
    for place, (outputs, run) in enumerate(sorted(made.backwards.items())):
        name = _write(run.program, folder, f"{number}.backward{place}")
        step = {field: list(getattr(run.step, field)) for field in ("gradients", "copied", "absent")}
        found["backwards"].append({"program": name, "outputs": list(outputs), "name": run.step.program, **step})
    return found


def _write(program: Program, folder: Path, name: str) -> str:
    save_program(program, folder / f"{name}.program")
    return f"{name}.program"


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    found = hashlib.sha256()
    for block in _blocks(path):
        found.update(block)
    return found.hexdigest()


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            yield block


def digest_of_index(index: dict[str, Any]) -> str:
    """SHA-256 of what the index says."""
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def _put(folder: Path, path: Path) -> None:
    """The finished folder in its place; what was there goes."""
    if path.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent)) / path.name
        path.rename(old)
        folder.rename(path)
        shutil.rmtree(old.parent)
    else:
        folder.rename(path)
