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
from bridge.base.torch_internals import OpOverload, schema
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
    for node in inside:
        written = _written(node)
        while written in ours:
            written = _written(written)
        if written is None or any(user not in ours and _views(user) for user in written.users):
            continue
        for user in [user for user in node.users if user not in ours]:
            if _written(user) is node:
                user.replace_input_with(node, written)
                continue
            with graph.inserting_before(user):  # autograd follows nothing of what is in there now
                read = graph.call_function(WITH_GRADIENT, (written, None))
            read.meta.update(node.meta)
            user.replace_input_with(node, read)
    if any(user not in ours for node in inside for user in node.users):
        return "a tensor that its forward or backward makes is used outside of it"
    return None


def _written(node: fx.Node) -> fx.Node | None:
    """What an operator writes in place and returns."""
    if not isinstance(node.target, OpOverload) or not (returned := schema(node.target).returns):
        return None
    info = returned[0].alias_info
    return node.args[0] if info is not None and info.is_write and isinstance(node.args[0], fx.Node) else None


def _views(node: fx.Node) -> bool:
    """Whether an operator returns a view."""
    returned = schema(node.target).returns if isinstance(node.target, OpOverload) else ()
    return any(each.alias_info is not None and not each.alias_info.is_write for each in returned)


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
