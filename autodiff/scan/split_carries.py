"""Split-K carries: a scan that carries a matrix product → a scan that carries partial products, added in the next step.

A product of few rows is too small to fill a GPU; a batch of products over parts of the inner axis fills it, and the
next step adds the partials where it reads the carry (see :mod:`bridge.compile.passes.product_variants` for products
that the step itself reads). The scan of a backward through time is of this kind. The order of a sum changes, so results
differ at rounding level.

Transposed constants: transposed matrices that every step of a scan reads → the matrices, transposed in the body.
For products that read a matrix in either order without a copy: no transposed copy is made before the loop. The pass
undoes the transposes that :mod:`autodiff.scan.hoist` moves out of the steps, and no more.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from tvm import relax
from tvm.relax import op

from autodiff.ir import (
    Call,
    DataflowVar,
    Expr,
    Function,
    TensorType,
    Tuple,
    TupleGetItem,
    Var,
    bindings,
    build_function,
    dtype,
    op_name,
    permutation,
    results,
    shape,
    substitute,
    used_vars,
    with_outputs,
)
from autodiff.scan.operator import body_text, is_scan, scan_call, scan_of

__all__ = ["carried_in_parts", "turned_inside"]

Parts = Callable[[str, int, int, int], int]
"""Element type, rows, inner elements, columns of a product → the number of partial products to compute it by."""

Bindings = list[tuple[Var, Expr]]


def carried_in_parts(func: Function, parts: Parts) -> Function:
    """The function with split carries; the same object if none is split. Only for differentiated functions: the new
    scans have no gradients."""
    body: Bindings = []
    split: dict[Var, tuple[Var, Mapping[int, int]]] = {}
    for var, value in bindings(func):
        if is_scan(value):
            counts, call = _in_parts(value, parts, body)
            if counts:
                tuples = DataflowVar(var.name, scan_of(call)[0].type)
                split[var] = tuples, counts
                body.append((tuples, call))
                continue
        if isinstance(value, TupleGetItem) and value.tuple_value in split:
            tuples, counts = split[value.tuple_value]
            if value.index in counts:
                item = _bound(body, TupleGetItem(tuples, value.index), (counts[value.index], *shape(var)), dtype(var))
                body.append((var, op.sum(item, [0])))
            else:
                body.append((var, TupleGetItem(tuples, value.index)))
            continue
        if any(each in split for each in used_vars(value)):
            return func  # a reader takes the whole result tuple
        body.append((var, value))
    return with_outputs(func, body, results(func)) if split else func


def _in_parts(call: Call, parts: Parts, outside: Bindings) -> tuple[dict[int, int], Call]:
    """The number of partials by carry, and the new call; appends bindings of the initial carries to ``outside``."""
    scan, tensors = scan_of(call)
    function = scan.function
    body, outputs, params = list(bindings(function)), results(function), list(function.params)
    counts = _counts(dict(body), outputs, params, scan.carries, parts)
    if not counts:
        return {}, call
    made: Bindings = []
    sums: dict[Var, Var] = {}
    for carry, count in counts.items():
        old = params[carry]
        params[carry] = Var(old.name, TensorType((count, *shape(old)), dtype(old)))
        sums[old] = _sum(made, params[carry], count)
        tensors[carry] = _first(outside, tensors[carry], count)
    batches = {outputs[carry]: count for carry, count in counts.items()}
    for var, value in body:
        value = substitute(value, sums)
        if var in batches:
            product = _batch(made, value, batches[var])
            outputs = [product if each is var or each == var else each for each in outputs]
        else:
            made.append((var, value))
    outputs = [sums.get(each, each) if isinstance(each, Var) else each for each in outputs]
    text = body_text(build_function(params, made, outputs))
    if text is None:
        return {}, call
    return counts, scan_call(dataclasses.replace(scan, body=text, gradient=None), tensors)


def _counts(
    values: Mapping[Var, Expr], outputs: Sequence[Expr], params: Sequence[Var], carries: int, parts: Parts
) -> dict[int, int]:
    """Carry → number of partials, for carries that are a matrix product without another reader."""
    uses = Counter(each for value in values.values() for each in used_vars(value))
    uses.update(each for each in outputs if isinstance(each, Var))
    found = {}
    for carry, result in enumerate(outputs[:carries]):
        value = values.get(result) if isinstance(result, Var) else None
        if op_name(value) != "relax.matmul" or uses[result] != 1 or params[carry] in outputs:
            continue
        (rows, inner), *others = (shape(each) for each in value.args) if _are_matrices(value) else ((0, 0),)
        count = parts(dtype(result), rows, inner, others[0][1]) if others else 1
        if count > 1:
            found[carry] = count
    return found


def _are_matrices(product: Call) -> bool:
    extents = [shape(each) for each in product.args]
    return all(len(each) == 2 and all(isinstance(extent, int) for extent in each) for each in extents)


def _bound(body: Bindings, value: Expr, extents: Sequence[int], element_type: str, name: str = "parts") -> Var:
    var = DataflowVar(name, TensorType(tuple(extents), element_type))
    body.append((var, value))
    return var


def _sum(body: Bindings, tensor: Var, count: int) -> Var:
    """The sum of the partials, in order."""
    (_, rows, columns), element_type = shape(tensor), dtype(tensor)
    total = None
    for part in range(count):
        one = op.strided_slice(tensor, [0], [part], [part + 1])
        one = _bound(body, one, (1, rows, columns), element_type)
        one = _bound(body, op.reshape(one, (rows, columns)), (rows, columns), element_type)
        total = one if total is None else _bound(body, op.add(total, one), (rows, columns), element_type)
    return total


def _batch(body: Bindings, product: Call, count: int) -> Var:
    """The partial products over slices of the inner axis, ``(count, rows, columns)``."""
    a, b = product.args
    (rows, inner), columns, element_type = shape(a), shape(b)[1], dtype(a)
    part = inner // count
    a = _bound(body, op.reshape(a, (rows, count, part)), (rows, count, part), element_type)
    a = _bound(body, op.permute_dims(a, [1, 0, 2]), (count, rows, part), element_type)
    b = _bound(body, op.reshape(b, (count, part, columns)), (count, part, columns), element_type)
    return _bound(body, op.matmul(a, b), (count, rows, columns), element_type)


def _first(body: Bindings, tensor: Expr, count: int) -> Var:
    """An initial carry as partials: the tensor, then zeros."""
    extents, element_type = shape(tensor), dtype(tensor)
    zeros = relax.const(0.0, element_type)
    zeros = _bound(body, op.full((count - 1, *extents), zeros, element_type), (count - 1, *extents), element_type)
    one = _bound(body, op.expand_dims(tensor, [0]), (1, *extents), element_type)
    return _bound(body, op.concat(Tuple([one, zeros]), 0), (count, *extents), element_type)


def turned_inside(func: Function) -> Function:
    """The function with scans that transpose constant matrices themselves; the same object if there are none. Only for
    differentiated functions: the new scans have no gradients."""
    values = dict(bindings(func))
    made = {var: _turned(value, values) if is_scan(value) else value for var, value in values.items()}
    if all(made[var] is value for var, value in values.items()):
        return func
    return with_outputs(func, list(made.items()), results(func))


def _turned(call: Call, values: Mapping[Var, Expr]) -> Call:
    scan, tensors = scan_of(call)
    function, first = scan.function, scan.carries + scan.xs
    sources = {place: _matrix(tensor, values) for place, tensor in enumerate(tensors) if place >= first}
    sources = {place: source for place, source in sources.items() if source is not None}
    params, body, inner = list(function.params), [], {}
    for place, source in sources.items():
        old = params[place]
        params[place] = Var(old.name, TensorType(shape(source), dtype(source)))
        inner[old] = DataflowVar(f"{old.name}_turned", TensorType(shape(old), dtype(old)))
        body.append((inner[old], op.permute_dims(params[place])))
    body += [(var, substitute(value, inner)) for var, value in bindings(function)]
    outputs = [inner.get(each, each) if isinstance(each, Var) else each for each in results(function)]
    text = body_text(build_function(params, body, outputs)) if sources else None
    if text is None:
        return call
    given = [sources.get(place, tensor) for place, tensor in enumerate(tensors)]
    return scan_call(dataclasses.replace(scan, body=text, gradient=None), given)


def _matrix(tensor: Expr, values: Mapping[Var, Expr]) -> Expr | None:
    """The matrix whose transpose a tensor is, else ``None``."""
    value = values.get(tensor) if isinstance(tensor, Var) else None
    is_transposed = op_name(value) == "relax.permute_dims" and permutation(value) == [1, 0]
    return value.args[0] if is_transposed else None
