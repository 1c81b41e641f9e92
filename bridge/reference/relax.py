"""Relax interpreter: a function and tensors → results and values, operator by operator on torch.

:mod:`bridge.reference.relax_operators` defines the operators. Library functions are torch's kernels, as in compiled
programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tvm.tirx import FloatImm, IntImm

from autodiff.dropout import keep_scale
from autodiff.ir import (
    Call,
    Constant,
    Expr,
    Function,
    ShapeExpr,
    StringImm,
    TensorType,
    Tuple,
    TupleGetItem,
    TupleType,
    Var,
    bindings,
    dtype,
    library_name,
    op_name,
    results,
    shape,
)
from autodiff.scan import is_scan, scan_of
from bridge.base.devices import HOST, current_device, devices_of, working_for
from bridge.library import FUNCTIONS
from bridge.reference.relax_operators import LIBRARY, OPERATORS

_DROPOUT = "relax.nn.dropout"


@dataclass(frozen=True)
class InterpretedRun:
    """The results of a function, and each variable's value by name (a tuple's as a tuple)."""

    results: list[torch.Tensor]
    values: Mapping[str, Any]


def interpret(function: Function, inputs: Sequence[torch.Tensor]) -> InterpretedRun:
    """Runs a function in flat form on one tensor per parameter.

    A function with dropouts takes their masks behind the parameters, in the order of its bindings. Autograd records the
    run if it is enabled and inputs require grad. Results are on the inputs' device.

    Raises:
        ValueError: a wrong number, shape or dtype of inputs.
        NotImplementedError: an operator without a definition.
    """
    params = list(function.params)
    dropouts = sum(op_name(value) == _DROPOUT and 0 < float(value.attrs.rate) < 1 for _, value in bindings(function))
    if len(inputs) not in (len(params), len(params) + dropouts):
        wanted = f"{len(params)} inputs" + (f" and {dropouts} dropout masks" if dropouts else "")
        raise ValueError(f"wanted {wanted}, got {len(inputs)} tensors")
    env: dict[Var, Any] = {}
    for param, tensor in zip(params, inputs, strict=False):
        _check_input(param, tensor)
        env[param] = tensor
    masks = iter(inputs[len(params) :])
    devices = [device for device in devices_of(inputs) if device != HOST]  # a generator's state is on the host
    with working_for(devices[0] if devices else HOST):
        for var, value in bindings(function):
            env[var] = _typed(var, _compute(value, env, masks))
        outputs = [_read(result, env) for result in results(function)]
    return InterpretedRun(outputs, {var.name: value for var, value in env.items()})


def _check_input(param: Var, tensor: torch.Tensor) -> None:
    have = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    if have != (shape(param), dtype(param)):
        raise ValueError(
            f"parameter {param.name}: wanted {dtype(param)} of shape {shape(param)}, got {have[1]} {have[0]}"
        )


def _typed(var: Var, value: Any) -> Any:
    """The value in its declared dtype: torch sums integers in int64, Relax in their own type."""
    types = list(var.ty.fields) if isinstance(var.ty, TupleType) else [var.ty]
    fields = list(value) if isinstance(value, tuple | list) else [value]
    made = []
    for ty, field in zip(types, fields, strict=True):
        if isinstance(ty, TensorType):
            extents = tuple(int(extent) for extent in ty.shape)
            if tuple(field.shape) != extents:
                raise AssertionError(f"{var.name} is declared {ty}, its value has shape {tuple(field.shape)}")
            field = field.to(getattr(torch, str(ty.dtype)))
        made.append(field)
    return tuple(made) if isinstance(var.ty, TupleType) else made[0]


def _read(expr: Expr, env: Mapping[Var, Any]) -> Any:
    if isinstance(expr, Var):
        return env[expr]
    if isinstance(expr, Constant):
        return torch.from_dlpack(expr.value).clone().to(current_device())
    if isinstance(expr, Tuple):
        return tuple(_read(field, env) for field in expr.fields)
    if isinstance(expr, TupleGetItem):
        return _read(expr.tuple_value, env)[expr.index]
    if isinstance(expr, ShapeExpr):
        return [int(extent) for extent in expr.values]
    if isinstance(expr, IntImm | FloatImm | StringImm):
        return expr.value
    if isinstance(expr, Call):
        return _compute(expr, env, iter(()))
    raise NotImplementedError(f"cannot interpret the expression {expr}")


def _compute(value: Expr, env: Mapping[Var, Any], masks: Iterator[torch.Tensor]) -> Any:
    name = op_name(value)
    if name is None:
        return _read(value, env)
    library = library_name(value)
    if is_scan(value):
        return _scan(value, env)
    if library is not None:
        kernel = FUNCTIONS.get(library.removeprefix("library.")) or LIBRARY.get(library)
        if kernel is None:
            raise NotImplementedError(f"no kernel is bound to {library}")
        return kernel(*[_listed(_read(arg, env)) for arg in value.args[1:]])
    arguments = [_read(arg, env) for arg in value.args]
    if name == _DROPOUT:
        return _dropout(value, arguments[0], masks)
    meaning = OPERATORS.get(name)
    if meaning is None:
        raise NotImplementedError(f"{name} has no reference semantics")
    declared = shape(value) if isinstance(value.ty, TensorType) else None
    return meaning(value, declared, *arguments)


def _listed(argument: Any) -> Any:
    return list(argument) if isinstance(argument, tuple) else argument


def _dropout(call: Call, x: torch.Tensor, masks: Iterator[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    rate = float(call.attrs.rate)
    if rate in (0.0, 1.0):
        return (x if rate == 0.0 else torch.zeros_like(x)), torch.full(x.shape, rate == 0.0, device=x.device)
    mask = next(masks, None)
    if mask is None:
        raise ValueError("a dropout without a mask: give the masks behind the function's parameters")
    noise = mask.to(x.dtype) * keep_scale(rate, str(x.dtype).removeprefix("torch."))
    return x * noise.to(x.dtype), mask


def _scan(call: Call, env: Mapping[Var, Any]) -> tuple[torch.Tensor, ...]:
    """Runs the body of a scan, step by step."""
    scan, tensors = scan_of(call)
    given = [_read(tensor, env) for tensor in tensors]
    carries, xs = given[: scan.carries], given[scan.carries : scan.carries + scan.xs]
    constants = given[scan.carries + scan.xs :]
    order = range(len(xs[0]) if xs else scan.length)
    ys: dict[int, list[torch.Tensor]] = {}
    for step in reversed(order) if scan.reverse else order:
        made = interpret(scan.function, [*carries, *(x[step] for x in xs), *constants]).results
        carries, ys[step] = made[: scan.carries], made[scan.carries :]
    return (*carries, *(torch.stack(parts) for parts in zip(*(ys[step] for step in order), strict=True)))
