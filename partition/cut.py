"""Partitioning: a joint function and a strategy -> a plan, a forward function and a backward function."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from autodiff import Body
from autodiff.ir import Function
from partition.as_read import saved_as_read
from partition.coloring import RecomputeAll, SaveAll
from partition.graph import build_graph
from partition.joined_behind import with_joined_behind
from partition.kept_casts import with_kept_casts
from partition.min_cut import MinCut
from partition.plan import Plan, make_plan
from partition.rows_again import with_rows_again
from partition.short_chains import with_short_chains
from partition.split import split
from partition.strategy import Strategy

__all__ = ["STRATEGIES", "Partitioned", "partition", "resolve"]

#: The strategies that go by a name.
STRATEGIES = {"min_cut": MinCut, "save_all": SaveAll, "recompute_all": RecomputeAll}


@dataclass(frozen=True)
class Partitioned:
    """A joint function cut in two.

    ``forward``: all primals -> outputs, then captures in plan order. ``backward``: saved primals, saved outputs,
    captures, all grad_outs -> gradients.
    """

    plan: Plan
    forward: Function
    backward: Function


def partition(
    joint: Function | Body,
    *,
    num_primals: int,
    num_outputs: int,
    strategy: str | Strategy = "min_cut",
    module_paths: Mapping[str, str] | None = None,
    as_read: bool = False,
    cast_once: int = 0,
    rows_again: bool = False,
    short_chains: bool = False,
    joined_behind: bool = False,
    again: Mapping[int, bool] = MappingProxyType({}),
    owners: Mapping[str, str] = MappingProxyType({}),
    apart: Collection[int] = (),
) -> Partitioned:
    """Cut a joint function into a forward and a backward.

    Args:
        joint: in flat form (see :mod:`autodiff.ir`), or its body, which is edited; parameters are ``num_primals``
            primals, then grad_outs; results are ``num_outputs`` forward outputs, then gradients.
        strategy: ``"min_cut"``, ``"save_all"``, ``"recompute_all"``, or an object such as
            :class:`partition.MinCut` with its options.
        module_paths: for the plan's table, where in the user's module a variable comes from, by variable name.
        as_read: whether values are saved in the order in which they are read, see :mod:`partition.as_read`: for
            kernels that read nothing in another order than it is stored in.
        cast_once: of how many primals, the first ones, casts are saved, see :mod:`partition.kept_casts`.
        rows_again: whether products are saved in the place of softmaxes, see :mod:`partition.rows_again`.
        short_chains: whether what would be computed from one block to the next is saved, see
            :mod:`partition.short_chains`.
        joined_behind: whether what the backward would join of results is saved, see :mod:`partition.joined_behind`.
        again: indices of primals that the backward reads as they are then, and whether autograd saves views of one.
        owners: by variable name, the operation that a value is a part of, see :mod:`partition.read_again`.
        apart: indices of outputs that their owner may change: what the backward reads of one is a capture.

    Raises:
        ValueError: unknown strategy; counts that do not fit; a forward output that depends on a grad_out; a random
            draw inside the joint function.
        TypeError: a strategy that is neither a name nor has a ``choose``.
    """
    chosen = resolve(strategy)
    told = {"as_read": as_read, "again": again, "owners": owners, "apart": apart}
    graph = build_graph(joint, num_primals, num_outputs, module_paths, **told)
    choice = chosen.choose(graph)
    if rows_again:
        choice = with_rows_again(graph, choice)
    if short_chains:
        choice = with_short_chains(graph, choice)
    if cast_once:
        choice = with_kept_casts(graph, choice, cast_once)
    if joined_behind:
        choice = with_joined_behind(graph, choice)
    if as_read:
        choice = saved_as_read(graph, choice)
    plan, captured = make_plan(graph, chosen.name, choice, save_all=SaveAll().choose(graph), as_read=as_read)
    forward, backward = split(graph, captured)
    return Partitioned(plan, forward, backward)


def resolve(strategy: str | Strategy) -> Strategy:
    """The strategy object of a name; an object passes through."""
    if isinstance(strategy, str):
        if strategy not in STRATEGIES:
            names = ", ".join(f'"{name}"' for name in STRATEGIES)
            raise ValueError(f'unknown partition strategy "{strategy}"; choose {names}, or pass a strategy object')
        return STRATEGIES[strategy]()
    if not callable(getattr(strategy, "choose", None)):
        raise TypeError(f"a partition strategy is a name or an object with a choose method, got {strategy!r}")
    return strategy
