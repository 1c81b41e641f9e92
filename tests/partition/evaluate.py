"""A numpy interpreter for functions in flat form: the reference of the partition's tests."""

from __future__ import annotations

import math

import numpy as np

from autodiff.ir import (
    Constant,
    Expr,
    Function,
    IntImm,
    Tuple,
    TupleGetItem,
    TupleType,
    Var,
    bindings,
    library_name,
    numpy_value,
    op_name,
    results,
    shape,
)

_erf = np.vectorize(math.erf, otypes=[float])


def _axes(call):
    axis = call.attrs.axis
    return None if axis is None else tuple(int(a) for a in axis)


def _softmax(call, x):
    e = np.exp(x - x.max(axis=call.attrs.axis, keepdims=True))
    return e / e.sum(axis=call.attrs.axis, keepdims=True)


def _slices(a, axes, begins, ends, steps):
    found = [slice(None)] * a.ndim
    for axis, *numbers in zip(axes, begins, ends, steps, strict=True):
        found[axis] = slice(*numbers)
    return tuple(found)


OPS = {
    "relax.add": lambda call, a, b: a + b,
    "relax.subtract": lambda call, a, b: a - b,
    "relax.multiply": lambda call, a, b: a * b,
    "relax.divide": lambda call, a, b: a / b,
    "relax.negative": lambda call, a: -a,
    "relax.exp": lambda call, a: np.exp(a),
    "relax.tanh": lambda call, a: np.tanh(a),
    "relax.erf": lambda call, a: _erf(a).astype(a.dtype),
    "relax.rsqrt": lambda call, a: 1 / np.sqrt(a),
    "relax.nn.gelu": lambda call, a: a * 0.5 * (1 + _erf(a * math.sqrt(0.5))),
    "relax.greater": lambda call, a, b: a > b,
    "relax.where": lambda call, c, a, b: np.where(c, a, b),
    "relax.nn.relu": lambda call, a: np.maximum(a, 0),
    "relax.nn.softmax": _softmax,
    "relax.matmul": lambda call, a, b: np.matmul(a, b),
    "relax.sum": lambda call, a: a.sum(axis=_axes(call), keepdims=bool(call.attrs.keepdims)),
    "relax.mean": lambda call, a: a.mean(axis=_axes(call), keepdims=bool(call.attrs.keepdims)),
    "relax.astype": lambda call, a: a.astype(str(call.attrs.dtype)),
    "relax.permute_dims": lambda call, a: np.transpose(
        a, None if call.attrs.axes is None else [int(x) for x in call.attrs.axes]
    ),
    "relax.reshape": lambda call, a, *rest: a.reshape(shape(call)),
    "relax.broadcast_to": lambda call, a, *rest: np.broadcast_to(a, shape(call)),
    "relax.expand_dims": lambda call, a: a.reshape(shape(call)),
    "relax.squeeze": lambda call, a: a.reshape(shape(call)),
    "relax.zeros": lambda call, *rest: np.zeros(shape(call), str(call.ty.dtype)),
    "relax.ones": lambda call, *rest: np.ones(shape(call), str(call.ty.dtype)),
    "relax.concat": lambda call, parts: np.concatenate(parts, axis=int(call.attrs.axis)),
    "relax.strided_slice": lambda call, a, *places: a[_slices(a, *places)],
    "relax.split": lambda call, a: tuple(
        np.split(a, [int(i) for i in call.attrs.indices_or_sections], axis=int(call.attrs.axis))
        if hasattr(call.attrs.indices_or_sections, "__len__")
        else np.split(a, int(call.attrs.indices_or_sections), axis=int(call.attrs.axis))
    ),
    "library.twice_and_sign": lambda call, a: (2 * a, a > 0),
    "library.join": lambda call, pair, g: np.where(pair[1], pair[0] * g, g),
}


def evaluate(func: Function, args: list[np.ndarray]) -> list[np.ndarray]:
    """The results of a flat-form function on numpy arrays; checks every parameter's shape and dtype."""
    assert len(args) == len(func.params), f"{len(args)} arguments for {len(func.params)} parameters"
    values: dict[Var, np.ndarray] = {}
    for param, arg in zip(func.params, args, strict=True):
        assert shape(param) == arg.shape and str(param.ty.dtype) == str(arg.dtype), f"{param.name}: {arg.shape}"
        values[param] = arg

    def read(expr: Expr):
        if isinstance(expr, Var):
            return values[expr]
        if isinstance(expr, Constant):
            return numpy_value(expr)
        if isinstance(expr, IntImm):
            return int(expr.value)
        if isinstance(expr, Tuple):
            return tuple(read(field) for field in expr.fields)
        if isinstance(expr, TupleGetItem):
            return read(expr.tuple_value)[expr.index]
        name = library_name(expr) or op_name(expr)
        operands = expr.args[1:] if library_name(expr) else expr.args
        return OPS[name](
            expr, *(read(arg) for arg in operands if isinstance(arg, Var | Constant | Tuple | TupleGetItem))
        )

    for var, value in bindings(func):
        values[var] = read(value)
        if not isinstance(var.ty, TupleType):
            assert values[var].shape == shape(var), f"{var.name} has shape {values[var].shape}, declared {shape(var)}"
    return [read(result) for result in results(func)]


def random_args(params: list[Var], seed: int = 0) -> list[np.ndarray]:
    """Numbers for parameters: standard normal, or coin tosses for bools."""
    rng = np.random.default_rng(seed)
    return [
        rng.random(shape(p)) < 0.7
        if str(p.ty.dtype) == "bool"
        else rng.standard_normal(shape(p)).astype(str(p.ty.dtype))
        for p in params
    ]


def run_both_halves(parts, num_primals: int, num_outputs: int, args: list[np.ndarray]):
    """Forward then backward of a partition: the outputs and the gradients."""
    primals, grad_outs = args[:num_primals], args[num_primals:]
    found = evaluate(parts.forward, primals)
    return found[:num_outputs], run_backward(parts.plan, parts.backward, primals, found, num_outputs, grad_outs)


def run_backward(plan, backward, primals, found, num_outputs, grad_outs):
    """The gradients, from the saved tensors of the plan."""
    saved = [primals[i] for i in plan.saved_primals] + [found[i] for i in plan.saved_outputs] + found[num_outputs:]
    return evaluate(backward, saved + list(grad_outs))
