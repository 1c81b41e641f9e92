"""Simplification: a function -> the same function after small passes to a fixed point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from autodiff.body import Body, on_functions, rewrite
from autodiff.dropout import project
from autodiff.ir import Function
from autodiff.layout_propagation import sink_channel_permutes
from autodiff.products import share_sums
from autodiff.redundancy import common_subexpression_elimination, dead_code_elimination
from autodiff.reverse import undefined_gradients
from autodiff.zapp import deduplicate_views, join_pads, one_zapp, zapp_like, zero_zapp


@on_functions
def project_tuples(body: Body, since: int = 0) -> None:
    """Replaces field ``i`` of a known tuple by that field, and removes copies of variables. Safe: computes nothing."""
    rewrite(body, _PROJECT, since)


_PROJECT = {None: [project]}

PASSES: list[Callable[[Function], Function]] = [
    project_tuples,
    zapp_like,
    zero_zapp,
    one_zapp,
    undefined_gradients,
    join_pads,
    deduplicate_views,
    common_subexpression_elimination,
    dead_code_elimination,
]


@on_functions
def clean(body: Body, *, merge_casts: bool = True) -> None:
    """Applies :data:`PASSES` to a fixed point; after the first round they visit changed bindings only.

    ``merge_casts=False`` is for functions that will be differentiated, see :func:`common_subexpression_elimination`.

    Safe: each pass is. It ends: every pass removes bindings, or replaces one by a simpler operator or by one that reads
    further up, and none adds any but ``zapp_like`` and ``join_pads`` (which remove the replaced bindings for good). A
    parameter or another result may itself become a result, and a result may occur twice.
    """
    cse = common_subexpression_elimination
    until_fixpoint(body, [partial(cse, merge_casts=merge_casts) if apply is cse else apply for apply in PASSES])


def until_fixpoint(body: Body, passes: Sequence[Callable[..., object]], first: int = 0) -> None:
    """Applies passes in turn to a fixed point; each visits the bindings that changed since its last application.

    ``first``: the clock since when bindings count as changed at the start; 0: all do.
    """
    since = [first] * len(passes)
    while True:
        before = body.edits
        for index, apply in enumerate(passes):
            started = body.tick()
            apply(body, since=since[index])
            since[index] = started
        if body.edits == before:
            return


def clean_joint(joint: Function | Body) -> Function | Body:
    """Simplifies a joint function, adds gradients of convolutions in their memory order, shares sums of gradients."""
    return share_sums(clean(sink_channel_permutes(joint)))
