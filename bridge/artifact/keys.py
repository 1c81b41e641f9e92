"""Keys: what an artifact was made from, as plain data → SHA-256 of its canonical text.

A key holds everything that an artifact depends on; whoever finds an artifact by its key has made the same one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import tvm

import autodiff
import partition

__all__ = ["key_of", "of_this_package", "versions"]


@functools.cache
def versions() -> tuple[tuple[str, str], ...]:
    """``(name, version)`` of what makes code; ours is a digest of the sources, for a version may cover many states."""
    digest = hashlib.sha256()
    for root in (Path(__file__).parents[1], *(Path(package.__file__).parent for package in (autodiff, partition))):
        above = len(str(root.parent))
        for path in _sources(str(root)):
            with open(path, "rb", buffering=0) as file:
                digest.update(path[above:].encode() + b"\0" + file.read() + b"\0")
    return ("torch", str(torch.__version__)), ("tvm", str(tvm.__version__)), ("sources", digest.hexdigest())


def _sources(root: str) -> Iterator[str]:
    """The Python files below a folder, always in one order. Every start reads them: path objects would take as long."""
    for folder, inside, files in os.walk(root):
        inside[:] = sorted(each for each in inside if each != "__pycache__")
        yield from (os.path.join(folder, name) for name in sorted(files) if name.endswith(".py"))


def key_of(*parts: Any) -> str:
    """The key of plain data: strings, bytes, numbers, booleans, ``None``, and tuples or lists of them, told apart by
    type. 64 hexadecimal digits. ``TypeError`` for another object; no dicts, whose JSON does not tell keys apart."""
    return hashlib.sha256(json.dumps(parts, default=_bytes).encode()).hexdigest()


def of_this_package(*parts: Any) -> str:
    """:func:`key_of`, of these versions of torch, TVM and this package's sources."""
    return key_of(versions(), *parts)


def _bytes(value: Any) -> dict[str, str]:
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    raise TypeError(f"a key is made of plain data, got {value!r} of {type(value)}")
