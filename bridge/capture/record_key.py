"""Record key: the record of a call → a digest by which calls are compared; equal keys are the same function.

It has the operators in order, their constants, which values they read and made, the forms of these, grad modes and
autocast, draws, numbers written in the code; no user's line and no module path: equal layers have equal keys.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields
from typing import Any

import torch

from bridge.base.devices import HOST
from bridge.base.torch_shapes import SYMBOLIC, fixed
from bridge.capture.observation import Observation, Output
from bridge.capture.rows import Record, Value
from bridge.state import constant_key

__all__ = ["observed_key", "record_key"]


class _NoKeyError(Exception):
    """An operand cannot be compared with another call's."""


def observed_key(record: Record, results: Any, observation: Observation, reads: tuple) -> tuple | None:
    """What a call did: its record and what it returned; ``None`` where that cannot be compared with another call.

    Args:
        results: the leaves of its result, values for tensors.
        reads: keys of the numbers that Python was given.
    """
    if observation.unsupported or observation.objects:
        return None
    outputs = tuple(map(_output_key, observation.outputs))
    digest = record_key(record, results)
    if digest is None or None in outputs:
        return None
    again = tuple(sorted(observation.checkpointed))  # what is refused of them is asked at the capture alone
    return digest, outputs, observation.out_spec, (reads, observation.reads_validation), again


def record_key(record: Record, results: Any) -> str | None:
    """The digest of a record; ``None`` if an operand is no plain constant."""
    made = hashlib.sha256()
    try:
        for row in record.rows:
            told = str(row.op), _plain((row.args, row.kwargs)), _plain(row.results), row.grad, row.autocast, row.draws
            made.update(repr(told).encode())
        made.update(repr(record.forms).encode())
        made.update(repr(_plain(results)).encode())
        for number, literal in record.literals.items():
            made.update(repr((number, literal.dtype, tuple(literal.shape), literal.device)).encode())
            made.update(_bytes(literal))
    except _NoKeyError:
        return None
    return None if record.free else made.hexdigest()


def _plain(tree: Any) -> Any:
    if type(tree) is Value:
        return tree
    if isinstance(tree, list | tuple):
        return tuple(map(_plain, tree))
    if isinstance(tree, dict):
        return tuple((name, _plain(each)) for name, each in tree.items())
    if isinstance(tree, SYMBOLIC):
        return "size", str(fixed(tree))
    key = constant_key(tree)
    if key is None:
        raise _NoKeyError
    return key


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).to(HOST).numpy().tobytes()


def _output_key(output: Output) -> tuple | None:
    value = constant_key(output.value)
    rest = tuple(_fixed(getattr(output, each.name)) for each in fields(output) if each.name != "value")
    return None if value is None else (value, rest)


def _fixed(value: Any) -> Any:
    """Sizes as expressions, which hash and compare without asking anything."""
    return tuple(map(fixed, value)) if type(value) is tuple else fixed(value)
