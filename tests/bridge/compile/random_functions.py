"""Random functions of point-wise operators, views, reductions and products, to play on Relax and on torch.

A function is drawn once as a list of instructions (:func:`draw`) and played on Relax variables or on torch tensors.
"""

from __future__ import annotations

import random

import torch
from tvm import relax
from tvm.relax import op as R

from tests.bridge.compile_helpers import function

UNARY = ["exp_neg", "tanh", "sigmoid", "erf", "negative", "square", "relu", "half"]
BINARY = ["add", "subtract", "multiply", "maximum", "where"]


class OnRelax:
    def __init__(self, emit):
        self.emit = emit

    def const(self, value, like):
        return relax.const(value, str(like.ty.dtype))

    def unary(self, name, x):
        match name:
            case "exp_neg":
                return self.emit(R.exp(self.emit(R.negative(self.emit(R.abs(x))))))
            case "relu":
                return self.emit(R.nn.relu(x))
            case "half":
                return self.emit(R.multiply(x, self.const(0.5, x)))
        return self.emit(getattr(R, name)(x))

    def binary(self, name, x, y):
        if name == "where":
            return self.emit(R.where(self.emit(R.less(x, y)), x, y))
        return self.emit(getattr(R, name)(x, y))

    def reduce(self, name, x, axes):
        return self.emit(getattr(R, name)(x, axes, keepdims=True))

    def softmax(self, x):
        return self.emit(R.nn.softmax(x, -1))

    def permute(self, x, order):
        return self.emit(R.permute_dims(x, order))

    def flatten(self, x):
        extents = [int(extent) for extent in x.ty.shape]
        return self.emit(R.reshape(x, (extents[0] * extents[1], extents[2])))

    def unflatten(self, x, extents):
        return self.emit(R.reshape(x, tuple(extents)))

    def slice(self, x, axis, end):
        return self.emit(R.strided_slice(x, [axis], [0], [end]))

    def product(self, x, y):
        return self.emit(R.matmul(x, self.emit(R.permute_dims(y, [0, 2, 1]))))


class OnTorch:
    def unary(self, name, x):
        table = {"exp_neg": lambda x: torch.exp(-x.abs()), "half": lambda x: x * 0.5, "negative": torch.neg}
        return table.get(name, getattr(torch, name, None))(x)

    def binary(self, name, x, y):
        if name == "where":
            return torch.where(x < y, x, y)
        return getattr(torch, name)(x, y)

    def reduce(self, name, x, axes):
        return getattr(torch, {"max": "amax", "sum": "sum", "mean": "mean"}[name])(x, axes, keepdim=True)

    def softmax(self, x):
        return torch.softmax(x, -1)

    def permute(self, x, order):
        return x.permute(order)

    def flatten(self, x):
        return x.reshape(-1, x.shape[-1])

    def unflatten(self, x, extents):
        return x.reshape(extents)

    def slice(self, x, axis, end):
        return x.narrow(axis, 0, end)

    def product(self, x, y):
        return x @ y.transpose(1, 2)


def broadcastable(a, b):
    return all(x == y or 1 in (x, y) for x, y in zip(a, b, strict=True))


def draw(seed: int, length: int) -> tuple[list[tuple[int, ...]], list[tuple]]:
    """Input shapes and instructions ``(method, arguments)``; values are named by their position."""
    rng = random.Random(seed)
    a, b, c = rng.choice([(3, 4, 5), (8, 12, 16), (2, 33, 64), (4, 50, 40), (6, 1, 70), (16, 40, 96)])
    shapes: list[tuple[int, ...]] = [(a, b, c), (a, b, c), (c,), (1, b, 1), (a, 1, c)]
    inputs = list(shapes)
    shapes[2] = (1, 1, c)
    program: list[tuple] = [("unflatten", 2, (1, 1, c))]
    shapes = [(a, b, c), (a, b, c), None, (1, b, 1), (a, 1, c), (1, 1, c)]
    while len(shapes) < length:
        alive = [i for i, shape in enumerate(shapes) if shape is not None]
        recent = alive[-6:] if rng.random() < 0.7 else alive
        x = rng.choice(recent)
        shape = shapes[x]
        kind = rng.random()
        if kind < 0.3:
            program.append(("unary", x, rng.choice(UNARY)))
            shapes.append(shape)
        elif kind < 0.65:
            partners = [i for i in alive if broadcastable(shapes[i], shape)]
            y = rng.choice(partners)
            program.append(("binary", x, y, rng.choice(BINARY)))
            shapes.append(tuple(max(p, q) for p, q in zip(shape, shapes[y], strict=True)))
        elif kind < 0.8:
            axes = rng.choice([[2], [2], [0], [1], [0, 1], [1, 2], [0, 2], [0, 1, 2]])
            program.append(("reduce", x, rng.choice(["sum", "max", "mean"]), axes))
            shapes.append(tuple(1 if axis in axes else extent for axis, extent in enumerate(shape)))
        elif kind < 0.86:
            program.append(("softmax", x))
            shapes.append(shape)
        elif kind < 0.92:
            order = rng.sample(range(3), 3)
            program.append(("permute", x, order))
            shapes.append(tuple(shape[axis] for axis in order))
        elif kind < 0.96:
            axis = rng.randrange(3)
            end = rng.randint(1, shape[axis])
            program.append(("slice", x, axis, end))
            shapes.append(tuple(end if i == axis else extent for i, extent in enumerate(shape)))
        else:
            program.append(("product", x, x))
            shapes.append((shape[0], shape[1], shape[1]))
    return inputs, program


def play(on, values: list, program: list[tuple]) -> list:
    values = list(values)
    for method, x, *arguments in program:
        match method:
            case "unary" | "reduce":
                result = getattr(on, method)(*([arguments[0], values[x], *arguments[1:]]))
            case "binary":
                result = on.binary(arguments[1], values[x], values[arguments[0]])
            case "product":
                result = on.product(values[x], values[arguments[0]])
            case _:
                result = getattr(on, method)(values[x], *arguments)
        values.append(result)
    return values


def build(inputs, program, dtype, wanted):
    return function(
        [(shape, dtype) for shape in inputs],
        lambda emit, *params: [play(OnRelax(emit), list(params), program)[i] for i in wanted],
    )


def sample(inputs, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in inputs]
