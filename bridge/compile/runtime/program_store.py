"""Programs on disk: a key → a program, its kernels by their keys in the disk cache.

Kept are programs of one size whose kernels are all kept. What a program assumes beyond its key, the ways of matrix
products that another process chose, is kept beside it, and has to fit this process.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from bridge.artifact import current_store
from bridge.base.log import channel
from bridge.compile.backend import Backend
from bridge.compile.runtime.late import LateMapping
from bridge.compile.runtime.program import Program
from bridge.compile.runtime.storage import bytes_of, form_of, parts_of, plain_text, tensor_of

__all__ = ["keep_program", "kept_program"]

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
