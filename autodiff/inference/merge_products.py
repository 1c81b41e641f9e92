"""Merging of parallel products: several products of one input with frozen weights -> one product and its slices.

The projections of an attention (Q, K, V) are the usual case: one product with the weights side by side reads the input
once and is one call instead of three.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tvm.relax import op

from autodiff.body import Binding, Body, on_functions
from autodiff.extents import same, same_shape
from autodiff.inference.split_static import hoist_static
from autodiff.ir import Expr, Tuple, Var, dtype, op_name, shape
from autodiff.rewrite import BodyScope

__all__ = ["merge_products"]


@on_functions
def merge_products(body: Body, frozen: int) -> None:
    """``x @ A``, ``x @ B`` become slices of ``x @ [A B]`` for matrices of the first ``frozen`` parameters.

    Where each of the products has a frozen vector added, with the same reshape in between, so do the vectors.

    Safe: every element is the same sum of the same products; a library may add them up in another order where a matrix
    is wider, so results differ at rounding level.
    """
    static = hoist_static(body, frozen)
    groups: defaultdict[tuple, list[Binding]] = defaultdict(list)
    for binding in body.bindings:
        if binding not in static and binding.op == "relax.matmul" and (key := _key(binding, static, body)) is not None:
            groups[key].append(binding)
    merged = {group[0]: group for group in groups.values() if len(group) > 1}
    if not merged:
        return
    returned = body.returned()
    scope = BodyScope(body)
    for binding in body.bindings:
        if binding in merged:
            _merge(merged[binding], static, returned, body, scope)
            body.counts.rewrites += 1
        scope.bindings.append(binding)
    body.finish(scope.bindings, {})
    body.prune()


def _key(product: Binding, static: set[Binding], body: Body) -> tuple | None:
    """What products that can be merged have in common; ``None`` where the second factor is no frozen matrix."""
    x, weight = product.value.args
    if len(shape(weight)) != 2 or len(shape(x)) < 2 or body.binding(weight) not in static:
        return None
    return body.binding(x), dtype(x), dtype(weight), dtype(product.var)


def _merge(
    group: Sequence[Binding], static: set[Binding], returned: set[Binding], body: Body, scope: BodyScope
) -> None:
    """Emits the one product and makes slices of the others, in place."""
    x = group[0].value.args[0]
    weight = _side_by_side([each.value.args[1] for each in group], scope)
    width = shape(weight)[1]
    made = scope.emit(op.matmul(x, weight, out_dtype=dtype(group[0].var)), "merged")
    ends = [_shifted(each, static, returned, body) for each in group]
    if all(end is not None and same_shape(shape(end[0].var)[:-1], shape(ends[0][0].var)[:-1]) for end in ends):
        extents = [*shape(ends[0][0].var)[:-1], width]
        if not same_shape(extents, shape(made)):
            made = scope.emit(op.reshape(made, extents), "merged")
        shifts = scope.emit(op.concat(Tuple([shift for _, shift in ends]), axis=0), "merged_shift")
        made = scope.emit(op.add(made, shifts), "merged")
        group = [end for end, _ in ends]
    begin = 0
    for each in group:
        end = begin + shape(each.var)[-1]
        body.assign(each, op.strided_slice(made, [len(shape(made)) - 1], [begin], [end]))
        begin = end


def _shifted(product: Binding, static: set[Binding], returned: set[Binding], body: Body) -> tuple[Binding, Expr] | None:
    """The binding that adds a frozen vector to the product, perhaps reshaped before, and the vector."""
    current = product
    while len(current.users) == 1 and current not in returned:
        (user,) = current.users
        if user.op == "relax.reshape" and shape(user.var) and same(shape(user.var)[-1], shape(product.var)[-1]):
            current = user
            continue
        if user.op != "relax.add" or not same_shape(shape(user.var), shape(current.var)):
            return None
        left, right = user.value.args
        shift = right if body.binding(left) is current else left
        fits = same_shape(shape(shift), shape(product.var)[-1:]) and dtype(shift) == dtype(user.var)
        is_static = not isinstance(shift, Var) or body.binding(shift) in static
        return (user, shift) if fits and is_static else None
    return None


def _side_by_side(weights: Sequence[Expr], scope: BodyScope) -> Expr:
    """Matrices one beside the other; where all are transposed, what they transpose one below the other, transposed."""
    sources = [scope.definition(weight) for weight in weights]
    if all(op_name(source) == "relax.permute_dims" for source in sources):
        below = scope.emit(op.concat(Tuple([source.args[0] for source in sources]), axis=0), "merged_weight")
        return scope.emit(op.permute_dims(below), "merged_weight")
    return scope.emit(op.concat(Tuple(list(weights)), axis=1), "merged_weight")
