"""Layout choice: the readers of a result → the order of dimensions in which it is best stored."""

from __future__ import annotations

from collections.abc import Iterable

from autodiff.ir import Expr, op_name

__all__ = ["order_of_readers"]


def order_of_readers(readers: Iterable[Expr], rank: int) -> list[int] | None:
    """The order of dimensions that all readers of a tensor permute it to; ``None``: its own.

    Stored in that order, the tensor is read as it lies, and no reader copies it. Which order it is changes no value.
    """
    orders = set()
    for reader in readers:
        if op_name(reader) != "relax.permute_dims" or reader.attrs.axes is None:
            return None
        orders.add(tuple(int(axis) % rank for axis in reader.attrs.axes))
    if len(orders) != 1:
        return None
    (order,) = orders
    return None if list(order) == sorted(order) else list(order)
