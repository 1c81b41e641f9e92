"""Memory-compute curve: a joint function -> bytes captured and work recomputed per budget, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autodiff.ir import Function
from partition.coloring import RecomputeAll, SaveAll
from partition.graph import build_graph
from partition.min_cut import MinCut
from partition.plan import Plan, make_plan

__all__ = ["BUDGETS", "Point", "curve"]

#: Fractions of what save_all captures, from generous to nothing at all.
BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)


@dataclass(frozen=True)
class Point:
    """One partition on the curve: ``bytes`` captured, ``flops`` and ``moved`` bytes of recomputation.

    ``budget`` is the fraction asked for, ``None`` for a strategy without one.
    """

    strategy: str
    budget: float | None
    bytes: int
    flops: int
    moved: int
    reached: bool


def curve(
    joint: Function,
    *,
    num_primals: int,
    num_outputs: int,
    budgets: Sequence[float] = BUDGETS,
    strategy: MinCut | None = None,
) -> tuple[Point, ...]:
    """The plans of ``save_all``, ``min_cut``, each budget and ``recompute_all``, in this order.

    Args:
        joint, num_primals, num_outputs: as for :func:`partition.partition`.
        budgets: fractions of what ``save_all`` captures.
        strategy: the minimum cut with its policy and permissions; by default one that may recompute matrix
            products, so that every budget can be reached.
    """
    base = replace(strategy or MinCut(allow_matmul_recompute=True), budget=None)
    graph = build_graph(joint, num_primals, num_outputs)
    save_all = SaveAll().choose(graph)
    whole = make_plan(graph, "save_all", save_all, save_all=save_all)[0]
    costs = base.costs(graph)
    cut = base.unbounded(graph, costs)
    plans: list[tuple[Plan, float | None]] = [(whole, None)]
    plans.append((make_plan(graph, base.name, cut, save_all=save_all)[0], None))
    for budget in budgets:
        limited = replace(base, budget=float(budget))
        choice = limited.fit(graph, costs, cut)
        plans.append((make_plan(graph, limited.name, choice, save_all=save_all)[0], float(budget)))
    nothing = RecomputeAll()
    plans.append((make_plan(graph, nothing.name, nothing.choose(graph), save_all=save_all)[0], None))
    return tuple(
        Point(
            plan.strategy,
            budget,
            plan.bytes,
            plan.cost.flops,
            plan.cost.bytes,
            reached=budget is None or plan.bytes <= int(budget * whole.bytes),
        )
        for plan, budget in plans
    )
