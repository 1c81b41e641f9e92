"""Observation key: what a call did on fake tensors → something to compare calls by; equal keys are the same function.

Operators in order, with their constants and the tensors that they read, what the call returns, and the numbers that
Python code read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from bridge.base.torch_shapes import fixed
from bridge.capture.observation import Observation, Output
from bridge.capture.readings import Reading
from bridge.state import constant_key

__all__ = ["observation_key"]


def observation_key(observation: Observation, readings: Sequence[Reading]) -> tuple | None:
    """What a call did; ``None`` where that cannot be compared with another one."""
    outputs = [_output_key(output) for output in observation.outputs]
    if observation.trace is None or observation.unsupported or observation.objects or None in outputs:
        return None
    reads = tuple(reading.key for reading in readings), observation.reads_validation
    again = tuple(sorted(observation.checkpointed))  # what is refused of them is asked at the capture alone
    return observation.trace, tuple(outputs), observation.out_spec, reads, again


def _output_key(output: Output) -> tuple | None:
    value = constant_key(output.value)
    rest = tuple(_fixed(getattr(output, field.name)) for field in fields(output) if field.name != "value")
    return None if value is None else (value, rest)


def _fixed(value: Any) -> Any:
    """Sizes as expressions, which hash and compare without asking anything."""
    return tuple(map(fixed, value)) if type(value) is tuple else fixed(value)
