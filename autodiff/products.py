"""Joining of matrix products: a sum of products -> one product along a longer inner axis.

The sum is the gradient of a weight that is used several times, in every step of a recurrence.
``A_1 @ B_1 + … + A_n @ B_n`` writes and adds up ``n`` matrices as large as the weight. One product along a longer inner
axis, ``[A_1 … A_n] @ [B_1; …; B_n]``, copies the activations and their gradients instead, which are small wherever a
batch is smaller than the weight.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from tvm.relax import op

from autodiff.dce import live_bindings
from autodiff.ir import (
    Call,
    Expr,
    Function,
    Tuple,
    Var,
    bindings,
    dtype,
    op_name,
    results,
    shape,
    used_vars,
    with_outputs,
)
from autodiff.rewrite import Scope, names

__all__ = ["join_products"]


def join_products(func: Function) -> Function:
    """``sum of a[t] @ b[t]`` becomes ``concat(a) @ concat(b)`` where that moves less memory.

    Products of matrices alone (two axes each), of which nothing else is read. Safe: the same numbers are multiplied and
    added; the order of the additions is that of a longer inner axis, so results differ at rounding level. It is meant
    for a backward: a forward's results should not depend on what else is asked for.
    """
    body = list(bindings(func))
    definitions = dict(body)
    uses = Counter(var for _, value in body for var in used_vars(value))
    uses.update(output for output in results(func) if isinstance(output, Var))
    inner = {
        arg
        for _, value in body
        if op_name(value) == "relax.add"
        for arg in value.args
        if isinstance(arg, Var) and uses[arg] == 1 and _is_sum_of(arg, value, definitions)
    }
    scope = Scope(names(func))
    changed = False
    for var, value in body:
        joined = None
        if op_name(value) == "relax.add" and var not in inner:
            joined = _joined(_terms(value, inner, definitions), uses, definitions, scope)
        changed = changed or joined is not None
        scope.bind(var, value if joined is None else joined)
    return with_outputs(func, live_bindings(scope.body, results(func)), results(func)) if changed else func


def _is_sum_of(var: Var, user: Call, definitions: dict[Var, Expr]) -> bool:
    """Whether a variable is a sum of the same shape as the sum that reads it."""
    return op_name(definitions.get(var, var)) == "relax.add" and shape(var) == shape(user)


def _terms(total: Call, inner: set[Var], definitions: dict[Var, Expr]) -> list[Expr]:
    """What a tree of sums adds up, from left to right."""
    terms: list[Expr] = []
    stack: list[Expr] = list(reversed(total.args))
    while stack:
        term = stack.pop()
        if isinstance(term, Var) and term in inner:
            stack.extend(reversed(definitions[term].args))
        else:
            terms.append(term)
    return terms


def _joined(terms: Sequence[Expr], uses: Counter[Var], definitions: dict[Var, Expr], scope: Scope) -> Expr | None:
    """The sum with its products joined, or ``None`` if there are no two of one shape that are worth it."""
    products: defaultdict[tuple, list[Var]] = defaultdict(list)
    for term in terms:
        call = definitions.get(term) if isinstance(term, Var) else None
        if op_name(call) == "relax.matmul" and uses[term] == 1 and _worth_joining(call):
            a, b = call.args
            products[shape(term), dtype(term), dtype(a), dtype(b)].append(term)
    groups = [group for group in products.values() if len(group) > 1]
    if not groups:
        return None
    gone = {term for group in groups for term in group}
    others = [term for term in terms if not (isinstance(term, Var) and term in gone)]
    values = [*others, *(_product([definitions[term] for term in group], dtype(group[0]), scope) for group in groups)]
    while len(values) > 1:
        left, right, *rest = (value if isinstance(value, Var) else scope.emit(value, "sum") for value in values)
        values = [op.add(left, right), *rest]
    return values[0]


def _worth_joining(call: Call) -> bool:
    """Whether both matrices together are smaller than their product."""
    a, b = call.args
    if len(shape(a)) != 2 or len(shape(b)) != 2:
        return False
    (rows, inner), columns = shape(a), shape(b)[1]
    return inner * (rows + columns) < rows * columns


def _product(calls: Sequence[Call], element_type: str, scope: Scope) -> Call:
    a = _concatenated([call.args[0] for call in calls], 1, scope)
    b = _concatenated([call.args[1] for call in calls], 0, scope)
    return op.matmul(a, b, out_dtype=element_type)


def _concatenated(matrices: Sequence[Expr], axis: int, scope: Scope) -> Var:
    """Matrices one after another; where all are transposed, what they transpose, one after another, transposed."""
    sources = [scope.definition(matrix) for matrix in matrices]
    if all(op_name(source) == "relax.permute_dims" and _reverses(source) for source in sources):
        joined = scope.emit(op.concat(Tuple([source.args[0] for source in sources]), axis=1 - axis), "joined")
        return scope.emit(op.permute_dims(joined), "joined")
    return scope.emit(op.concat(Tuple(list(matrices)), axis=axis), "joined")


def _reverses(call: Call) -> bool:
    return call.attrs.axes is None or [int(axis) % 2 for axis in call.attrs.axes] == [1, 0]
