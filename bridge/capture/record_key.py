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
from bridge.base.torch_shapes import SYMBOLIC, conclusions, fixed
from bridge.capture.observation import Draw, Observation, Output
from bridge.capture.rows import Record, Value
from bridge.capture.symbolic_sizes import each_mapped
from bridge.state import constant_key

__all__ = ["key_of_sizes", "observed_key", "record_key"]


class _NoKeyError(Exception):
    """An operand cannot be compared with another call's."""


def observed_key(
    record: Record, results: Any, final: dict[int, Value], observation: Observation, reads: tuple
) -> tuple | None:
    """What a call did: its record and what it returned; ``None`` where that cannot be compared with another call.

    Args:
        results: the leaves of its result, values for tensors.
        final: of the inputs that are buffers which it sets to another tensor, the value of that one.
        reads: keys of the numbers that Python was given.
    """
    if observation.unsupported or observation.objects:
        return None
    outputs = tuple(map(_output_key, observation.outputs))
    digest = record_key(record, (*results, *sorted(final.items())))
    if digest is None or None in outputs:
        return None
    drawn = hashlib.sha256(repr(observation.draws).encode()).hexdigest()  # rows do not name the kernels that drew
    again = tuple(sorted(observation.checkpointed))  # what is refused of them is asked at the capture alone
    return digest, outputs, observation.out_spec, (reads, observation.reads_validation), again, drawn


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


def key_of_sizes(record: Record, results: Any, out_spec: Any, draws: list[Draw], env: Any) -> str | None:
    """The digest of a run on symbolic sizes: its rows, forms, results and draws with expressions, and its conditions.

    Symbols are called by the arguments' places, so equal calls have equal expressions. Two calls of one digest run the
    same operators for all sizes for which the conditions hold, and both have these conditions as guards. To be asked
    before anything else asks the environment. ``None`` if an operand is no plain constant.

    Args:
        results: the leaves of its result, values for tensors.
        env: torch's environment of the sizes.
    """
    told: list[Any] = [_draw_key(each) for each in draws]
    try:
        told += [(str(row.op), _plain((row.args, row.kwargs, row.results))) for row in record.rows]
        told += [_plain(results), str(out_spec), sorted(record.same.items())]
    except _NoKeyError:
        return None
    for number, fake in sorted(record.fakes.items()):
        layout = (*fake.shape, *fake.stride(), fake.storage_offset()) if fake.layout is torch.strided else fake.shape
        told.append((number, fake.dim(), [str(fixed(each)) for each in layout]))
    told += [str(condition) for condition, _ in conclusions(env)]
    return hashlib.sha256(repr(told).encode()).hexdigest()


def _draw_key(draw: Draw) -> str:
    """A draw with expressions for sizes; fields that its comparison leaves out are in it."""
    return repr(each_mapped(draw, fixed))


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
