"""Cross-entropy fusion: ``gather(log_softmax(x), i)`` of one element per row -> that element, without the other ones.

The forward needs each row's maximum and sum, which the backward reads again; the log-softmax (a number for each word of
a vocabulary) is neither written nor read. The row sum in its gradient has one non-zero term, and becomes that term.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tvm.relax import op

from autodiff.body import Binding, Body, Scope, const, on_functions, rewrite, size, splat, walk
from autodiff.extents import Dim, from_tir, same, same_shape
from autodiff.ir import Call, Expr, compute_type, dtype, itemsize, op_name, shape
from autodiff.normalization import cast


@on_functions
def pick_rows(body: Body) -> None:
    """Replaces ``gather_elements(log_softmax(x), i)``, one index per row, by ``(x[i] - max) - log(sum(exp(x - max)))``.

    The function must be differentiated already: the maximum gets no gradient. Safe: the same operations on the same
    numbers, in the type of the statistics; ``sum(where(i == arange, v, 0))`` is ``v`` bit for bit (only ``-0.0`` now
    stays ``-0.0``).
    """
    picks = dict(_picks(body))
    if not picks:
        return
    spelled: dict[Binding, _Spelled] = {}
    sources = set(picks.values())
    for binding, scope in walk(body):
        if binding in sources:
            parts = spelled[binding] = _Spelled.of(binding.value, scope)
            body.assign(binding, parts.of_elements(parts.wide, scope))
        elif binding in picks:
            body.assign(binding, _picked(binding, spelled[picks[binding]], scope))
    rewrite(body, {"relax.sum": [_sum_of_one]})
    body.prune()


def _picks(body: Body) -> Iterator[tuple[Binding, Binding]]:
    """Yields (gather, log-softmax) where a gather reads one element per row of a log-softmax, or of its casts."""
    for binding in body.bindings:
        if binding.op != "relax.gather_elements":
            continue
        source, axis = body.binding(binding.value.args[0]), int(binding.value.attrs.axis)
        while source is not None and source.op == "relax.astype":  # autocast on a GPU casts the rows
            source = body.binding(source.value.args[0])
        if source is None or source.op != "relax.nn.log_softmax":
            continue
        rank = len(shape(source.var))
        if axis % rank == int(source.value.attrs.axis) % rank and _is_one_of(shape(binding.var), source, axis % rank):
            yield binding, source


def _picked(gather: Binding, rows: _Spelled, scope: Scope) -> Expr:
    """A gather's element, cast through the types that the log-softmax was cast to."""
    x, indices = gather.value.args
    element = rows.picked(indices, scope)
    for wanted in _uncast(x, scope)[0]:
        element = op.astype(scope.emit(element, "log_softmax_picked_one"), wanted)
    return element


def _uncast(value: Expr, scope: Scope) -> tuple[list[str], Expr]:
    """The types of a chain of casts, in the order of the casts, and the chain's operand."""
    types: list[str] = []
    while op_name(made := scope.definition(value)) == "relax.astype":
        types.insert(0, dtype(value))
        value = made.args[0]
    return types, value


def _is_one_of(extents: Sequence[Dim], source: Binding, axis: int) -> bool:
    """Whether ``extents`` are the source's shape with extent 1 along ``axis``."""
    rows = [1 if place == axis else extent for place, extent in enumerate(shape(source.var))]
    return same_shape(extents, rows)


class _Spelled(NamedTuple):
    """A log-softmax in parts: its operand in two types, the maximum and the logarithm of the sum of each row."""

    x: Expr
    wide: Expr
    axis: int
    largest: Expr
    logarithm: Expr

    @classmethod
    def of(cls, call: Call, scope: Scope) -> _Spelled:
        """The parts, bound."""
        x, axis = call.args[0], int(call.attrs.axis)
        wide = cast(x, compute_type(dtype(x)), scope, "log_softmax_wide")
        largest = scope.emit(op.max(wide, [axis], keepdims=True), "log_softmax_max")
        powers = scope.emit(op.exp(scope.emit(op.subtract(wide, largest), "log_softmax_shifted")), "log_softmax_exp")
        total = scope.emit(op.sum(powers, [axis], keepdims=True), "log_softmax_sum")
        return cls(x, wide, axis, largest, scope.emit(op.log(total), "log_softmax_log"))

    def of_elements(self, wide: Expr, scope: Scope) -> Expr:
        """The log-softmax of elements of the rows."""
        shifted = scope.emit(op.subtract(wide, self.largest), "log_softmax_shifted")
        value = op.subtract(shifted, self.logarithm)
        return value if dtype(self.x) == dtype(wide) else op.astype(scope.emit(value), dtype(self.x))

    def picked(self, indices: Expr, scope: Scope) -> Expr:
        """The log-softmax of one element per row; of widened rows it reads the narrow element."""
        x = scope.emit(op.gather_elements(_narrow(self.x, scope), indices, self.axis), "log_softmax_picked")
        return self.of_elements(cast(x, dtype(self.wide), scope, "log_softmax_picked_wide"), scope)


def _narrow(x: Expr, scope: Scope) -> Expr:
    """The narrow operand of the cast that made ``x``, reshaped like ``x``; ``x`` itself if no cast widened it."""
    made = scope.definition(x)
    if op_name(made) == "relax.reshape":
        wide = made.args[0]
        source = _narrow(wide, scope)
        return x if source.same_as(wide) else scope.emit(op.reshape(source, shape(x)), "log_softmax_narrow")
    is_widened = op_name(made) == "relax.astype" and itemsize(dtype(made.args[0])) < itemsize(dtype(x))
    return made.args[0] if is_widened else x


def _sum_of_one(call: Call, scope: Scope) -> Expr | None:
    """``sum(where(i == arange(n), v, 0))`` along the axis of the ``arange``, where ``i`` and ``v`` have one element."""
    axes = call.attrs.axis
    rank = len(shape(call.args[0]))
    if axes is None or len(axes) != 1:
        return None
    axis = int(axes[0]) % rank
    casts, uncast = _uncast(call.args[0], scope)
    chosen = scope.definition(uncast)
    if op_name(chosen) != "relax.where" or splat(chosen.args[2], scope) != 0:
        return None
    condition, value, _ = chosen.args
    hit = scope.definition(condition)
    if op_name(hit) != "relax.equal":
        return None
    index, places = hit.args
    rows = [1 if place == axis else extent for place, extent in enumerate(shape(call.args[0]))]
    if dtype(index) not in ("int32", "int64") or not _counts(places, axis, rank, scope):
        return None
    if not (same_shape(shape(index), rows) and same_shape(shape(value), rows)):
        return None
    extent = size(shape(call.args[0])[axis], index)
    behind = scope.emit(extent, "behind") if isinstance(extent, Call) else extent
    reached = scope.emit(op.greater_equal(index, const(0, index)), "reached")
    inside = scope.emit(op.logical_and(reached, scope.emit(op.less(index, behind), "not_behind")), "inside")
    found = scope.emit(op.where(inside, value, const(0, value)), "only")
    for wanted in casts:
        found = cast(found, wanted, scope, "only_cast")
    return found if same_shape(shape(call), rows) else op.reshape(found, shape(call))


def _counts(places: Expr, axis: int, rank: int, scope: Scope) -> bool:
    """Whether a value is ``0, 1, …`` along an axis and has extent 1 along the other axes."""
    extents = shape(places)
    others = [extent for place, extent in enumerate(extents, rank - len(extents)) if place != axis]
    if not all(same(extent, 1) for extent in others):
        return False
    made = scope.definition(places)
    if op_name(made) == "relax.reshape":
        made = scope.definition(made.args[0])
    if op_name(made) != "relax.arange":
        return False
    start, _, step = made.args
    return same(from_tir(start), 0) and same(from_tir(step), 1)
