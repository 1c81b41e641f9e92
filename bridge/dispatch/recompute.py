"""Recomputed numbers at a call: its inputs → nothing, where forward would read what was compiled for; else a failure.

The operations are torch's, outside of autocast, whose casts are among them, and of autograd. They are run in the order
in which forward reads, up to the first number that is another: what eager reads after it, eager may never come to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from bridge.base.devices import HOST
from bridge.base.errors import is_out_of_memory
from bridge.base.guard_failure import RUN, GuardFailure
from bridge.capture import LITERAL, SIZE_OPERATORS, Operation, Place, Recomputed, shown

__all__ = ["same_numbers_read"]

Compute = Callable[[list[Any]], Any]


def same_numbers_read(read: Sequence[Recomputed], device_type: str) -> Callable[[Sequence[torch.Tensor]], None]:
    """A function of a call's inputs that raises :class:`GuardFailure` where one of the numbers is another."""
    functions = [(each, _function(each)) for each in read]
    is_host = device_type == HOST.type

    def check(inputs: Sequence[torch.Tensor]) -> None:
        if not is_host and torch.cuda.is_current_stream_capturing():
            raise GuardFailure(RUN, read[0].field, "cannot be read while the stream is being captured")
        with torch.no_grad(), torch.autocast(device_type, enabled=False):
            for each, compute in functions:
                if (now := _computed(each, compute, inputs)) != each.numbers:
                    raise GuardFailure(RUN, each.field, f"{each.words}, called with {shown(now)}")

    return check


def _computed(each: Recomputed, compute: Compute, inputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The numbers of now. Where an operator raises, so does eager."""
    try:
        return tuple(compute([inputs[index] for index in each.inputs]).reshape(-1).tolist())
    except Exception as error:
        if is_out_of_memory(error):
            raise
        failure = GuardFailure(RUN, f"error in the {each.field}", f"{type(error).__name__}: {error}")
        raise failure from error


def _function(read: Recomputed) -> Compute:
    """The operations, one after the other: values of the inputs → the last result."""
    calls = [(_operator(each), each.args, each.kwargs) for each in read.operations]

    def compute(values: list[Any]) -> Any:
        for operator, args, kwargs in calls:
            values.append(operator(*_given(args, values), **{name: _given(each, values) for name, each in kwargs}))
        return values[-1]

    return compute


def _given(arg: Any, values: list[Any]) -> Any:
    if type(arg) is Place:
        return values[arg.index]
    return [_given(each, values) for each in arg] if type(arg) is tuple else arg


def _operator(operation: Operation) -> Callable[..., Any]:
    if operation.name == LITERAL:
        elements, shape, dtype, device = operation.args
        made = torch.tensor(elements, dtype=dtype, device=device).reshape(shape)
        return lambda *_: made
    if operation.name in SIZE_OPERATORS:
        return SIZE_OPERATORS[operation.name]
    namespace, name, overload = operation.name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)
