"""Row blocks: a product whose rows are reduced to one number -> a loop over blocks of its rows.

The loss of a language model is ``loss(x @ w)``, with as many columns as there are words. Whole, the product, its copy
in float32 and its gradient are the largest tensors of a step. Here a scan takes some rows of ``x`` at a time,
multiplies them, reduces them, and differentiates that at once: no more than one block of the product is held.

Between the product and the number there may be any operators that keep rows apart, then operators that are linear in
sums over all rows; there is no list of losses. So the number ``t`` is a sum over blocks, ``t = sum_b f(x_b, w)``, and
its gradient is a factor ``g``, one number for all rows, times the blocks' gradients for ``g = 1``: ``dx = g * df/dx``,
``dw = g * sum_b df/dw``. The loop computes these sums, in float32 at least; the backward multiplies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tvm.relax import op

from autodiff import library
from autodiff.body import Binding, Body, BodyScope, Scope, const, on_functions
from autodiff.clean import clean
from autodiff.differentiate import differentiate, has_float
from autodiff.ir import (
    Call,
    Expr,
    Function,
    TensorType,
    TupleGetItem,
    Var,
    bindings,
    build_function,
    compute_type,
    dtype,
    itemsize,
    results,
    shape,
    substitute,
)
from autodiff.normalization import cast
from autodiff.ops import STOP
from autodiff.redundancy import unique_names
from autodiff.row_region import RowRegion
from autodiff.scan.operator import Scan, body_text, scan_call

LEAST_ROWS = 1024
"""Least rows of a block. A block reads and writes the sum of the weight's gradients, some 12 bytes per element, and
does 6 operations per element and row: 500 operations a byte from 1,024 rows on, below a tenth of the time."""

LEAST_SAVED = 64 << 20
"""Least bytes saved for a loop to pay for its launches; steps with smaller products are quick anyway."""

_HELD = 4
"""Tensors of the weight's size that the loop holds to sum its gradients: zeros, one step's, two alternating sums."""


@on_functions
def reduce_in_blocks(
    body: Body, outputs: Sequence[int], required: Sequence[int], told: list[str] | None = None
) -> None:
    """Computes products whose rows are reduced to one number, and read by nothing else, in blocks of rows.

    Safe: the same operators on the same rows; sums over rows are added up block by block. Not for float16, whose
    gradients are scaled so that they do not underflow.

    Args:
        outputs, required: indices of differentiated results, and of parameters whose gradients are wanted.
        told: receives a sentence about each replaced product.
    """
    for product in [each for each in body.bindings if each.op == "relax.matmul"]:
        region = RowRegion.of(body, product)
        if region is None:
            continue
        active = _active(body, required)
        is_needed = region.number in _behind(body, outputs)
        wanted = [each for each in region.read if is_needed and body.binding(each) in active]
        blocks = _blocks_of(region, wanted)
        if blocks and _replace(body, region, blocks.rows, wanted) and told is not None:
            told.append(str(blocks))


def _active(body: Body, required: Sequence[int]) -> set[Binding]:
    """The bindings that depend on the required parameters through operators that pass gradients on."""
    parameters = body.parameters()
    active = {parameters[index] for index in required}
    for binding in body.bindings:
        if binding.op != STOP and has_float(binding.var.ty) and any(read in active for read in binding.reads):
            active.add(binding)
    return active


def _behind(body: Body, outputs: Sequence[int]) -> set[Binding]:
    """The bindings on which the outputs depend through operators that pass gradients on."""
    needed = {body.binding(body.outputs[index]) for index in outputs}
    for binding in reversed(body.bindings):
        if binding in needed and binding.op != STOP:
            needed.update(binding.reads)
    return needed


class _Blocks(NamedTuple):
    """The rows of a block of a product with the given name and extents, and the bytes saved."""

    name: str
    whole: tuple[int, int]
    rows: int
    saved: int

    def __str__(self) -> str:
        rows, columns = self.whole
        return (
            f"{self.name}, {rows:,} x {columns:,}, is computed and reduced in {-(-rows // self.rows)} blocks of "
            f"{self.rows:,} rows, which takes {self.saved:,} bytes less at once"
        )


def _blocks_of(region: RowRegion, wanted: Sequence[Var]) -> _Blocks | None:
    """The blocks of a product; ``None`` if a loop would not save enough.

    The whole product is held with its gradient or a wider copy; the loop holds one block of both and the sums of
    gradients. Their number is the least for :data:`LEAST_ROWS`, or up to twice as many if that makes them equal.
    """
    if any(region.read[each] == (None, region.columns) for each in wanted if not each.same_as(region.x)):
        return None
    first, *_ = widths = region.widths
    bytes_of_row = region.columns * (first + (max(widths) if wanted else 0))
    summed = [each for each in wanted if region.read[each][:1] != (None,)]
    sums = sum(math.prod(shape(each)) * itemsize(compute_type(dtype(each))) for each in summed)
    least = -(-region.rows // LEAST_ROWS)
    count = next((count for count in range(least, 2 * least) if region.rows % count == 0), least)
    rows = -(-region.rows // count)
    saved = (region.rows - rows) * bytes_of_row - _HELD * sums
    name = region.product.name.split("__")[0]
    is_profitable = rows < region.rows and saved >= LEAST_SAVED
    return _Blocks(name, (region.rows, region.columns), rows, saved) if is_profitable else None


def _replace(body: Body, region: RowRegion, rows: int, wanted: Sequence[Var]) -> bool:
    """Replaces the region's number by loops over blocks that also compute its gradient; the region becomes dead.
    ``False``, without a change, if TVM's JSON cannot hold a step's function."""
    spans = [(0, region.rows // rows * rows, rows), (region.rows // rows * rows, region.rows, region.rows % rows)]
    spans = [span for span in spans if span[2]]
    steps = [_Step.of(region, count, wanted) for *_, count in spans]
    if None in steps:
        return False
    place = body.bindings.index(region.number)
    node = region.product.name.split("__")[0]
    scope, after = _NamedScope(body, body.bindings[:place], node), body.bindings[place:]
    given = _given(region, scope)
    sources = [scope.emit(op.grad.no_grad(value), "rows") for value in given.values()]
    sums = [scope.emit(op.zeros(ty.shape, str(ty.dtype)), "sum_of_blocks") for ty in steps[0].sums]
    parts: list[list[Var]] = []
    for step, (begin, end, count) in zip(steps, spans, strict=True):
        xs = [_blocks(scope, value, begin, end, count) for value in sources[: step.scanned]]
        scan = Scan(step.text, len(sums), len(xs), (end - begin) // count)
        call = scope.emit(scan_call(scan, [*sums, *xs, *sources[step.scanned :]]), "blocks_of_rows")
        made = [scope.emit(TupleGetItem(call, index), "of_blocks") for index in range(len(call.ty.fields))]
        sums = made[: len(sums)]
        parts.append([scope.emit(op.reshape(y, (end - begin, *shape(y)[2:])), "of_rows") for y in made[len(sums) :]])
    gradients = [
        column[0] if len(column) == 1 else scope.emit(op.concat(column, 0)) for column in zip(*parts, strict=True)
    ]
    gradients = dict(zip(steps[0].order, [*gradients, *sums[1:]], strict=True))
    linear = None
    for value, gradient in gradients.items():
        term = _linear(scope, given[value], gradient, dtype(region.number.var))
        linear = term if linear is None else scope.emit(op.add(linear, term), "linear")
    total = scope.emit(op.reshape(sums[0], ()), "total")
    body.assign(region.number, total if linear is None else library.call("with_derivative", [total, linear], total.ty))
    body.finish([*scope.bindings, *after], {})
    body.prune()
    return True


class _NamedScope(BodyScope):
    """A scope that names all bindings after one node of the traced graph."""

    def __init__(self, body: Body, before: Sequence[Binding], node: str):
        super().__init__(body, before)
        self._node = node

    def emit(self, value: Expr, name: str = "lv") -> Var:
        return super().emit(value, f"{self._node}__{name}")


def _given(region: RowRegion, scope: Scope) -> dict[Var, Var]:
    """The tensors that the region reads, reshaped for the loop: by variable."""
    given = {}
    for value, extents in region.read.items():
        rows = value
        for each in region.slices if value.same_as(region.x) else ():
            before, *bounds = each.value.args[:]
            rows = scope.emit(op.reshape(rows, (*shape(before)[:-1], shape(value)[-1])), "rows")
            rows = scope.emit(Call(each.value.op, [rows, *bounds], each.value.attrs), "rows")
        wanted = tuple(region.rows if extent is None else extent for extent in extents)
        given[value] = rows if shape(rows) == wanted else scope.emit(op.reshape(rows, wanted), "rows")
    return given


def _blocks(scope: Scope, value: Var, begin: int, end: int, rows: int) -> Var:
    """Rows ``begin`` to ``end`` of a matrix as ``(blocks, rows, columns)``."""
    if (begin, end) != (0, shape(value)[0]):
        value = scope.emit(op.strided_slice(value, [0], [begin], [end], [1]), "rows")
    return scope.emit(op.reshape(value, ((end - begin) // rows, rows, shape(value)[1])), "rows")


def _linear(scope: Scope, value: Var, gradient: Var, result: str) -> Var:
    """A number whose gradient with respect to ``value`` is ``gradient``: the sum of their products."""
    wide = compute_type(dtype(value))
    factors = [cast(each, wide, scope, "wide") for each in (value, scope.emit(op.grad.no_grad(gradient), "gradient"))]
    total = scope.emit(op.sum(scope.emit(op.multiply(*factors), "linear")), "linear")
    return cast(total, result, scope, "wide")


@dataclass(frozen=True)
class _Step:
    """The loop's body: a block -> the updated sums and the block's gradients.

    Attributes:
        text: the function: ``(sums.., parts.., constants..) -> (sums.., gradients of the block's parts..)``.
        sums: types of the sums: the number, then gradients of constants.
        scanned: number of inputs that are parts of a block.
        order: the tensors whose gradients are computed, parts first.
    """

    text: str
    sums: tuple[TensorType, ...]
    scanned: int
    order: tuple[Var, ...]

    @classmethod
    def of(cls, region: RowRegion, rows: int, wanted: Sequence[Var]) -> _Step | None:
        """The step for blocks of ``rows`` rows; ``None`` if TVM's JSON cannot hold one of its literals."""
        params = {}
        for place, (value, extents) in enumerate(region.read.items()):
            own = tuple(rows if extent is None else extent for extent in extents)
            params[value] = Var(f"read_{place}", TensorType(own, dtype(value)))
        scope = Scope(param.name for param in params.values())
        number = region.replay(params, scope)
        function = build_function(list(params.values()), scope.body, [number])
        values = list(params)
        scanned = 1 + len(region.parts)
        order = tuple(each for each in values if each in wanted)
        made = _with_gradients(function, [values.index(each) for each in order])
        found = dict(zip(order, results(made)[1:], strict=True))
        sums = [results(made)[0], *(found[each] for each in order if values.index(each) >= scanned)]
        types = [TensorType(shape(value), compute_type(dtype(value))) for value in sums]
        before = [Var(f"before_{place}", ty) for place, ty in enumerate(types)]
        scope = Scope(each.name for each in (*made.params, *before, *(var for var, _ in bindings(made))))
        for var, value in bindings(made):
            scope.bind(var, value)
        added = [op.add(one, cast(value, dtype(one), scope, "wide")) for one, value in zip(before, sums, strict=True)]
        outputs = [scope.emit(value, "sum") for value in added]
        outputs += [found[each] for each in order if values.index(each) < scanned]
        text = body_text(build_function([*before, *made.params], scope.body, outputs))
        return None if text is None else cls(text, tuple(types), scanned, order)


def _with_gradients(function: Function, wanted: Sequence[int]) -> Function:
    """The function's number and its gradients, simplified."""
    if not wanted:
        return unique_names(clean(function))
    joint = differentiate(function, [0], wanted)
    *params, grad_out = joint.params
    one = {grad_out: const(1, grad_out)}
    pairs = [(var, substitute(value, one)) for var, value in bindings(joint)]
    outputs = [one.get(value, value) if isinstance(value, Var) else value for value in results(joint)]
    return unique_names(clean(build_function(params, pairs, outputs)))
