"""Reverse-mode differentiation: a function -> its joint function (the primal results and the vector-Jacobian product).

Undefined grad_outs: a backward -> the backward for calls in which some outputs got no gradient.
Autograd leaves an output's gradient undefined where nothing was computed from the output, as for the logits of a model
that also returns a loss. Values that are linear in this gradient are absent, a sum loses a term. Zeros in its place
would be inexact: they meet infinities and NaN.

Custom gradients: a joint body with tangents -> the same body with the gradients that the tangents stand for.
A function with a user-defined gradient is ``library.custom_gradient(count, inputs.., gradients.., tangents..)``, beside
the bindings that compute the gradients from ``library.tangent`` values. Its rule returns ``library.given(gradient_i,
tangents.., grads..)``: gradient i with the tangents replaced by grads. Each tangent belongs to one function and each
function is differentiated once, so bindings that depend on a tangent move behind the gradient that replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from tvm import relax
from tvm.relax import op

from autodiff.body import Binding, Body, BodyScope, NameSupply, Scope, on_functions, splat, without
from autodiff.clean import until_fixpoint
from autodiff.cross_entropy import pick_rows
from autodiff.errors import NoGradient, UndifferentiableOp
from autodiff.extents import same_shape
from autodiff.gradients import differentiable, unsupported
from autodiff.ir import (
    Call,
    Constant,
    DataflowVar,
    Expr,
    Function,
    Pairs,
    TupleType,
    Var,
    compute_type,
    dtype,
    is_float,
    library_name,
    op_name,
    shape,
    substitute,
)
from autodiff.memory import OVERWRITTEN, read_memory, with_own_results
from autodiff.normalization import cast, fold_normalizations
from autodiff.ops import STOP, having
from autodiff.products import simplify_transposes
from autodiff.redundancy import live_bindings, unique_names
from autodiff.reverse import accumulate
from autodiff.zapp import deduplicate_views


@on_functions
def seed_vjp(body: Body, outputs: Sequence[int]) -> None:
    """Adds a parameter ``grad_out_<i>`` per listed output and a first result: ``sum_i sum(output_i * grad_out_i)``.

    The results become the scalar (float32 for half types) followed by all results of ``func``. Safe: nothing else
    changes. Why: TVM's gradient wants a scalar target, and the gradient of this one is the vector-Jacobian product.

    Raises ``ValueError`` for an index out of range, listed twice or not of floating point type, and for a name taken.
    """
    primal = body.outputs
    taken = body.names()
    if not outputs:
        raise ValueError("seed_vjp: wanted at least one output to differentiate, got none")
    if len(set(outputs)) != len(outputs):
        raise ValueError(f"seed_vjp: wanted each output once, got {list(outputs)}")
    scope = BodyScope(body, body.bindings)
    total = None
    for index in outputs:
        if not 0 <= index < len(primal):
            raise ValueError(f"seed_vjp: wanted an output index below {len(primal)}, got {index}")
        output = primal[index]
        if not is_float(output):
            raise ValueError(f"seed_vjp: wanted a floating point tensor as output {index}, got {output.ty}")
        name = f"grad_out_{index}"
        if name in taken:
            raise ValueError(f"seed_vjp: the name {name!r} is taken by another variable")
        grad_out = relax.Var(name, output.ty)
        body.add_param(grad_out)
        # TVM refuses a half target; the cast's gradient casts back, which `clean` removes.
        wide = compute_type(dtype(output))
        weighted = scope.emit(
            op.multiply(cast(output, wide, scope, f"wide_{index}"), cast(grad_out, wide, scope, f"{name}_wide")),
            f"weighted_{index}",
        )
        term = scope.emit(op.sum(weighted), f"vjp_{index}")
        total = term if total is None else _add(total, term, scope)
    body.outputs = [total, *primal]
    body.finish(scope.bindings, {})


def _add(left: Var, right: Var, scope: Scope) -> Var:
    wide = "float64" if "float64" in (dtype(left), dtype(right)) else "float32"
    return scope.emit(op.add(cast(left, wide, scope, "vjp"), cast(right, wide, scope, "vjp")), "vjp")


def without_grad_outs(backward: Function, absent: Collection[int], results: Sequence[int]) -> Function | None:
    """The backward without some grad_outs: removes these parameters and all bindings linear in them.

    Args:
        backward: linear in the parameters ``absent``, as a vector-Jacobian product is in its grad_outs.
        absent, results: indices of parameters; indices of results, in order.

    Returns:
        ``None`` where there is no rule for an operator, or where a result is computed from nothing else.
    """
    body = Body.of(backward)
    edited = body.tick()
    params = [body.binding(param) for param in body.params]
    gone = dict.fromkeys(params[place] for place in absent)
    scope = BodyScope(body)
    replaced: dict[Binding, Expr] = {}
    remaining = []
    for binding in body.bindings:
        body.substitute(binding, replaced)
        if gone.keys().isdisjoint(binding.reads):
            remaining.append(binding)
            continue
        left = _left(binding, gone, body, scope)
        if left is None:
            return None
        if left is _ABSENT:
            gone[binding] = None
        else:
            replaced[binding] = left
    body.outputs = [body.outputs[place] for place in results]
    if not gone.keys().isdisjoint(body.returned()):
        return None
    body.finish(remaining, replaced)
    for binding in reversed(gone):
        body.undefine(binding)
    body.params = [param.var for param in params if param not in gone]
    body.prune()
    until_fixpoint(body, [deduplicate_views], edited)
    return body.function()


def _left(binding: Binding, gone: Collection[Binding], body: Body, scope: Scope) -> Expr | object | None:
    """A call's value when some operands are absent; ``None``: there is no rule, or the value has another type."""
    rule = _RULES.get(binding.op)
    if rule is None:
        return None
    left = rule(scope, *(_ABSENT if body.binding(arg) in gone else arg for arg in binding.value.args[:]))
    if left is None or left is _ABSENT:
        return left
    var = binding.var
    is_alike = isinstance(left, Var) and dtype(left) == dtype(var) and same_shape(shape(left), shape(var))
    return left if is_alike else None


_ABSENT = object()
"""Marks an absent operand or result."""

_Rule = Callable[..., Expr | object | None]
"""Scope of the definitions, operands of a call, some absent -> the call's value: one of its operands, or absent."""


def _linear(scope: Scope, x: object, *rest: object) -> object | None:
    return _ABSENT if x is _ABSENT and all(each is not _ABSENT for each in rest) else None


def _bilinear(scope: Scope, x: object, y: object) -> object:
    return _ABSENT


def _sum(scope: Scope, x: object, y: object) -> object:
    return y if x is _ABSENT else x


def _difference(scope: Scope, x: object, y: object) -> object | None:
    return x if y is _ABSENT else None


def _choice(scope: Scope, condition: object, x: object, y: object) -> object | None:
    """Gradient of one arm of ``where``: absent where the other arm is zeros."""
    nothing = [each is _ABSENT or splat(each, scope) == 0 for each in (x, y)]
    return _ABSENT if condition is not _ABSENT and all(nothing) else None


_RULES: dict[str | None, _Rule] = {
    **dict.fromkeys([*having("view", "plain"), "relax.astype", "relax.negative", "relax.sum"], _linear),
    "relax.strided_slice": _linear,
    "relax.divide": _linear,
    "relax.multiply": _bilinear,
    "relax.matmul": _bilinear,
    "relax.add": _sum,
    "relax.subtract": _difference,
    "relax.where": _choice,
}


_CUSTOM, _GIVEN, _WITH_DERIVATIVE = "library.custom_gradient", "library.given", "library.with_derivative"


def put_gradients(body: Body) -> None:
    """Replaces every tangent by its gradient, and sorts the bindings so that each definition precedes its uses."""
    found = [binding for binding in body.bindings if library_name(binding.value) == _GIVEN]
    if not found:
        return
    replaced: dict[Binding, Expr] = {}
    for binding in found:
        _, gradient, *pairs = binding.value.args
        half = len(pairs) // 2
        for tangent, grad in zip(pairs[:half], pairs[half:], strict=True):
            replaced[body.binding(tangent)] = grad
        replaced[binding] = gradient
    remaining = [binding for binding in body.bindings if binding not in replaced]
    resolved = {binding: _resolved(body, value, replaced) for binding, value in replaced.items()}
    for binding in remaining:
        body.substitute(binding, resolved)
    for binding in replaced:
        for read in binding.reads:
            read.users.pop(binding, None)
    body.finish(_in_order(remaining), resolved)
    body.prune()


@on_functions
def drop_gradients(body: Body) -> None:
    """Drops custom gradients from a function that is not differentiated. Safe: ``with_derivative(x, ..)`` is ``x``."""
    if not any(library_name(binding.value) == _CUSTOM for binding in body.bindings):
        return
    without(body, lambda each: each.value.args[1] if library_name(each.value) == _WITH_DERIVATIVE else None)
    body.prune()


def _resolved(body: Body, value: Expr, replaced: dict[Binding, Expr]) -> Expr:
    """The final replacement of a value: one function's gradient may be another function's tangent."""
    while (binding := body.binding(value)) in replaced:
        value = replaced[binding]
    return value


def _in_order(bindings: list[Binding]) -> list[Binding]:
    """The bindings in topological order, otherwise in the given order."""
    waiting = {binding: None for binding in bindings}
    ordered: list[Binding] = []
    for first in bindings:
        stack = [first]
        while stack:
            binding = stack[-1]
            before = [read for read in binding.reads if read in waiting and read is not binding]
            if binding not in waiting:
                stack.pop()
            elif before:
                stack.extend(reversed(before))
            else:
                del waiting[binding]
                ordered.append(binding)
                stack.pop()
    return ordered


@on_functions
def differentiate(
    body: Body,
    outputs: Sequence[int],
    require_grads: Sequence[int],
    owners: Mapping[str, str] = MappingProxyType({}),
    again: Mapping[int, bool] = MappingProxyType({}),
    statistics: Collection[str] = (),
) -> None:
    """Reverse mode: adds a parameter ``grad_out_<i>`` per listed output and a gradient per required parameter.

    The results are all results of ``func``, then for each index in ``require_grads`` the vector-Jacobian product of the
    listed ``outputs`` with respect to that parameter: of its type, exactly zero if no output depends on it, bound to a
    variable ``grad_<parameter>`` where a variable of its own computes it. ``relax.grad.no_grad(x)`` in ``func`` stops
    gradients and becomes ``x``; ``library.with_derivative(x, linear)`` becomes ``x`` and sends them to ``linear``.

    Where a gradient reads a parameter, ``library.overwritten`` or a view of either, it reads the memory as ``func``
    leaves it: the last ``library.overwritten`` result. Inner values of an operation on this memory are recomputed from
    it (``owners``: variable name -> the operation that computes the value), except the ``statistics``. ``again``:
    further parameters whose memory the gradient reads when the backward runs -> whether views of them do so as well.

    Bindings of ``func`` keep their order and their variables' names (see :func:`unique_names`), whatever is required;
    bindings that no result needs are dropped.

    Raises ``ValueError`` for indices out of range, repeated, or of tensors that are not floating point, and
    :class:`UndifferentiableOp` for an operator without a gradient on the way from a required parameter to an output.
    """
    unique_names(body)
    _check_required(body, require_grads)
    seed_vjp(body, outputs)
    scalar, *primal = body.outputs
    required = [body.params[index] for index in require_grads]
    active = fold_normalizations(_live_and_active(body, scalar, required), scalar)
    active, owners = with_own_results(body, active, owners, again)
    backward, gradients = backward_bindings(active, scalar) if active else ([], {})
    wanted = []
    for param in required:
        gradient = gradients.get(param)
        if gradient is None:
            gradient = DataflowVar("zeros", param.ty)
            backward.append((gradient, relax.op.zeros(shape(param), dtype(param))))
        if not isinstance(gradient, Constant) and (shape(gradient), dtype(gradient)) != (shape(param), dtype(param)):
            raise NoGradient(f"the gradient of {param.name!r} of type {param.ty} came out as {gradient.ty}: wrong rule")
        wanted.append(gradient)
    backward = live_bindings(backward, wanted)
    backward, renamed = _rename(backward, dict(zip(wanted, required, strict=True)), NameSupply(body.names()))
    body.outputs = [*primal, *(renamed.get(gradient, gradient) for gradient in wanted)]
    gradient = [body.define(var, value) for var, value in backward]
    body.bindings += gradient
    without(body, _marked)
    read_memory(body, {*gradient}, owners, again, statistics)
    without(body, _seen_before)
    body.prune()
    put_gradients(body)
    pick_rows(body)


def _check_required(body: Body, require_grads: Sequence[int]) -> None:
    if len(set(require_grads)) != len(require_grads):
        raise ValueError(f"differentiate: wanted each parameter once, got {list(require_grads)}")
    for index in require_grads:
        if not 0 <= index < len(body.params):
            raise ValueError(f"differentiate: wanted a parameter index below {len(body.params)}, got {index}")
        if not is_float(body.params[index]):
            param = body.params[index]
            raise ValueError(f"differentiate: wanted a floating point parameter, got {param.name!r} of type {param.ty}")


def _live_and_active(body: Body, scalar: Var, required: Sequence[Var]) -> Pairs:
    """The bindings on a path from a required parameter to the seeded scalar; only these are differentiated.

    Raises :class:`UndifferentiableOp` for an operator without a gradient rule on a path; elsewhere it does no harm.
    """
    active = {body.binding(param) for param in required}
    found: list[Binding] = []
    for binding in _behind(scalar, body.bindings, body):
        if binding.op == STOP or not has_float(binding.var.ty):
            continue
        if any(read in active for read in binding.reads):
            active.add(binding)
            found.append(binding)
    found = _behind(scalar, found, body)
    variables = {binding.var for binding in active}
    problems = [problem for each in found if (problem := _undifferentiable(each.var, each.value, variables))]
    if problems:
        first, *others = problems
        first.others = tuple(others)
        raise first
    return [(binding.var, binding.value) for binding in found]


def _behind(result: Var, bindings: Sequence[Binding], body: Body) -> list[Binding]:
    """The given bindings that a result needs, in order."""
    needed = {body.binding(result)}
    for binding in reversed(bindings):
        if binding in needed:
            needed.update(binding.reads)
    return [binding for binding in bindings if binding in needed]


def has_float(ty: relax.Type) -> bool:
    """Whether a type is of floating point numbers, or a tuple with some."""
    if isinstance(ty, TupleType):
        return any(has_float(field) for field in ty.fields)
    return isinstance(ty, relax.TensorType) and "float" in str(ty.dtype)


def _undifferentiable(var: Var, value: Expr, active: set[Var]) -> UndifferentiableOp | None:
    if not isinstance(value, Call):
        return None
    name = library_name(value) or op_name(value) or str(value.op)
    if not differentiable(value):
        return UndifferentiableOp(name, var.name, "no gradient rule is registered for it")
    reason = unsupported(value, active)
    return None if reason is None else UndifferentiableOp(name, var.name, reason)


def backward_bindings(body: Pairs, scalar: Var) -> tuple[Pairs, dict[Var, Expr]]:
    """The backward bindings of the active ``body``, and the gradient of each of its variables."""
    backward, gradients = accumulate(body, scalar)
    backward, equal = simplify_transposes(body, backward)
    remaining: Pairs = []
    for var, value in backward:
        value = substitute(value, equal)
        if isinstance(value, Var | Constant):  # a copy
            equal[var] = value
        else:
            remaining.append((var, value))
    return remaining, {var: equal.get(gradient, gradient) for var, gradient in gradients.items()}


def _marked(binding: Binding) -> Expr | None:
    """The value that a call marks, for gradients alone: it has been differentiated."""
    if binding.op == STOP:
        return binding.value.args[0]
    return binding.value.args[1] if library_name(binding.value) == _WITH_DERIVATIVE else None


def _seen_before(binding: Binding) -> Expr | None:
    """The operand of a mark of memory that forward overwrites again; a parameter's last one is a result."""
    is_before = library_name(binding.value) == OVERWRITTEN and not int(binding.value.args[3].value)
    return binding.value.args[1] if is_before else None


def _rename(backward: Pairs, gradients: dict[Expr, Var], supply: NameSupply) -> tuple[Pairs, dict[Expr, Var]]:
    """Backward variables under names that the forward does not use; gradients are called ``grad_<parameter>``."""
    renamed: dict[Expr, Var] = {}
    result: Pairs = []
    for var, value in backward:
        hint = f"grad_{gradients[var].name}" if var in gradients else "bw"
        renamed[var] = DataflowVar(supply.fresh(hint), var.ty)
        result.append((renamed[var], substitute(value, renamed)))
    return result, renamed
