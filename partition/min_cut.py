"""Minimum cut: a graph -> the cheapest set of values to save, from which the backward recomputes the rest.

:mod:`partition.cost` has the costs and the must-save rules, :mod:`partition.budget` the network.
Memory-compute curve: a joint function -> bytes saved and work recomputed per budget, as data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autodiff.ir import Function
from partition.budget import fit, minimum_cut
from partition.cost import must_save_reason, product, recompute_cost, save_cost
from partition.graph import Choice, JointGraph, Node, build_graph
from partition.plan import Plan, RecomputeAll, SaveAll, backward_reads, make_plan, reader

Policy = Callable[[Node], str | None]


@dataclass(frozen=True)
class MinCut:
    """Minimum cut over bytes; parameters, masks and forward outputs are free.

    Args:
        budget: upper limit for the saved tensors, as a fraction of the bytes under ``save_all`` (float) or in bytes
            (int). More is recomputed until it is met, the most bytes per flop first; see :mod:`partition.budget`.
        policy: called once for every value that could be saved (a :class:`partition.Node`: ``op``,
            ``module_path``, ``shape``, ``dtype``, ``bytes``); answers ``"save"``, ``"recompute"`` or ``None``. A
            recomputation that is not allowed (see below) is refused, with a note in the plan.
        allow_matmul_recompute: whether budget and policy may recompute matrix products, convolutions and other library
            calls. Without a budget or policy it has no effect: the cut never recomputes a product.

    Raises:
        TypeError: a budget that is no number, a policy that cannot be called.
        ValueError: a negative budget.
    """

    budget: float | int | None = None
    policy: Policy | None = None
    allow_matmul_recompute: bool = False

    def __post_init__(self) -> None:
        if self.budget is not None:
            if isinstance(self.budget, bool) or not isinstance(self.budget, int | float):
                raise TypeError(f"budget is a fraction (float) or bytes (int), got {self.budget!r}")
            if not self.budget >= 0:
                raise ValueError(f"budget must not be negative, got {self.budget}")
        if self.policy is not None and not callable(self.policy):
            raise TypeError(f'policy is a callable: Node -> "save", "recompute" or None; got {self.policy!r}')

    @property
    def name(self) -> str:
        """``min_cut``, with the budget if there is one."""
        return "min_cut" if self.budget is None else f"min_cut(budget={self.budget})"

    def choose(self, graph: JointGraph) -> Choice:
        """The values on the cut, fewer if the budget asks; the colouring's if there is no finite cut."""
        costs = self.costs(graph)
        return self.fit(graph, costs, self.unbounded(graph, costs))

    def costs(self, graph: JointGraph) -> Costs:
        """The costs after must-save rules and policy; calls the policy."""
        return candidate_costs(graph, self.policy, self.allow_matmul_recompute)

    def unbounded(self, graph: JointGraph, costs: Costs) -> Choice:
        """The choice without the budget."""

        cut = minimum_cut(graph, costs.save, costs.recompute, graph.free_outputs)
        if cut.blocked:
            path = " -> ".join(f"{name} ({_obstacle(graph, costs, name)})" for name in cut.blocked)
            note = f"fell back to the colouring because no finite cut exists; in the way: {path}"
            return replace(SaveAll().choose(graph), notes=(*costs.notes, note))
        return Choice({name: _reason(graph, costs, name) for name in cut.saved}, notes=costs.notes)

    def fit(self, graph: JointGraph, costs: Costs, choice: Choice) -> Choice:
        """A choice of :meth:`unbounded`, made to fit the budget."""
        if self.budget is None:
            return choice
        limit = self.budget
        if isinstance(limit, float):
            whole = backward_reads(graph, SaveAll().choose(graph)).saved_tensors
            limit = int(limit * sum(graph.nodes[name].bytes for name in whole))
        forced = {name for name, reason in costs.must_save.items() if reason == _FORCED}
        savable = {name for name, cost in costs.save.items() if cost is not None}
        allowed = self.allow_matmul_recompute
        return fit(graph, choice, limit, savable=savable, forced=forced, allow_products=allowed)


@dataclass(frozen=True)
class Costs:
    """By candidate: the cost of saving (``None``: impossible), the cost of recomputing (``None``: not allowed), the
    reason it must be saved; and notes on refused requests of the policy."""

    save: dict[str, int | None]
    recompute: dict[str, int | None]
    must_save: dict[str, str]
    notes: tuple[str, ...] = ()


_FORCED = "forced: the policy saves it"


def candidate_costs(graph: JointGraph, policy: Policy | None = None, allow_products: bool = False) -> Costs:
    """The costs of every candidate, after must-save rules and policy."""
    save: dict[str, int | None] = {}
    recompute: dict[str, int | None] = {}
    must_save: dict[str, str] = {}
    notes = []
    for name in graph.candidates:
        node = graph.nodes[name]
        save[name], recompute[name] = save_cost(graph, name), recompute_cost(graph, name)
        reason = must_save_reason(graph, name)
        if policy is not None and save[name] is not None and name not in graph.free_outputs:
            wish = policy(node)
            if wish not in (None, "save", "recompute"):
                raise ValueError(f'the policy answered {wish!r} for {name}; it may answer "save", "recompute" or None')
            if wish == "save":
                save[name], reason = 0, _FORCED
            elif wish == "recompute":
                expensive = product(node) if name in graph.forward else None
                if expensive is None or allow_products:
                    save[name], reason = None, None
                else:
                    notes.append(f"the policy wants {name} recomputed, but {expensive}; allow_matmul_recompute is off")
        if reason is not None:
            must_save[name] = reason
            recompute[name] = None
    return Costs(save, recompute, must_save, tuple(notes))


def _obstacle(graph: JointGraph, costs: Costs, name: str) -> str:
    """Why a value on an infinite path can be neither saved nor recomputed."""
    found = []
    if costs.save[name] is None:
        found.append("not saved as such" if graph.nodes[name].is_tensor else f"a {graph.nodes[name].dtype}")
    if costs.recompute[name] is None:
        found.append(costs.must_save[name])
    return ", ".join(found)


def _reason(graph: JointGraph, costs: Costs, name: str) -> str:
    """Why the cut saves a value."""
    reason = costs.must_save.get(name)
    if reason == _FORCED:
        return _FORCED
    source = graph.nodes[name].inputs[0]
    if reason is None and graph.nodes[name].op == "TupleGetItem" and source in costs.must_save:
        reason = costs.must_save[source]
    needed = f"needed by {reader(graph, name)}"
    if reason is not None:
        return f"cut edge: {reason}, not recomputed; {needed}"
    if name in graph.side:
        return f"cut edge: only the gradient needs it, and it is smaller than what it is made from; {needed}"
    return f"cut edge: no larger than what it is computed from, and nearer to its reader; {needed}"


#: Fractions of the bytes under ``save_all``, from generous to zero.
BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)


@dataclass(frozen=True)
class Point:
    """One partition on the curve: ``bytes`` saved, ``flops`` and ``moved`` bytes of recomputation.

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
        budgets: fractions of the bytes under ``save_all``.
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
