"""Row regions: a product whose rows are reduced to one number -> the same computation for any subset of the rows.

A region begins at a product and ends at a number. Its operators keep rows apart. Its values are of three kinds: with
the product's columns in each row, with one number per row, and numbers, which are sums over rows or linear in sums.
Nothing outside reads the region except its end, so the region may be computed for some rows at a time: the end is the
sum of the partial ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from tvm.relax import op

from autodiff.body import Binding, Body, Scope, const
from autodiff.ir import (
    Call,
    Constant,
    Expr,
    TensorType,
    Var,
    axes_of,
    dtype,
    is_float,
    is_transpose,
    itemsize,
    operands,
    shape,
)
from autodiff.ops import POINTWISE, RESHAPES, STOP

_SLICE = "relax.strided_slice"
_ALONG = {"relax.sum": op.sum, "relax.max": op.max, "relax.min": op.min, "relax.mean": op.mean}
_ROWWISE = {"relax.nn.log_softmax": op.nn.log_softmax, "relax.nn.softmax": op.nn.softmax}


class Outside(NamedTuple):
    """A tensor that the region reads, and its extents in a block: ``None`` for rows; ``[1, columns]`` or ``[]``."""

    value: Var
    extents: tuple[int | None, ...]

    @property
    def is_part(self) -> bool:
        """Whether each block reads its own rows of the tensor."""
        return bool(self.extents) and self.extents[0] is None


_FULL, _ROW, _NUMBER = "full", "row", "number"


@dataclass
class RowRegion:
    """The bindings from a product to the number, by kind: in a block ``[rows, columns]``, ``[rows, 1]`` or ``[]``."""

    body: Body
    product: Binding
    rows: int
    columns: int
    weight: Var
    has_weight_turned: bool
    kinds: dict[Binding, str]
    outside: dict[Var, Outside] = field(default_factory=dict)
    slices: list[Binding] = field(default_factory=list)

    @classmethod
    def of(cls, body: Body, product: Binding) -> RowRegion | None:
        """The region of a product; ``None`` if its rows are not reduced to one number, or have other readers."""
        x, weight = product.value.args
        extents = shape(product.var)
        is_known = all(isinstance(extent, int) for extent in (*extents, *shape(x)))
        if not is_known or len(shape(weight)) != 2 or dtype(product.var) == "float16" or not is_float(product.var):
            return None
        if not (isinstance(x, Var) and isinstance(weight, Var)) or min(extents[-1], math.prod(extents[:-1])) < 2:
            return None
        made = body.binding(weight).value
        source = made.args[0] if is_transpose(made) and isinstance(made.args[0], Var) else weight
        if source.same_as(x):
            return None
        rows = math.prod(extents[:-1])
        turned = source is not weight
        region = cls(body, product, rows, extents[-1], source, turned, {product: _FULL})
        return region if region._grow() else None

    @property
    def x(self) -> Var:
        """The product's first operand, which has the rows."""
        return self.product.value.args[0]

    @property
    def parts(self) -> list[Outside]:
        """The tensors from outside that have rows."""
        return [each for each in self.outside.values() if each.is_part]

    @property
    def read(self) -> dict[Var, tuple[int | None, ...]]:
        """All tensors that the region reads, with their extents in a block: tensors of rows first, the weight last."""
        found = {self.x: (None, shape(self.x)[-1])}
        found |= {each.value: each.extents for each in sorted(self.outside.values(), key=lambda each: not each.is_part)}
        return {**found, self.weight: shape(self.weight)}

    @property
    def widths(self) -> list[int]:
        """Bytes of an element of each value with columns, the product's first."""
        full = [each.var for each, kind in self.kinds.items() if kind == _FULL and is_float(each.var)]
        return [itemsize(dtype(each)) for each in full]

    @property
    def number(self) -> Binding:
        """The number that the rows are reduced to."""
        return next(reversed(self.kinds))

    def _grow(self) -> bool:
        """Adds the readers of the region until it ends in one number, and returns whether it does."""
        returned = self.body.returned()
        open_users = dict.fromkeys(self.product.users)
        if self.product in returned:
            return False
        for binding in self.body.bindings[self.body.bindings.index(self.product) + 1 :]:
            if binding not in open_users:
                continue
            kind = self._kind(binding)
            if kind is None:
                return False
            del open_users[binding]
            self.kinds[binding] = kind
            if kind == _NUMBER and not open_users:
                return dtype(binding.var) in ("float32", "float64")
            if binding in returned:
                return False
            open_users.update(dict.fromkeys(binding.users))
        return False

    def _kind(self, binding: Binding) -> str | None:
        """The kind of a binding that reads the region; ``None`` if it does not keep rows apart."""
        if not isinstance(binding.var.ty, TensorType) or not isinstance(binding.value, Call):
            return None
        args = [arg for arg in operands(binding.value)]
        given = [self.kinds.get(self.body.binding(arg)) for arg in args]
        first = given[0] if given else None
        if binding.op in RESHAPES:
            return self._reshaped(binding, first)
        if binding.op == _SLICE:
            return self._sliced(binding)
        if _NUMBER in given:
            return _NUMBER if self._is_linear(binding, args, given) else None
        if binding.op in _ALONG:
            return self._reduced(binding, first)
        axis = getattr(binding.value.attrs, "axis", None)
        if binding.op in _ROWWISE:
            return _FULL if first == _FULL and _is_last(axis, binding.var) else None
        if binding.op == "relax.gather_elements":
            fits = given == [_FULL, None] and _is_last(axis, args[0]) and self._adds(args[1], (None, 1))
            return _ROW if fits and shape(args[1])[:-1] == shape(args[0])[:-1] else None
        return self._pointwise(binding, args, given) if binding.op in POINTWISE or binding.op == STOP else None

    def _reshaped(self, binding: Binding, kind: str | None) -> str | None:
        extents = shape(binding.var)
        if kind == _NUMBER:
            return kind if extents == () else None
        return kind if kind == _ROW or extents[-1:] == (self.columns,) else None

    def _sliced(self, binding: Binding) -> str | None:
        """A slice of rows after a chain of full values; the slice is applied to the product's operand instead."""
        (before,) = binding.reads if len(binding.reads) == 1 else (None,)
        is_chain = all(len(each.users) == 1 for each in self.kinds) and set(self.kinds.values()) == {_FULL}
        axes = [int(axis) % len(shape(binding.var)) for axis in binding.value.args[1].fields]
        if not is_chain or self.parts or before is not self.number:
            return None
        if len(shape(binding.var)) - 1 in axes or not all(isinstance(extent, int) for extent in shape(binding.var)):
            return None
        self.slices.append(binding)
        self.rows = math.prod(shape(binding.var)[:-1])
        return _FULL if self.rows > 1 else None

    def _is_linear(self, binding: Binding, args: list[Expr], given: list[str | None]) -> bool:
        """Whether a number is linear in the region's numbers, without a constant term."""
        value = binding.value
        if shape(binding.var) != () or any(shape(arg) != () for arg in value.args[:]):
            return False
        numbers = [isinstance(arg, Var) and self.body.binding(arg) in self.kinds for arg in value.args[:]]
        fits = {
            "relax.add": all(numbers),
            "relax.subtract": all(numbers),
            "relax.negative": True,
            "relax.astype": is_float(binding.var) and itemsize(dtype(binding.var)) >= 4,
            "relax.multiply": sum(numbers) == 1,
            "relax.divide": numbers == [True, False],
        }.get(binding.op, False)
        others = [arg for arg, kind in zip(args, given, strict=True) if kind is None]
        return fits and all(self._adds(arg, ()) for arg in others)

    def _reduced(self, binding: Binding, kind: str | None) -> str | None:
        x = binding.value.args[0]
        rank, axes = len(shape(x)), axes_of(binding.value)
        if axes == [rank - 1] and kind == _FULL:
            return _ROW
        is_added = binding.op in ("relax.sum", "relax.mean") and shape(binding.var) == ()
        return _NUMBER if is_added and len(axes) == rank else None

    def _pointwise(self, binding: Binding, args: list[Expr], given: list[str | None]) -> str | None:
        """The kind; every operand has the result's rows, in their order, or is the same for all rows, else ``None``."""
        extents = shape(binding.var)
        kind = _FULL if _FULL in given else _ROW
        if math.prod(extents) != self.rows * (self.columns if kind == _FULL else 1):
            return None
        literals = [arg for arg in binding.value.args[:] if isinstance(arg, Constant)]
        if (kind == _FULL and extents[-1] != self.columns) or any(shape(literal) for literal in literals):
            return None
        for arg, known in zip(args, given, strict=True):
            if known == _ROW and kind == _FULL and not _has_rows(shape(arg), extents):
                return None
            if known is None and not self._adds(arg, self._extents_in_block(shape(arg), extents, kind)):
                return None
        return kind

    def _extents_in_block(
        self, extents: tuple[int, ...], whole: tuple[int, ...], kind: str
    ) -> tuple[int | None, ...] | None:
        """The extents of an outside tensor in a block; a point-wise operator with a result of ``whole`` reads it."""
        if math.prod(extents) == 1:
            return ()
        if kind == _ROW:
            return (None, 1) if math.prod(extents) == self.rows else None
        if math.prod(extents) == self.columns == extents[-1]:
            return (1, self.columns)
        if math.prod(extents) == self.rows * self.columns:
            return (None, self.columns)
        return (None, 1) if _has_rows(extents, whole) and math.prod(extents) == self.rows else None

    def _adds(self, value: Var, extents: tuple[int | None, ...] | None) -> bool:
        """Records an outside tensor, and returns whether it can be read, always with the same extents."""
        if extents is None or not all(isinstance(each, int) for each in shape(value)):
            return False
        if any(value.same_as(factor) for factor in (self.x, self.weight)):
            return False
        return self.outside.setdefault(value, Outside(value, extents)).extents == extents

    def replay(self, known: dict[Var, Var], scope: Scope) -> Var:
        """The region on one block; ``known`` maps ``x``, the weight and the outside tensors to the block's values."""
        weight = known[self.weight]
        if self.has_weight_turned:
            weight = scope.emit(op.permute_dims(weight, [1, 0]), "turned")
        product = self.product.value
        made = {self.product.var: scope.emit(Call(product.op, [known[self.x], weight], product.attrs))}
        for binding in list(self.kinds)[1:]:
            value, args = binding.value, [made.get(arg, known.get(arg, arg)) for arg in binding.value.args[:]]
            if binding.op in (*RESHAPES, _SLICE):
                made[binding.var] = args[0]
                continue
            if binding.op in _ROWWISE:
                new = _ROWWISE[binding.op](args[0], axis=1)
            elif binding.op == "relax.gather_elements":
                new = op.gather_elements(*args, axis=1)
            elif binding.op in _ALONG and self.kinds[binding] == _ROW:
                new = _ALONG[binding.op](args[0], [1], keepdims=True)
            elif binding.op == "relax.mean":
                total = scope.emit(op.sum(args[0]), "total")
                new = op.divide(total, const(math.prod(shape(value.args[0])), total))
            elif binding.op == "relax.sum":
                new = op.sum(args[0])
            else:
                new = Call(value.op, args, value.attrs, value.ty_args)
            made[binding.var] = scope.emit(new, binding.name)
        return made[self.number.var]


def _is_last(axis: object, value: Expr) -> bool:
    return axis is not None and int(axis) % len(shape(value)) == len(shape(value)) - 1


def _has_rows(extents: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether a tensor broadcasts to ``whole`` with one element per row."""
    rows = (1,) * (len(whole) - len(extents)) + extents
    return rows == (*whole[:-1], 1)
