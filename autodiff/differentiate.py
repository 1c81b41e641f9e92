"""The joint function: a function -> the same with its vector-Jacobian product."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax

from autodiff.dce import live_bindings
from autodiff.errors import NoGradient, UndifferentiableOp
from autodiff.fold_normalization import fold_normalizations
from autodiff.gradients import differentiable, unsupported
from autodiff.ir import (
    Call,
    Constant,
    DataflowVar,
    Expr,
    Function,
    TupleType,
    Var,
    bindings,
    dtype,
    is_float,
    library_name,
    op_name,
    results,
    shape,
    substitute,
    used_vars,
    with_outputs,
)
from autodiff.names import unique_names
from autodiff.reverse import accumulate
from autodiff.rewrite import NameSupply, names
from autodiff.seed import seed_vjp
from autodiff.transposes import simplify_transposes

__all__ = ["backward_bindings", "differentiate"]

Body = list[tuple[Var, Expr]]
_STOP = "relax.grad.no_grad"
_WITH_DERIVATIVE = "library.with_derivative"


def differentiate(func: Function, outputs: Sequence[int], require_grads: Sequence[int]) -> Function:
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
    func = unique_names(func)
    _check_required(func, require_grads)
    seeded = seed_vjp(func, outputs)
    required = [seeded.params[index] for index in require_grads]
    body = fold_normalizations(_live_and_active(seeded, required), results(seeded)[0])
    backward, gradients = backward_bindings(body, results(seeded)[0]) if body else ([], {})
    forward, stopped = _remove_stops(list(bindings(seeded)))
    backward = [(var, substitute(value, stopped)) for var, value in backward]
    primal = [stopped.get(output, output) if isinstance(output, Var) else output for output in results(seeded)[1:]]

    supply = NameSupply(names(seeded))
    wanted = []
    for param in required:
        gradient = gradients.get(param)
        if gradient is None:
            gradient = relax.Var("zeros", param.ty)
            backward.append((gradient, relax.op.zeros(shape(param), dtype(param))))
        gradient = stopped.get(gradient, gradient)
        if not isinstance(gradient, Constant) and (shape(gradient), dtype(gradient)) != (shape(param), dtype(param)):
            raise NoGradient(f"the gradient of {param.name!r} of type {param.ty} came out as {gradient.ty}: wrong rule")
        wanted.append(gradient)
    backward = live_bindings(backward, wanted)
    backward, renamed = _rename(backward, dict(zip(wanted, required, strict=True)), supply)
    wanted = [renamed.get(gradient, gradient) for gradient in wanted]
    outputs = [*primal, *wanted]
    return with_outputs(seeded, live_bindings(forward + backward, outputs), outputs)


def _check_required(func: Function, require_grads: Sequence[int]) -> None:
    if len(set(require_grads)) != len(require_grads):
        raise ValueError(f"differentiate: wanted each parameter once, got {list(require_grads)}")
    for index in require_grads:
        if not 0 <= index < len(func.params):
            raise ValueError(f"differentiate: wanted a parameter index below {len(func.params)}, got {index}")
        if not is_float(func.params[index]):
            param = func.params[index]
            raise ValueError(f"differentiate: wanted a floating point parameter, got {param.name!r} of type {param.ty}")


def _live_and_active(seeded: Function, required: Sequence[Var]) -> Body:
    """The bindings on a way from a required parameter to the seeded scalar: what there is to differentiate.

    Nothing else is differentiated, so that an operator without a gradient matters only where one is needed.
    """
    active = set(required)
    body = []
    for var, value in live_bindings(list(bindings(seeded)), results(seeded)[:1]):
        if op_name(value) == _STOP or not _has_float(var.ty):
            continue
        if any(used in active for used in used_vars(value)):
            active.add(var)
            body.append((var, value))
    body = live_bindings(body, results(seeded)[:1])
    problems = [problem for var, value in body if (problem := _undifferentiable(var, value, active))]
    if problems:
        first, *others = problems
        first.others = tuple(others)
        raise first
    return body


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


def backward_bindings(body: Body, scalar: Var) -> tuple[Body, dict[Var, Expr]]:
    """The backward bindings of the active ``body``, and the gradient of each of its variables."""
    backward, gradients = accumulate(body, scalar)
    backward, equal = simplify_transposes(body, backward)
    remaining: Body = []
    for var, value in backward:
        value = substitute(value, equal)
        if isinstance(value, Var | Constant):  # a copy
            equal[var] = value
        else:
            remaining.append((var, value))
    return remaining, {var: equal.get(gradient, gradient) for var, gradient in gradients.items()}


def _remove_stops(body: Body) -> tuple[Body, dict[Var, Expr]]:
    """``no_grad(x)`` becomes ``x``, and ``with_derivative(x, linear)`` too: their work is done."""
    remaining: Body = []
    stopped: dict[Var, Expr] = {}
    for var, value in body:
        value = substitute(value, stopped)
        if op_name(value) == _STOP:
            stopped[var] = value.args[0]
        elif library_name(value) == _WITH_DERIVATIVE:
            stopped[var] = value.args[1]  # after the function's name
        else:
            remaining.append((var, value))
    return remaining, stopped


def _rename(backward: Body, gradients: dict[Expr, Var], supply: NameSupply) -> tuple[Body, dict[Expr, Var]]:
    """Backward variables under names that the forward does not use; gradients are called ``grad_<parameter>``."""
    renamed: dict[Expr, Var] = {}
    result: Body = []
    for var, value in backward:
        hint = f"grad_{gradients[var].name}" if var in gradients else "bw"
        renamed[var] = DataflowVar(supply.fresh(hint), var.ty)
        result.append((renamed[var], substitute(value, {k: renamed[k] for k in used_vars(value) if k in renamed})))
    return result, renamed
