"""Matrix products: sums of products -> one product; bias epilogues; shared sums of rows; fewer transposes.

Joining: a sum of products -> one product along a longer inner axis.
The sum is the gradient of a weight that is used several times, for instance in every step of a recurrence.
``A_1 @ B_1 + … + A_n @ B_n`` writes and adds ``n`` matrices as large as the weight. ``[A_1 … A_n] @ [B_1; …; B_n]``
copies the activations and their gradients instead, which are small wherever a batch is smaller than the weight.

Bias epilogue: a product of matrices plus one vector for all rows -> one library call.
The library's product kernels add a bias before they round, as eager's linear layers do: no separate kernel reads and
writes the result, and half types are rounded once instead of twice.

Shared sums: a sum of products with a factor constant along the summed axes -> an existing sum times that factor.
The gradient of a batch normalization sums ``dy`` and ``dy * xhat`` for its bias and weight, and both times the weight,
one number per channel, for its input: four sums over a large tensor, of which two are enough.

Transposed products: the bindings of a forward and its backward -> the backward with fewer transposes.
A product's gradient transposes the operands, ``dB = transpose(A) @ g``. Where ``B = transpose(W)`` (the weight of a
linear layer), ``dW = transpose(transpose(A) @ g)``, which is ``transpose(g) @ A``.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from tvm.relax import op

from autodiff.body import Binding, Body, Scope, on_functions, size, walk
from autodiff.extents import Extent, same, same_shape, sample_of
from autodiff.ir import (
    Call,
    Constant,
    DataflowVar,
    Expr,
    Pairs,
    ShapeExpr,
    TensorType,
    Tuple,
    Var,
    axes_of,
    dtype,
    is_transpose,
    op_name,
    shape,
    substitute,
)
from autodiff.library import call
from autodiff.typed import normalizer


@on_functions
def join_products(body: Body) -> None:
    """``sum of a[t] @ b[t]`` becomes ``concat(a) @ concat(b)`` where that moves less memory.

    Only products of matrices (two axes each) that have no other reader. Safe: the same numbers are multiplied and
    added in the order of a longer inner axis, so results differ at rounding level. The pass is meant for a backward: a
    forward's results must not depend on which gradients are computed.
    """
    returned = body.returned()
    once = {binding for binding in body.bindings if len(binding.users) == 1 and binding not in returned}
    inner = {
        read
        for binding in body.bindings
        if binding.op == "relax.add"
        for read in binding.reads
        if read.op == "relax.add" and read in once and same_shape(shape(read.var), shape(binding.var))
    }
    for binding, scope in walk(body):
        if binding.op == "relax.add" and binding not in inner:
            joined = _joined(_terms(binding.value, inner, body), once, body, scope)
            if joined is not None:
                body.assign(binding, joined)


def _terms(total: Call, inner: set[Binding], body: Body) -> list[Expr]:
    """The terms of a tree of sums, from left to right."""
    terms: list[Expr] = []
    stack: list[Expr] = list(total.args[::-1])
    while stack:
        term = stack.pop()
        binding = body.binding(term)
        if binding in inner:
            stack.extend(binding.value.args[::-1])
        else:
            terms.append(term)
    return terms


def _joined(terms: Sequence[Expr], once: set[Binding], body: Body, scope: Scope) -> Expr | None:
    """The sum with its products joined; ``None`` if no two products of one shape are profitable to join."""
    products: defaultdict[tuple, list[Binding]] = defaultdict(list)
    found = [(term, body.binding(term)) for term in terms]
    for term, binding in found:
        if binding in once and binding.op == "relax.matmul" and _is_profitable_to_join(binding.value):
            a, b = binding.value.args
            products[shape(term), dtype(term), dtype(a), dtype(b)].append(binding)
    groups = [group for group in products.values() if len(group) > 1]
    if not groups:
        return None
    gone = {binding for group in groups for binding in group}
    others = [term for term, binding in found if binding not in gone]
    joined = [_product([each.value for each in group], dtype(group[0].var), scope) for group in groups]
    if not others and len(joined) == 1:
        return joined[0]
    total, *values = (value if isinstance(value, Var) else scope.emit(value, "sum") for value in [*others, *joined])
    for last, value in zip([False] * (len(values) - 1) + [True], values, strict=True):
        total = op.add(total, value) if last else scope.emit(op.add(total, value), "sum")
    return total


def _is_profitable_to_join(call: Call) -> bool:
    """Whether both matrices together are smaller than their product; symbolic extents count as the sample's."""
    a, b = call.args
    if len(shape(a)) != 2 or len(shape(b)) != 2:
        return False
    rows, inner, columns = (sample_of(extent) for extent in (*shape(a), shape(b)[1]))
    return inner * (rows + columns) < rows * columns


def _product(calls: Sequence[Call], element_type: str, scope: Scope) -> Call:
    a = concatenated([call.args[0] for call in calls], 1, scope)
    b = concatenated([call.args[1] for call in calls], 0, scope)
    return op.matmul(a, b, out_dtype=element_type)


def concatenated(matrices: Sequence[Expr], axis: int, scope: Scope, name: str = "joined") -> Var:
    """The matrices concatenated; transposes of matrices become one transpose of a concatenation."""
    sources = [scope.definition(matrix) for matrix in matrices]
    if all(map(is_transpose, sources)):
        joined = scope.emit(op.concat(Tuple([source.args[0] for source in sources]), axis=1 - axis), name)
        return scope.emit(op.permute_dims(joined), name)
    return scope.emit(op.concat(Tuple(list(matrices)), axis=axis), name)


_ROWS = 256
"""Least rows: fewer are a time step of a loop, or rows that a kernel recomputes from a cache."""

_ROWS_OF_FLOAT32 = 4096
"""Least rows of float32, whose kernels with a bias are slow for fewer: 256 rows by 768 x 768 and 3072 x 768 take 1.35
and 2.2 times as long, a step of BertLayer of 1,024 rows 1.03 times (H200); 10,496 rows take as long as without."""

_UNIT = 8
"""The inner extent must be a multiple of this: the library's quick kernels, of every type, require it. The result's
rows need no alignment: a large product is padded then (:mod:`bridge.compile.passes.pad_products`), other ones take
as long with a bias as without (2048 x 1001 x 2048 in half types, 4096 x 50257 x 768 in float32; H200)."""

_TYPES = ("float16", "bfloat16", "float32")


@on_functions
def fuse_bias_epilogues(body: Body) -> None:
    """Replaces ``add(reshape(matmul(x, w), extents), b)`` of many rows by ``library.matmul_bias(x, w, b, extents)``.

    Safe: nothing else reads the product. Results may be rounded differently, in the same way wherever the call runs.
    """
    returned = body.returned()
    for binding in body.bindings:
        found = _operands(binding, body, returned)
        if found is not None:
            body.assign(binding, call("matmul_bias", [*found, ShapeExpr(shape(binding.var))], binding.var.ty))
    body.prune()


def _operands(binding: Binding, body: Body, returned: set[Binding]) -> tuple[Expr, Expr, Expr] | None:
    """The rows, the matrix and the bias of a sum ``rows @ matrix + bias``; ``None`` for another value."""
    if binding.op != "relax.add":
        return None
    for product, bias in (binding.value.args, list(binding.value.args)[::-1]):
        made = _read_once(body.binding(product), returned)
        if made is not None and made.op == "relax.reshape":
            made = _read_once(body.binding(made.value.args[0]), returned)
        if made is not None and made.op == "relax.matmul" and _fits(binding, *made.value.args, bias):
            return (*made.value.args, bias)
    return None


def _read_once(binding: Binding | None, returned: set[Binding]) -> Binding | None:
    return binding if binding is not None and len(binding.users) == 1 and binding not in returned else None


def _fits(binding: Binding, rows: Expr, matrix: Expr, bias: Expr) -> bool:
    if not isinstance(bias, Var) or not isinstance(bias.ty, TensorType):
        return False
    kinds = {dtype(each) for each in (binding.var, rows, matrix, bias)}
    extents = [shape(each) for each in (rows, matrix, bias)]
    if [len(each) for each in extents] != [2, 2, 1] or len(kinds) > 1 or kinds.isdisjoint(_TYPES):
        return False
    (m, k), (_, n), (width,) = extents
    whole = shape(binding.var)
    if any(isinstance(each, Extent) for each in (k, n, width, whole[-1])) or width != n or whole[-1] != n:
        return False
    least = _ROWS_OF_FLOAT32 if "float32" in kinds else _ROWS
    return sample_of(m) >= least and k % _UNIT == 0 and same(math.prod(whole[:-1]), m)


_SUMS = ("relax.sum", "relax.mean")
_MOST_FACTORS = 8

Factors = Counter[Binding | str]
"""A product's factors: bindings that are no products, and literals as text."""


@on_functions
def share_sums(body: Body) -> None:
    """Replaces ``sum(a * v)`` by ``sum(a) * v`` where that sum exists and ``v`` is constant along its axes; or means.

    Only in gradients: a forward may scale the terms because their sum would overflow otherwise. Safe: equal but for
    rounding, which happens in one product instead of one per element.
    """
    known: dict[tuple, list[tuple[Factors, Binding]]] = defaultdict(list)
    gradients = {param for param in body.parameters() if param.name.startswith("grad_out_")}
    for binding, scope in walk(body):
        if not gradients.isdisjoint(binding.reads):
            gradients.add(binding)
        factors = _summed(binding, body) if binding.op in _SUMS else None
        if factors is not None:
            x, axes = binding.value.args[0], axes_of(binding.value)
            rank = len(shape(x))
            added = frozenset(each for each in factors.items() if not _is_constant(each[0], axes, rank))
            key = tuple(axes), tuple(map(str, shape(x))), added
            less = (each for each in known[key] if factors - each[0] and not each[0] - factors)
            found = next(less, None) if binding in gradients else None
            if found is None:
                known[key].append((factors, binding))
            else:
                body.assign(binding, _scaled_sum(binding, found[1], factors - found[0], axes, scope))


def _summed(binding: Binding, body: Body) -> Factors | None:
    """The factors of the terms of a sum or mean of float32 or float64; ``None`` for other bindings."""
    call = binding.value
    if call.attrs.axis is None or not call.attrs.keepdims or dtype(binding.var) not in ("float32", "float64"):
        return None
    factors = _factors(call.args[0], body)
    return None if factors.total() > _MOST_FACTORS else factors


def _factors(value: Expr, body: Body) -> Factors:
    found, waiting = Counter(), [value]
    while waiting and found.total() <= _MOST_FACTORS:
        value = waiting.pop()
        binding = body.binding(value)
        if binding is None:
            found[str(value)] += 1
        elif binding.op == "relax.multiply":
            waiting.extend(binding.value.args)
        else:
            found[binding] += 1
    return found


def _is_constant(factor: Binding | str, axes: list[int], rank: int) -> bool:
    if isinstance(factor, str) or not isinstance(factor.var.ty, TensorType):
        return False
    extents = shape(factor.var)
    missing = rank - len(extents)
    return all(axis < missing or same(extents[axis - missing], 1) for axis in axes)


def _scaled_sum(binding: Binding, total: Binding, more: Factors, axes: list[int], scope: Scope) -> Expr:
    """A sum or mean, computed from one with fewer factors."""
    value: Var = total.var
    extents = shape(binding.value.args[0])
    if binding.op != total.op:
        count = size(math.prod(extents[axis] for axis in axes), value)
        count = count if isinstance(count, Constant) else scope.emit(count)
        value = scope.emit((op.divide if binding.op == "relax.mean" else op.multiply)(value, count), total.name)
    *first, last = more.elements()
    for factor in first:
        value = scope.emit(op.multiply(value, factor.var), binding.name)
    return op.multiply(value, last.var)


def simplify_transposes(forward: Pairs, backward: Pairs) -> tuple[Pairs, dict[Var, Var]]:
    """The rewritten backward, and the variables that replace its dropped variables.

    A transpose of a transpose becomes the innermost variable, a copy its source. A transpose of a product becomes the
    product of the transposes in reverse order, with as few transposes as possible. The walk looks through the forward's
    bindings, which stay. Safe: only positions change; each sum has the same terms in the same order.
    """
    rewriter = _Rewriter()
    for var, value in forward:
        rewriter.rewrite(var, value)
    rewriter.body = []
    for var, value in backward:
        rewriter.rewrite(var, value)
    return rewriter.body, rewriter.equal


class _Rewriter:
    def __init__(self) -> None:
        self.body: Pairs = []
        self.equal: dict[Var, Var] = {}
        self._definitions: dict[Var, Expr] = {}
        self._normalize = normalizer()

    def rewrite(self, var: Var, value: Expr) -> None:
        """Appends the rewritten binding."""
        value = substitute(value, self.equal)
        if isinstance(value, Var):  # a copy, as of a scan's gradients
            self.equal[var] = value
            return
        if is_transpose(value) and isinstance(value.args[0], Var):
            source = self._definitions.get(value.args[0])
            if is_transpose(source) and isinstance(source.args[0], Var):
                self.equal[var] = source.args[0]
                return
            if op_name(source) == "relax.matmul" and min(len(shape(arg)) for arg in source.args) > 1:
                operands = [self._transposed(arg) for arg in reversed(source.args)]
                value = self._normalize(op.matmul(*operands, out_dtype=source.attrs.out_dtype))
        self._bind(var, value)

    def _bind(self, var: Var, value: Expr) -> Var:
        self._definitions[var] = value
        self.body.append((var, value))
        return var

    def _transposed(self, value: Expr) -> Expr:
        """The transpose of a value: the operand of a transpose, else a new ``permute_dims``."""
        source = self._definitions.get(value) if isinstance(value, Var) else None
        if is_transpose(source):
            return source.args[0]
        rank = len(shape(value))
        turned = self._normalize(op.permute_dims(value, [*range(rank - 2), rank - 1, rank - 2]))
        return self._bind(DataflowVar("transposed", turned.ty), turned)
