"""Joining of matrix products: a sum of products -> one product along a longer inner axis.

The sum is the gradient of a weight that is used several times, in every step of a recurrence.
``A_1 @ B_1 + … + A_n @ B_n`` writes and adds up ``n`` matrices as large as the weight. One product along a longer inner
axis, ``[A_1 … A_n] @ [B_1; …; B_n]``, copies the activations and their gradients instead, which are small wherever a
batch is smaller than the weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tvm.relax import op

from autodiff.body import Binding, Body, on_functions
from autodiff.extents import same_shape, sample_of
from autodiff.ir import Call, Expr, Tuple, Var, dtype, op_name, permutation, shape
from autodiff.rewrite import BodyScope, Scope

__all__ = ["join_products"]


@on_functions
def join_products(body: Body) -> None:
    """``sum of a[t] @ b[t]`` becomes ``concat(a) @ concat(b)`` where that moves less memory.

    Products of matrices alone (two axes each), of which nothing else is read. Safe: the same numbers are multiplied and
    added; the order of the additions is that of a longer inner axis, so results differ at rounding level. It is meant
    for a backward: a forward's results should not depend on what else is asked for.
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
    scope = BodyScope(body)
    started = body.edits
    for binding in body.bindings:
        if binding.op == "relax.add" and binding not in inner:
            body.counts.visits += 1
            joined = _joined(_terms(binding.value, inner, body), once, body, scope)
            if joined is not None:
                body.assign(binding, joined)
                body.counts.rewrites += 1
        scope.bindings.append(binding)
    if body.edits != started:
        body.finish(scope.bindings, {})
        body.prune()


def _terms(total: Call, inner: set[Binding], body: Body) -> list[Expr]:
    """What a tree of sums adds up, from left to right."""
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
    """The sum with its products joined, or ``None`` if there are no two of one shape that are worth it."""
    products: defaultdict[tuple, list[Binding]] = defaultdict(list)
    found = [(term, body.binding(term)) for term in terms]
    for term, binding in found:
        if binding in once and binding.op == "relax.matmul" and _worth_joining(binding.value):
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


def _worth_joining(call: Call) -> bool:
    """Whether both matrices together are smaller than their product; for extents, those of the sample."""
    a, b = call.args
    if len(shape(a)) != 2 or len(shape(b)) != 2:
        return False
    rows, inner, columns = (sample_of(extent) for extent in (*shape(a), shape(b)[1]))
    return inner * (rows + columns) < rows * columns


def _product(calls: Sequence[Call], element_type: str, scope: Scope) -> Call:
    a = _concatenated([call.args[0] for call in calls], 1, scope)
    b = _concatenated([call.args[1] for call in calls], 0, scope)
    return op.matmul(a, b, out_dtype=element_type)


def _concatenated(matrices: Sequence[Expr], axis: int, scope: Scope) -> Var:
    """Matrices one after another; where all are transposed, what they transpose, one after another, transposed."""
    sources = [scope.definition(matrix) for matrix in matrices]
    if all(op_name(source) == "relax.permute_dims" and permutation(source) == [1, 0] for source in sources):
        joined = scope.emit(op.concat(Tuple([source.args[0] for source in sources]), axis=1 - axis), "joined")
        return scope.emit(op.permute_dims(joined), "joined")
    return scope.emit(op.concat(Tuple(list(matrices)), axis=axis), "joined")
