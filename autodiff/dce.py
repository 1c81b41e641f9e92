"""Dead code elimination: a function -> the same without the bindings that no result needs."""

from __future__ import annotations

from autodiff.body import Body, on_functions
from autodiff.ir import Expr, Var, used_vars

__all__ = ["dead_code_elimination", "live_bindings"]


@on_functions
def dead_code_elimination(body: Body, since: int = 0) -> None:
    """Drops bindings that no result needs.

    Safe: in flat form every binding is pure.
    """
    body.prune()


def live_bindings(body: list[tuple[Var, Expr]], outputs: list[Expr]) -> list[tuple[Var, Expr]]:
    """Those bindings that the outputs need, in order."""
    needed = {output for output in outputs if isinstance(output, Var)}
    live = []
    for var, value in reversed(body):
        if var in needed:
            live.append((var, value))
            needed.update(used_vars(value))
    return live[::-1]
