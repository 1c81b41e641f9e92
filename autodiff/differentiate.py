"""The joint function: a function -> the same with its vector-Jacobian product."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax

from autodiff.body import Binding, Body, on_functions
from autodiff.dce import live_bindings
from autodiff.errors import NoGradient, UndifferentiableOp
from autodiff.fold_normalization import fold_normalizations
from autodiff.gradients import differentiable, unsupported
from autodiff.ir import (
    Call,
    Constant,
    DataflowVar,
    Expr,
    TupleType,
    Var,
    dtype,
    is_float,
    library_name,
    op_name,
    shape,
    substitute,
)
from autodiff.names import unique_names
from autodiff.own_gradients import put_gradients
from autodiff.picked_rows import pick_rows
from autodiff.reverse import accumulate
from autodiff.rewrite import NameSupply
from autodiff.seed import seed_vjp
from autodiff.transposes import simplify_transposes

__all__ = ["backward_bindings", "differentiate"]

Pairs = list[tuple[Var, Expr]]
_STOP = "relax.grad.no_grad"
_WITH_DERIVATIVE = "library.with_derivative"


@on_functions
def differentiate(body: Body, outputs: Sequence[int], require_grads: Sequence[int]) -> None:
    """``func`` with a parameter ``grad_out_<i>`` per listed output, and a gradient result per required parameter.

    The results are all results of ``func``, then for each index in ``require_grads`` the vector-Jacobian product of the
    listed ``outputs`` with respect to that parameter: of its type, exactly zero if no output depends on it, bound to a
    variable ``grad_<parameter>`` where a variable of its own computes it. ``relax.grad.no_grad(x)`` in ``func`` stops
    gradients and becomes ``x``; ``library.with_derivative(x, linear)`` becomes ``x`` and sends them to ``linear``.

    Bindings of ``func`` keep their order and their variables' names (see :func:`unique_names`), whatever is required;
    those that no result needs are dropped.

    Raises ``ValueError`` for indices out of range, repeated, or of tensors that are not floating point, and
    :class:`UndifferentiableOp` for an operator without a gradient on the way from a required parameter to an output.
    """
    unique_names(body)
    _check_required(body, require_grads)
    seed_vjp(body, outputs)
    scalar, *primal = body.outputs
    required = [body.params[index] for index in require_grads]
    active = fold_normalizations(_live_and_active(body, scalar, required), scalar)
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
    body.bindings += [body.define(var, value) for var, value in backward]
    _remove_stops(body)
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
    """The bindings on a way from a required parameter to the seeded scalar: what there is to differentiate.

    Nothing else is differentiated, so that an operator without a gradient matters only where one is needed.
    """
    active = {body.binding(param) for param in required}
    found: list[Binding] = []
    for binding in _behind(scalar, body.bindings, body):
        if binding.op == _STOP or not _has_float(binding.var.ty):
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
    """Those bindings that a result needs, in order."""
    needed = {body.binding(result)}
    for binding in reversed(bindings):
        if binding in needed:
            needed.update(binding.reads)
    return [binding for binding in bindings if binding in needed]


def _has_float(ty: relax.Type) -> bool:
    if isinstance(ty, TupleType):
        return any(_has_float(field) for field in ty.fields)
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


def _remove_stops(body: Body) -> None:
    """``no_grad(x)`` becomes ``x``, and ``with_derivative(x, linear)`` too: their work is done."""
    remaining: list[Binding] = []
    stopped: dict[Binding, Expr] = {}
    for binding in body.bindings:
        if stopped:
            body.substitute(binding, stopped)
        if binding.op == _STOP:
            stopped[binding] = binding.value.args[0]
        elif library_name(binding.value) == _WITH_DERIVATIVE:
            stopped[binding] = binding.value.args[1]  # after the function's name
        else:
            remaining.append(binding)
    body.finish(remaining, stopped)


def _rename(backward: Pairs, gradients: dict[Expr, Var], supply: NameSupply) -> tuple[Pairs, dict[Expr, Var]]:
    """Backward variables under names that the forward does not use; gradients are called ``grad_<parameter>``."""
    renamed: dict[Expr, Var] = {}
    result: Pairs = []
    for var, value in backward:
        hint = f"grad_{gradients[var].name}" if var in gradients else "bw"
        renamed[var] = DataflowVar(supply.fresh(hint), var.ty)
        result.append((renamed[var], substitute(value, renamed)))
    return result, renamed
