"""Programs as artifacts: a program ↔ values, tensors and kernels, in one file of its own or in the disk cache.

A file has kernels as TVM's JSON of their functions; loading builds them again. The disk cache has static programs whose
kernels are all in the cache, and refers to kernels by key. A program's assumptions beyond its key (product algorithms
that another process chose) are stored with it, and must fit this process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autodiff.extents import Extent, ExtentScope, scope_of_state, state_of_scope
from bridge.artifact import (
    DamagedError,
    current_store,
    from_parts,
    from_text,
    read_artifact,
    to_parts,
    to_text,
    versions,
    write_artifact,
    write_file,
)
from bridge.base.log import channel
from bridge.compile.backend import Backend
from bridge.compile.runtime.build import LateMapping
from bridge.compile.runtime.kernel_store import canonical_text, functions_of
from bridge.compile.runtime.program import Program

__all__ = ["keep_program", "kept_program", "load", "save", "texts"]

_FILE, _KIND = "program file", "program"
"""Kinds of artifacts."""

_PARTS = ("name", "steps", "layout", "results", "variables", "positions")


def texts(program: Program) -> dict[str, Any]:
    """The program without its constants' elements, as text: equal programs have equal texts, in any process.

    Raises:
        ValueError: a kernel has a literal that TVM's JSON cannot hold, a float64 below 2.3e-308.
    """
    return {
        "backend": program.backend.key,
        "versions": to_text(versions()),
        "program": _text(program),
        "scope": None if program.scope is None else state_of_scope(program.scope),
        "kernel names": tuple(program.kernels),
        "kernels": canonical_text(list(program.kernels.values())),
    }


def _text(program: Program) -> str:
    """Instructions, layout and names; :func:`_arguments` parses it."""
    return to_text({name: getattr(program, name) for name in _PARTS})


def _arguments(text: str, scope: ExtentScope | None = None) -> dict[str, Any]:
    """Arguments of a :class:`Program` from their text; extents belong to ``scope``."""
    return from_text(text, {} if scope is None else {"Extent": lambda terms: Extent(scope, terms)})


def save(program: Program, path: str | os.PathLike) -> None:
    """Writes a program to a file, atomically.

    Raises:
        ValueError: see :func:`texts`.
        OSError: the file cannot be written.
    """
    told = texts(program) | {"constants": program.constants}
    write_file(path, write_artifact(_FILE, "", to_parts(told), program.name))


def load(path: str | os.PathLike, backend: Backend) -> Program:
    """The program of a file that :func:`save` wrote: equal to the saved one, with the same bits when it runs.

    Args:
        path: the file. Its kernels are code: trust it as you would trust a library.
        backend: the backend that the program was compiled for.

    Raises:
        ValueError: no program, damaged, for another backend, or of another version of torch, TVM or this package.
        OSError: the file cannot be read.
    """
    try:
        _, parts = read_artifact(Path(path).read_bytes(), _FILE)
        told = from_parts(parts)
    except (DamagedError, ValueError, KeyError) as error:
        raise ValueError(f"{os.fspath(path)} is no saved program: {error}") from error
    for name, here in (("versions", to_text(versions())), ("backend", backend.key)):
        if told[name] != here:
            raise ValueError(f"{os.fspath(path)} was saved for {name} {told[name]!r}, here it is {here!r}")
    scope = None if told["scope"] is None else scope_of_state(told["scope"])
    kernels = dict(zip(told["kernel names"], functions_of(told["kernels"]), strict=True))
    code = dict(zip(kernels, backend.build(list(kernels.items())), strict=True))
    arguments = _arguments(told["program"], scope)
    return Program(**arguments, constants=told["constants"], kernels=kernels, backend=backend, code=code, scope=scope)


_LOG = channel("cache")


def keep_program(key: str, digest: str, program: Program) -> None:
    """Writes a built program to the disk cache, if its kernels are there and its backend keeps any.

    ``digest``: of its function; :mod:`bridge.cache` finds the programs of a lowering by it.
    """
    if program.backend.kept({}) is None:
        return
    kernels = {name: built.kept() for name, built in program.code.items()}
    if program.scope is not None or None in kernels.values():
        return
    told = {"digest": digest, "kernels": kernels, "ways": program.ways, "program": _text(program)}
    current_store().put(_KIND, key, to_parts(told | {"constants": program.constants}), program.name)


def kept_program(key: str, backend: Backend, adopt: Callable[[Any], bool]) -> Program | None:
    """The program of a key for a backend; ``adopt``: whether this process can make the same choices (see
    :meth:`~bridge.compile.schedule.products.ProductPolicy.adopt`)."""
    found = current_store().get(_KIND, key)
    if found is None:
        return None
    told = from_parts(found.parts)
    kernels = backend.kept(told["kernels"])
    if kernels is None:
        return None
    if not adopt(told["ways"]):
        _LOG.info("%s is compiled again: products are computed in other ways here", found.note)
        return None
    _LOG.info("program %s from the disk cache", found.note)
    return Program(
        **_arguments(told["program"]),
        constants=told["constants"],
        kernels=LateMapping({name: read for name, (_, read) in kernels.items()}),
        backend=backend,
        code={name: built for name, (built, _) in kernels.items()},
        ways=told["ways"],
    )
