"""Random joint functions: a forward of point-wise work, products, reductions and views, then its reverse mode."""

from __future__ import annotations

import random

from autodiff.ir import Function, Var, shape
from tests.partition.backprop import const, differentiate
from tests.partition.joints import Builder, op

ROWS, WIDTH = 4, 6


KINDS = ("tanh", "relu", "add", "multiply", "matmul", "mean", "softmax", "mask", "there", "gelu")


def random_joint(seed: int, nodes: int, outputs: int = 2, given=None, kinds=KINDS) -> tuple[Function, int, int]:
    """A joint function of about ``nodes`` forward bindings; the same for the same arguments."""
    b, chosen, wanted = random_forward(seed, nodes, outputs, kinds)
    return differentiate(b, chosen, wanted, given)


def random_forward(
    seed: int, nodes: int, outputs: int = 2, kinds=KINDS, extents=(ROWS, WIDTH), dtype: str = "float64"
) -> tuple[Builder, list[Var], list[Var]]:
    """The bindings of a forward, its outputs, and the parameters to differentiate, which come first."""
    rng = random.Random(seed)
    b = Builder()
    values = [b.param(f"x{i}", extents, dtype) for i in range(2)]
    square = b.param("w", (extents[1], extents[1]), dtype)
    mask = b.param("mask_0", extents, "bool")
    wanted = [*values, square]
    for index in range(nodes):
        values.append(_step(rng, kinds, b, f"v{index}", values, square, mask))
    return b, [values[-1], *rng.sample(values[2:-1], min(outputs - 1, len(values) - 3))], wanted


def _step(rng: random.Random, kinds, b: Builder, name: str, values: list[Var], square: Var, mask: Var) -> Var:
    extents = shape(values[0])
    wide = [value for value in values if shape(value) == extents]
    x, y = rng.choice(wide[-4:]), rng.choice(values[-5:])
    if shape(y) not in (extents, (extents[0], 1)):
        y = x
    kind = rng.choice(kinds)
    if kind == "tanh":
        return b.let(name, op.tanh(x))
    if kind == "relu":
        return b.let(name, op.nn.relu(x))
    if kind == "gelu":
        return b.let(name, op.nn.gelu(x))
    if kind == "add":
        return b.let(name, op.add(x, y))
    if kind == "multiply":
        return b.let(name, op.multiply(x, y))
    if kind == "matmul":
        return b.let(name, op.matmul(x, square))
    if kind == "mean":
        return b.let(name, op.mean(x, axis=[1], keepdims=True))
    if kind == "softmax":
        return b.let(name, op.nn.softmax(x, axis=-1))
    if kind == "mask":
        return b.let(name, op.multiply(x, b.let(name + "_kept", op.astype(mask, str(x.ty.dtype)))))
    if rng.random() < 0.5:
        return b.let(name, op.multiply(x, const(0.5, x)))
    return b.let(name, op.reshape(b.let(name + "_t", op.permute_dims(x)), extents))
