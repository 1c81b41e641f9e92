"""Dead code elimination: a function -> the same without the bindings that no result needs."""

from __future__ import annotations

from autodiff.ir import Expr, Function, Var, bindings, results, used_vars, with_outputs

__all__ = ["dead_code_elimination", "live_bindings"]


def dead_code_elimination(func: Function) -> Function:
    """Drops bindings that no result needs.

    Safe: in flat form every binding is pure.
    """
    body = list(bindings(func))
    live = live_bindings(body, results(func))
    return func if len(live) == len(body) else with_outputs(func, live, results(func))


def live_bindings(body: list[tuple[Var, Expr]], outputs: list[Expr]) -> list[tuple[Var, Expr]]:
    """Those bindings that the outputs need, in order."""
    needed = {output for output in outputs if isinstance(output, Var)}
    live = []
    for var, value in reversed(body):
        if var in needed:
            live.append((var, value))
            needed.update(used_vars(value))
    return live[::-1]
