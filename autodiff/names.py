"""Unique names: a function -> the same with every variable findable by its name."""

from __future__ import annotations

from autodiff.ir import Expr, Function, Var, bindings, results, substitute, with_outputs
from autodiff.rewrite import NameSupply, names

__all__ = ["unique_names"]


def unique_names(func: Function) -> Function:
    """Renames variables whose name an earlier variable has: ``x``, ``x`` becomes ``x``, ``x_1``.

    Safe: names carry no meaning in Relax. Parameters come first, so that a binding gives way to a parameter;
    two parameters of one name are renamed too. Why: gradients, plans and captures refer to variables by name.
    """
    all_names = list(names(func))
    if len(set(all_names)) == len(all_names):
        return func
    used: set[str] = set()
    supply = NameSupply(all_names)
    renamed: dict[Var, Expr] = {}

    def rename(var: Var) -> Var:
        if var.name in used:
            renamed[var] = type(var)(supply.fresh(var.name), var.ty)
        used.add(var.name)
        return renamed.get(var, var)

    params = [rename(param) for param in func.params]
    body = []
    for var, value in bindings(func):
        value = substitute(value, renamed)
        body.append((rename(var), value))
    outputs = [renamed.get(output, output) if isinstance(output, Var) else output for output in results(func)]
    return with_outputs(func, body, outputs, params)
