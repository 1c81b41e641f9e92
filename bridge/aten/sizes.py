"""Size nodes: Python's arithmetic on sizes in a traced graph → extents, and 0-d tensors for what is no integer.

Capturing has given each integer that sizes decide its extent. A quotient, a root or a power of sizes is computed as
Python computes it, in float64.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from tvm import relax

from autodiff.extents import Extent
from autodiff.ir import Expr
from bridge.aten.registry import UnsupportedUse, converts
from bridge.base.torch_internals import aten
from bridge.base.torch_shapes import SYMBOLIC

__all__ = ["is_size", "size"]

op = relax.op

_FLOATS: dict[Any, Callable[..., Any]] = {
    operator.truediv: op.divide,
    operator.mul: op.multiply,
    operator.add: op.add,
    operator.sub: op.subtract,
    operator.pow: op.power,
    operator.neg: op.negative,
    torch.sym_float: lambda x: x,
    torch.sym_sqrt: op.sqrt,
    math.sqrt: op.sqrt,
}


def is_size(node: fx.Node) -> bool:
    """Whether a node is a number that the sizes of the arguments decide."""
    return isinstance(node.meta.get("val"), (bool, int, Extent, *SYMBOLIC))


def size(importer: Any, node: fx.Node, args: tuple) -> bool | int | Extent | Expr:
    """The number: an extent where it is an integer, a 0-d float64 tensor where it is none."""
    value = node.meta["val"]
    if not isinstance(value, SYMBOLIC):
        return value
    make = _FLOATS.get(node.target)
    if make is None or not isinstance(value, torch.SymFloat):
        raise UnsupportedUse("a number that is made of sizes which vary")
    return importer.emit(make(*(importer.cast(arg, "float64") for arg in args)))


@converts(aten._assert_scalar.default)
def assert_scalar(importer, node, condition, message):
    """On sizes it is a guard of their scope."""
    if condition is not True:
        raise UnsupportedUse("an assertion on a number that a tensor gives")
