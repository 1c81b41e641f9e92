"""Library files: a module whose host code LLVM made ↔ the bytes of a shared library, with the modules that it imports.

The imported ones, a GPU's machine code, lie in the library as data, where TVM's loader looks for them, as in a library
that TVM exports.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import tvm
from tvm.runtime import Module

from bridge.compile.runtime.elf_link import shared_library
from bridge.compile.runtime.elf_object import CannotLinkError

__all__ = ["REFUSALS", "library_bytes", "loaded"]

try:
    import resource
except ImportError:  # not on Windows, where there are no such files either
    resource = None

REFUSALS = (CannotLinkError, OSError, RuntimeError)
"""What is raised where a module cannot be a file here, or a file not be loaded."""


def library_bytes(module: Module) -> bytes:
    """The machine code of a module of kind ``"llvm"``, linked, with its imports. Raises one of :data:`REFUSALS`."""
    code = _object_code(module)
    if not module.imports:
        return shared_library(code)
    packed = tvm.get_global_func("runtime.ModulePackImportsToTensor")(module)
    return shared_library(code, {tvm.get_global_func("runtime.ModuleImportsBlobName")(): packed.numpy().tobytes()})


def loaded(content: bytes) -> Module:
    """The module of :func:`library_bytes`; the same machine code. Raises one of :data:`REFUSALS`."""
    # a file of its own for each: the loader tells libraries apart by name and place; it is not needed once loaded
    with tempfile.TemporaryDirectory(prefix="bridge") as folder:
        path = Path(folder) / "kernels.so"
        path.write_bytes(content)
        return tvm.get_global_func("ffi.Module.load_from_file.so")(str(path), "so")


def _object_code(library: Module) -> bytes:
    """The object file that LLVM writes, in memory: where a disk is full, LLVM ends the process.

    Raises:
        OSError: there are no files in memory here, or no large ones are allowed.
    """
    if not hasattr(os, "memfd_create") or resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        raise OSError("no file in memory can be made here")
    with os.fdopen(os.memfd_create("kernels.o"), "rb") as file:
        library.write_to_file(f"/proc/self/fd/{file.fileno()}", "o")
        return file.read()
