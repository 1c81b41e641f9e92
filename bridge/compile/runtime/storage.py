"""Programs as artifacts: a program <-> plain data, tensors and machine code in the disk cache.

Programs as files: a program ↔ one file in the safetensors format, without pickle.
The tensors of the file are the program's constants, its metadata texts: instructions, layout and the scope of symbolic
extents as JSON, kernels as TVM's JSON of their functions. Reading makes tensors and frozen data and builds the kernels
again.

Programs on disk: a key → a program, its kernels by their keys in the disk cache.
Kept are programs of one size whose kernels are all kept. What a program assumes beyond its key, the ways of matrix
products that another process chose, is kept beside it, and has to fit this process.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from autodiff.extents import ExtentScope, scope_of_state, state_of_scope
from bridge.artifact import current_store, versions
from bridge.base.devices import HOST
from bridge.base.log import channel
from bridge.compile.backend import Backend
from bridge.compile.runtime.build import LateMapping
from bridge.compile.runtime.kernel_store import canonical_text, from_plain, functions_of, to_plain
from bridge.compile.runtime.program import Program
from bridge.compile.schedule.choices import Choices

__all__ = ["bytes_of", "form_of", "keep_program", "kept_program", "load", "parts_of", "plain_text", "save"]
__all__ += ["tensor_of", "texts"]


_FORMAT = "bridge program 4"
_PARTS = ("name", "steps", "layout", "results", "variables", "positions")
_SAME = ("format", "backend", "versions")

_DTYPES = {
    "BOOL": torch.bool,
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    "BF16": torch.bfloat16,
}
"""Element types by their names in the format."""
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def texts(program: Program) -> dict[str, str]:
    """The program but for its constants' elements, as texts: equal programs have equal ones, in any process.

    Raises:
        ValueError: a kernel has a literal that TVM's JSON cannot hold, a float64 below 2.3e-308.
    """
    state = None if program.scope is None else state_of_scope(program.scope)
    kernels = canonical_text(list(program.kernels.values()))
    return {
        "format": _FORMAT,
        "backend": program.backend.key,
        "choices": json.dumps(program.backend.choices.plain()),
        "versions": json.dumps(versions()),
        "program": plain_text(program),
        "scope": json.dumps(to_plain(state)),
        "kernel names": json.dumps(list(program.kernels)),
        "kernels": kernels,
    }


def plain_text(program: Program) -> str:
    """Instructions, layout and names as JSON; ``parts_of`` reads it."""
    return json.dumps({name: to_plain(getattr(program, name)) for name in _PARTS}, allow_nan=False)


def parts_of(text: str, scope: ExtentScope | None = None) -> dict[str, Any]:
    """Arguments of a :class:`Program` from :func:`plain_text`."""
    return {name: from_plain(part, scope) for name, part in json.loads(text).items()}


def save(program: Program, path: str | os.PathLike) -> None:
    """Writes a program to a file, which appears complete or not at all.

    Raises:
        ValueError: see :func:`texts`.
        OSError: the file cannot be written.
    """
    header: dict[str, Any] = {}
    data = b""
    for slot, tensor in program.constants:
        begin, data = len(data), data + bytes_of(tensor)
        offsets = [begin, len(data)]
        header[str(slot)] = {**form_of(tensor), "data_offsets": offsets}
    told = texts(program)
    text = json.dumps({"__metadata__": {**told, "sha256": _digest(told, header, data)}, **header}).encode()
    text += b" " * (-len(text) % 8)
    unfinished = Path(f"{os.fspath(path)}.{os.getpid()}.tmp")
    try:
        unfinished.write_bytes(len(text).to_bytes(8, "little") + text + data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def load(path: str | os.PathLike, backend: Backend) -> Program:
    """The program of a file that :func:`save` wrote: equal to the saved one, and the same bits when it runs.

    Args:
        path: the file. Its kernels are code: take it only from where you would take a library.
        backend: the one that the program was compiled for, or that one without its choices.

    Raises:
        ValueError: the file is no program, damaged, for another backend, or of other versions of torch, TVM or this
            package.
        OSError: the file cannot be read.
    """
    content = Path(path).read_bytes()
    try:
        begin = 8 + int.from_bytes(content[:8], "little")
        header, data = json.loads(content[8:begin]), content[begin:]
        told = header.pop("__metadata__")
        saved, digest = {name: told[name] for name in _SAME}, told.pop("sha256")
        backend = backend.choosing(Choices.of_plain(json.loads(told["choices"]))) if "choices" in told else backend
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{os.fspath(path)} is no saved program: {error!r}") from error
    for name, here in zip(_SAME, (_FORMAT, backend.key, json.dumps(versions())), strict=True):
        if saved[name] != here:
            raise ValueError(f"{os.fspath(path)} was saved for {name} {saved[name]!r}, here it is {here!r}")
    if digest != _digest(told, header, data):
        raise ValueError(f"{os.fspath(path)} is damaged: its checksum does not fit")
    state = from_plain(json.loads(told["scope"]))
    scope = None if state is None else scope_of_state(state)
    parts = parts_of(told["program"], scope)
    kernels = dict(zip(json.loads(told["kernel names"]), functions_of(told["kernels"]), strict=True))
    constants = tuple(
        (int(slot), tensor_of(entry, data[slice(*entry["data_offsets"])])) for slot, entry in header.items()
    )
    code = dict(zip(kernels, backend.build(list(kernels.items())), strict=True))
    return Program(**parts, constants=constants, kernels=kernels, backend=backend, code=code, scope=scope)


def _digest(told: dict[str, str], header: dict[str, Any], data: bytes) -> str:
    text = json.dumps([told, header], sort_keys=True).encode()
    return hashlib.sha256(text + data).hexdigest()


def form_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Element type and shape, as the format names them."""
    return {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape)}


def bytes_of(tensor: torch.Tensor) -> bytes:
    """A tensor's numbers, dense, from wherever it lies."""
    tensor = tensor.detach().to(HOST).contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else b""


def tensor_of(form: dict[str, Any], data: bytes) -> torch.Tensor:
    """A tensor of a form from its bytes, in memory of its own. ``ValueError`` if there are not as many."""
    tensor = torch.empty(form["shape"], dtype=_DTYPES[form["dtype"]], device=HOST)
    if len(data) != tensor.nbytes:
        raise ValueError(f"wanted {tensor.nbytes} bytes of a tensor, got {len(data)}")
    if data:
        ctypes.memmove(tensor.data_ptr(), data, tensor.nbytes)
    return tensor


_LOG = channel("cache")

_KIND = "program"
_CONSTANT = "constant "


def keep_program(key: str, digest: str, program: Program) -> None:
    """Puts a program, whose machine code is there, into the disk cache, if its kernels are and its backend keeps any.

    ``digest``: of its function, by which :mod:`bridge.cache` finds the programs of a lowering.
    """
    if program.backend.kept({}) is None:
        return
    kernels = {name: built.kept() for name, built in program.code.items()}
    if program.scope is not None or None in kernels.values():
        return
    parts: dict[str, bytes] = {
        "program": plain_text(program).encode(),
        "kernels": json.dumps(kernels).encode(),
        "choices": json.dumps(program.ways).encode(),
        "digest": digest.encode(),
        "constants": json.dumps([[slot, form_of(tensor)] for slot, tensor in program.constants]).encode(),
    }
    parts.update((f"{_CONSTANT}{slot}", bytes_of(tensor)) for slot, tensor in program.constants)
    current_store().put(_KIND, key, parts, program.name)


def kept_program(key: str, backend: Backend, adopt: Callable[[Any], bool]) -> Program | None:
    """The program of a key for a backend; ``adopt``: whether this process can make its choices (see
    :meth:`~bridge.compile.schedule.products.ProductPolicy.adopt`)."""
    found = current_store().get(_KIND, key)
    if found is None:
        return None
    parts = found.parts
    kernels = backend.kept(json.loads(parts["kernels"]))
    if kernels is None:
        return None
    ways = tuple(map(tuple, json.loads(parts["choices"])))
    if not adopt(ways):
        _LOG.info("%s is compiled again: products are computed in other ways here", found.note)
        return None
    constants = tuple(
        (slot, tensor_of(form, parts[f"{_CONSTANT}{slot}"])) for slot, form in json.loads(parts["constants"])
    )
    _LOG.info("program %s from the disk cache", found.note)
    return Program(
        **parts_of(parts["program"].decode()),
        constants=constants,
        kernels=LateMapping({name: read for name, (_, read) in kernels.items()}),
        backend=backend,
        code={name: built for name, (built, _) in kernels.items()},
        ways=ways,
    )
