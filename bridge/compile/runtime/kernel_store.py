"""Kernels on disk: PrimFuncs → their machine code, from the disk cache or built and kept there.

A kernel's key is its canonical text with everything else that its machine code depends on: the backend, the target, the
versions of the compilers and of this package. Kernels that are built together share one library; a small artifact maps
each kernel to its library. So a program of another size or model finds common kernels.

Canonical text: a function of TVM ↔ the same text in every process.
"""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import tvm
import tvm_ffi
from tvm.tirx import PrimFunc

from autodiff.lazy import cached_property
from bridge.artifact import Store, current_store, from_parts, key_of, made_once, of_this_package, to_parts
from bridge.base.log import channel
from bridge.compile.backend import Built

__all__ = ["KeptFunctions", "KernelTexts", "Libraries", "canonical_text", "functions_of", "kept_kernels"]
__all__ += ["stored_or_built"]

_SMALL_FLOAT = re.compile(r'"value":(-?\d[\d.]*e-3\d\d)\b')


def canonical_text(functions: Sequence[Any]) -> str:
    """The text of TIR or Relax functions; :func:`functions_of` parses it.

    Raises:
        ValueError: a literal that TVM's JSON cannot hold, a float64 below 2.3e-308.
    """
    text = tvm.ir.save_json(tvm_ffi.Array(list(functions)))
    for number in _SMALL_FLOAT.findall(text):
        if abs(float(number)) < sys.float_info.min:
            raise ValueError(f"TVM's JSON cannot hold a kernel's literal {number}")
    return text


def functions_of(text: str) -> list[Any]:
    """The functions of a :func:`canonical_text` that this version of TVM wrote.

    ``tvm.ir.load_json`` would first search for older versions' formats, which takes several times as long.
    """
    return list(tvm_ffi.serialization.from_json_graph_str(text))


_LOG = channel("cache")

_KERNEL, _LIBRARY = "kernel", "library"
"""Kinds of artifacts."""


class KeptFunctions(dict[str, tvm_ffi.Function]):
    """Machine code by name.

    Attributes:
        keys_on_disk: the functions' keys in the disk cache.
    """

    keys_on_disk: Mapping[str, str] = {}


class Libraries(Protocol):
    """Builds libraries of functions, and serializes them."""

    @property
    def key(self) -> tuple[str, ...] | None:
        """The machine code's dependencies besides the backend's key; ``None`` if libraries cannot be kept."""

    def build(self, functions: Mapping[str, PrimFunc]) -> tvm.runtime.Module:
        """Builds one library."""

    def build_bytes(self, functions: Mapping[str, PrimFunc]) -> tuple[tvm.runtime.Module, bytes | None]:
        """The same, with the library's bytes for :meth:`load`; ``None`` if it cannot be kept."""

    def load(self, content: bytes) -> tvm.runtime.Module:
        """A library from its bytes. ``RuntimeError`` or ``OSError`` if the system cannot load it."""


class KernelTexts:
    """PrimFuncs by name, with their canonical texts, which need no compiler.

    Attributes:
        store: of machine code.
    """

    def __init__(self, functions: Mapping[str, PrimFunc]):
        self.functions, self.store = functions, current_store()

    @cached_property
    def by_name(self) -> Mapping[str, str] | None:
        """The texts; ``None`` if the store is unusable, or a literal has no text."""
        if not self.store.is_usable:
            return None
        try:
            return {name: canonical_text([func]) for name, func in self.functions.items()}
        except ValueError as error:
            _LOG.info("kernels are not kept: %s", error)
            return None

    def read(self) -> None:
        """Makes the texts."""
        _ = self.by_name


def stored_or_built(kernels: KernelTexts, backend: str, libraries: Libraries) -> tvm.runtime.Module | KeptFunctions:
    """Machine code by name. If several processes want the same functions at once, one builds them."""
    functions, store, made_for, texts = kernels.functions, kernels.store, libraries.key, kernels.by_name
    if made_for is None or texts is None:
        return libraries.build(functions)
    keys = {name: of_this_package(_KERNEL, backend, made_for, text) for name, text in texts.items()}
    found = KeptFunctions(_stored(store, _entries(store, keys), keys, libraries))
    if len(found) < len(keys):  # a process that is writing them writes the library first
        found.update(_of_library(store, key_of(_LIBRARY, sorted(keys.values())), keys, libraries) or {})
    found.keys_on_disk = keys
    missing = {name: func for name, func in functions.items() if name not in found}
    if not missing:
        return found
    group = key_of(_LIBRARY, sorted(keys[name] for name in missing))

    def look() -> dict[str, tvm_ffi.Function] | None:
        return _of_library(store, group, {name: keys[name] for name in missing}, libraries)

    def make() -> dict[str, tvm_ffi.Function]:
        library, content = libraries.build_bytes(missing)
        if content is not None:
            symbols = {keys[name]: name for name in missing}
            parts = {"library": content} | to_parts(symbols)
            store.put(_LIBRARY, group, parts, f"{backend.partition(' ')[0]}: {', '.join(missing)}")
            for name in missing:
                text = zlib.compress(texts[name].encode(), 1)
                store.put(_KERNEL, keys[name], {"library": group.encode(), "function": text}, name)
        return {name: library[name] for name in missing}

    found.update(made_once(store, group, look, make))
    return found


def kept_kernels(
    keys: Mapping[str, str], libraries: Libraries
) -> Mapping[str, tuple[Built, Callable[[], PrimFunc]]] | None:
    """Kernels by their keys in the disk cache, see :meth:`bridge.compile.backend.Backend.kept`."""
    store = current_store()
    entries = _entries(store, keys)
    if len(entries) < len(keys) or len(found := _stored(store, entries, keys, libraries)) < len(keys):
        return None
    inside = _Loaded(tuple(found.values()))
    return {
        name: (Built(lambda code=found[name]: code, inside, lambda key=keys[name]: key), partial(_function, text))
        for name, text in ((name, entry.parts["function"]) for name, entry in entries.items())
    }


@dataclass(frozen=True, eq=False)
class _Loaded:
    """Functions of loaded libraries, in place of a :class:`~bridge.compile.runtime.build.Build`."""

    functions: tuple[tvm_ffi.Function, ...]
    seconds: float = 0.0
    has_failed: bool = False


def _function(text: bytes) -> PrimFunc:
    (func,) = functions_of(zlib.decompress(text).decode())
    return func


def _entries(store: Store, keys: Mapping[str, str]) -> dict[str, Any]:
    """The store's entries of kernels, by name, as far as there are any."""
    return {name: entry for name, key in keys.items() if (entry := store.get(_KERNEL, key)) is not None}


def _stored(
    store: Store, entries: Mapping[str, Any], keys: Mapping[str, str], libraries: Libraries
) -> dict[str, tvm_ffi.Function]:
    """The functions of entries, from any libraries that can be loaded."""
    at: dict[str, dict[str, str]] = {}
    for name, entry in entries.items():
        at.setdefault(entry.parts["library"].decode(), {})[name] = keys[name]
    found: dict[str, tvm_ffi.Function] = {}
    for group, names in at.items():
        found.update(_of_library(store, group, names, libraries) or {})
    return found


def _of_library(
    store: Store, group: str, keys: Mapping[str, str], libraries: Libraries
) -> dict[str, tvm_ffi.Function] | None:
    kept = store.get(_LIBRARY, group)
    if kept is None:
        return None
    symbols = from_parts(kept.parts)
    if not all(key in symbols for key in keys.values()):
        return None
    try:
        library = libraries.load(kept.parts["library"])
    except (OSError, RuntimeError) as error:
        _LOG.info("kernels on disk cannot be loaded: %s", error)
        return None
    return {name: library[symbols[key]] for name, key in keys.items()}
