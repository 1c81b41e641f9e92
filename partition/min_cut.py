"""The minimum cut: keep the cheapest set of values from which the backward can compute the rest.

Costs and bans are in :mod:`partition.cost`, the network in :mod:`partition.network`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from .budget import fit
from .coloring import SaveAll, reader
from .cost import ban, keep_cost, product, recompute_cost
from .crossing import crossing
from .graph import Graph, Node
from .network import minimum_cut
from .strategy import Choice

__all__ = ["MinCut", "Prices", "prices"]

Policy = Callable[[Node], str | None]


@dataclass(frozen=True)
class MinCut:
    """Minimum cut over bytes; parameters, masks and forward outputs are free.

    Args:
        budget: most bytes of captures, as a fraction of what ``save_all`` captures (float) or in bytes (int).
            More is recomputed until the captures fit, the most bytes per flop first; see :mod:`partition.budget`.
        policy: asked once about every value that could be captured (a :class:`partition.Node`: ``op``,
            ``module_path``, ``shape``, ``dtype``, ``bytes``); answers ``"save"``, ``"recompute"`` or ``None``. A
            recomputation that is not allowed (see below) is refused, with a note in the plan.
        allow_matmul_recompute: whether budget and policy may have matrix products, convolutions and other library
            calls computed again. Without either nothing changes: no product is worth it on bytes alone.

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

    def choose(self, graph: Graph) -> Choice:
        """The values on the cut, fewer if the budget asks; the colouring's if there is no finite cut."""
        priced = self.prices(graph)
        return self.fit(graph, priced, self.unbounded(graph, priced))

    def prices(self, graph: Graph) -> Prices:
        """The stated costs after bans and policy; the policy is asked here."""
        return prices(graph, self.policy, self.allow_matmul_recompute)

    def unbounded(self, graph: Graph, priced: Prices) -> Choice:
        """The choice without the budget."""
        free = {name for name in graph.output_index if graph.nodes[name].is_tensor}
        cut = minimum_cut(graph, priced.keep, priced.again, free)
        if cut.blocked:
            path = " -> ".join(f"{name} ({_obstacle(graph, priced, name)})" for name in cut.blocked)
            note = f"fell back to the colouring because no finite cut exists; in the way: {path}"
            return replace(SaveAll().choose(graph), notes=(*priced.notes, note))
        return Choice({name: _reason(graph, priced, name) for name in cut.kept}, notes=priced.notes)

    def fit(self, graph: Graph, priced: Prices, choice: Choice) -> Choice:
        """A choice of :meth:`unbounded`, made to fit the budget."""
        if self.budget is None:
            return choice
        limit = self.budget
        if isinstance(limit, float):
            whole = crossing(graph, SaveAll().choose(graph)).captures
            limit = int(limit * sum(graph.nodes[name].bytes for name in whole))
        forced = {name for name, reason in priced.bans.items() if reason == _FORCED}
        keepable = {name for name, cost in priced.keep.items() if cost is not None}
        allowed = self.allow_matmul_recompute
        return fit(graph, choice, limit, keepable=keepable, forced=forced, allow_products=allowed)


@dataclass(frozen=True)
class Prices:
    """Per candidate: the cost of keeping it (``None``: cannot be), the cost of computing it again (``None``: must not
    be), why not, and what could not be done as the policy asked."""

    keep: dict[str, int | None]
    again: dict[str, int | None]
    bans: dict[str, str]
    notes: tuple[str, ...] = ()


_FORCED = "forced: the policy saves it"


def prices(graph: Graph, policy: Policy | None = None, allow_products: bool = False) -> Prices:
    """The stated costs of every candidate, after the bans and the policy."""
    keep: dict[str, int | None] = {}
    again: dict[str, int | None] = {}
    bans: dict[str, str] = {}
    notes = []
    for name in graph.candidates:
        node = graph.nodes[name]
        keep[name], again[name] = keep_cost(graph, name), recompute_cost(graph, name)
        reason = ban(graph, name)
        if policy is not None and keep[name] is not None and name not in graph.output_index:
            wish = policy(node)
            if wish not in (None, "save", "recompute"):
                raise ValueError(f'the policy answered {wish!r} for {name}; it may answer "save", "recompute" or None')
            if wish == "save":
                keep[name], reason = 0, _FORCED
            elif wish == "recompute":
                dear = product(node) if name in graph.forward else None
                if dear is None or allow_products:
                    keep[name], reason = None, None
                else:
                    notes.append(f"the policy wants {name} recomputed, but {dear}; allow_matmul_recompute is off")
        if reason is not None:
            bans[name] = reason
            again[name] = None
    return Prices(keep, again, bans, tuple(notes))


def _obstacle(graph: Graph, priced: Prices, name: str) -> str:
    """Why a value on an infinite path can be neither kept nor made again."""
    found = []
    if priced.keep[name] is None:
        found.append("not captured as such" if graph.nodes[name].is_tensor else f"a {graph.nodes[name].dtype}")
    if priced.again[name] is None:
        found.append(priced.bans[name])
    return ", ".join(found)


def _reason(graph: Graph, priced: Prices, name: str) -> str:
    """Why the cut keeps a value."""
    banned = priced.bans.get(name)
    if banned == _FORCED:
        return _FORCED
    source = graph.nodes[name].inputs[0]
    if banned is None and graph.nodes[name].op == "TupleGetItem" and source in priced.bans:
        banned = priced.bans[source]
    needed = f"needed by {reader(graph, name)}"
    if banned is not None:
        return f"cut edge: {banned}, not computed again; {needed}"
    if name in graph.side:
        return f"cut edge: only the gradient needs it, and it is smaller than what it is made from; {needed}"
    return f"cut edge: no larger than what it is computed from, and nearer to its reader; {needed}"
