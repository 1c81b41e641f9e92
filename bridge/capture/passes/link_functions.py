"""Links of own Functions: a training-IR graph with the marks of :mod:`bridge.capture.own_functions` → one in which what
comes after a Function reads its outputs through ``with_gradient``, in place.

The marks of a Function stand around what it did, in order: where its forward begins, tangents, backward, outputs. A
value of in between that is read elsewhere would be one that autograd follows in the graph and not in eager.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from torch import fx

from bridge.base.errors import Unsupported, user_line
from bridge.capture.own_functions import FUNCTION, OWN, TANGENT, WITH_GRADIENT, Use

__all__ = ["link_functions"]


def link_functions(graph: fx.Graph, uses: Sequence[Use], tag: Callable[[fx.Node], None]) -> list[Unsupported]:
    """Rewrites one graph."""
    problems: list[Unsupported] = []
    for begin in [node for node in graph.nodes if node.target is FUNCTION]:
        problem = _link(graph, begin, uses[begin.args[0]].again, tag)
        if problem is not None:
            where = user_line(begin.meta.get("stack_trace")) or "forward"
            problems.append(Unsupported(f"autograd.Function {uses[begin.args[0]].name}", where, problem))
        graph.erase_node(begin)
    return problems


def _link(graph: fx.Graph, begin: fx.Node, again: str, tag: Callable[[fx.Node], None]) -> str | None:
    """Why one Function cannot be linked, or ``None``."""
    inside, outputs = _parts(begin)
    if not outputs:
        return "its outputs are in another region of autocast or of a grad mode than its forward"
    ours = {*inside, *outputs}
    of = {mark.args[0]: mark for mark in outputs}
    if not all(output in inside for output in of):
        return "returns a tensor that was there before it"
    backward = False
    for node in inside:
        backward = backward or node.target is TANGENT
        node.meta[OWN] = f"{begin.args[0]}:{'backward' if backward else 'forward'}:{again}"
        if backward:
            tag(node)
    for output, mark in of.items():
        for user in [user for user in output.users if user not in ours]:
            user.replace_input_with(output, mark)
    if any(user not in ours for node in inside for user in node.users):
        return "a tensor that its forward or backward makes is used outside of it"
    return None


def _parts(begin: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """What a Function did, and the marks of its outputs."""
    inside: list[fx.Node] = []
    outputs: list[fx.Node] = []
    node = begin.next
    while node.op in ("call_function", "get_attr") and node.target is not FUNCTION:
        if node.target is WITH_GRADIENT:
            outputs.append(node)
        elif outputs and node.target is not operator.getitem:
            break
        else:
            inside.append(node)
        node = node.next
    return inside, outputs
