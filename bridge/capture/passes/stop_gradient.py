"""Stop-gradient: ``detach`` and grad modes of a training graph → ``tvm_dispatch::stop_gradient``, in place.

A functional graph has no grad modes. So the operands of an operator that ran under ``no_grad`` pass through
``tvm_dispatch::stop_gradient``, a custom operator that stays whole; ``detach`` becomes the same operator.
``stop_gradient`` copies, and ``detach`` is an alias. If autograd does not track the tensor, the alias stays an alias;
if a write would show the difference, the module is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from bridge.base.errors import Unsupported
from bridge.base.torch_internals import OpOverload, aten, implements_composite
from bridge.capture.custom_functions import FUNCTION, OWN, TANGENT, WITH_GRADIENT, Use
from bridge.capture.inplace_rules import PARAMETER_HINT
from bridge.capture.passes.alias_analysis import (
    MEMORY,
    OVERWRITTEN,
    STOP_GRADIENT,
    STOPPED,
    WHERE,
    Aliases,
    aliased,
    is_detach,
    is_view,
    memory_at,
    refused_at,
    told,
    write_through_views,
    written,
)
from bridge.capture.passes.decompositions import keep_layers_whole

PART_OF = "part of"
"""The key in ``meta`` of the operator that autograd differentiates by one formula."""


def prepare(graph: fx.Graph, requires_grad: Callable[[fx.Node], bool]) -> list[Unsupported]:
    """Expresses grad modes, and effects that functionalization would get wrong, by nodes, in place → refusals."""
    problems = _parameters_written_first(graph, requires_grad)
    _detach_stopped(graph)
    keep_layers_whole(graph)
    _write_untracked(graph, requires_grad)
    if any(map(is_detach, graph.nodes)):
        _stop_unread(graph, requires_grad)
        hidden = _stop_gradients(graph, requires_grad)
        problems += [] if problems else hidden
    problems += write_through_views(graph)
    problems += _wrong_in_torch(graph, requires_grad)
    for node in graph.nodes:
        if node.op == "call_function" and not implements_composite(node.target):
            node.meta[PART_OF] = node.name
    graph.lint()
    return problems


def _parameters_written_first(graph: fx.Graph, requires_grad: Callable[[fx.Node], bool]) -> list[Unsupported]:
    """Parameters written under ``no_grad`` (clipped, normalized) → writes to a copy, which later nodes read with the
    parameter's gradient. Refuses a tracked use before the write."""
    leaves = dict.fromkeys(node for node in graph.nodes if node.op == "placeholder" and requires_grad(node))
    for node in graph.nodes:
        for leaf in leaves.keys() & written(node):  # the operator returns it
            node.replace_all_uses_with(leaf)
    aliases, problems = Aliases(graph.nodes, requires_grad), []
    writes_of = aliases.writes()
    for leaf in leaves:
        if (writes := writes_of.get(leaf)) is None:
            continue
        names = aliases.class_of(leaf)
        unseen: set[fx.Node] = set()
        for node in names:  # aliases made by no_grad or detach, and their views
            if STOPPED in node.meta or is_detach(node) or aliased(node) in unseen:
                unseen.add(node)
        last = aliases.order[writes[-1]]
        kept = [
            user
            for node in names
            for user in node.users
            if node not in unseen and aliases.order[user] <= last and not (STOPPED in user.meta or is_detach(user))
        ]
        if kept and torch.is_grad_enabled():
            reason = "changes a parameter inside forward that autograd has followed into something before"
            problems.append(refused_at(writes[-1], reason, PARAMETER_HINT))
            continue
        later = {user for user in leaf.users if aliases.order[user] > last and user.op != "output"}
        _write_first(graph, leaf, writes[-1], later)
    return problems


def _write_first(graph: fx.Graph, leaf: fx.Node, last: fx.Node, later: set[fx.Node]) -> None:
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        copied = graph.call_function(STOP_GRADIENT, (leaf,))
    with graph.inserting_after(last):
        made = graph.call_function(WITH_GRADIENT, (copied, leaf))
    for node in (copied, made):
        node.meta.update(val=leaf.meta["val"].detach(), **{MEMORY: leaf.meta[MEMORY]})
    leaf.replace_all_uses_with(copied, delete_user_cb=lambda user: user not in (copied, made, *later))
    leaf.replace_all_uses_with(made, delete_user_cb=lambda user: user in later)


def mark_overwritten(graph: fx.Graph, names: Collection[str]) -> None:
    """Passes the memory of inputs through ``tvm_dispatch::overwritten`` after each write, in place."""
    writes_of = Aliases(graph.nodes, lambda node: False).writes() if names else {}
    for memory in [node for node in graph.nodes if node.op == "placeholder" and node.name in names]:
        places = writes_of.get(memory, [])
        places += [user for user in memory.users if user.target is WITH_GRADIENT and user.args[1] is memory]
        for place in places:
            now = place if place.target is WITH_GRADIENT else memory
            with graph.inserting_after(place):
                made = graph.call_function(OVERWRITTEN, (now, memory.name))
            made.meta.update(told(place), val=now.meta["val"], **{MEMORY: memory_at(now)})
            if now is memory:
                with graph.inserting_after(made):
                    graph.call_function(aten.copy_.default, (memory, made)).meta.update(made.meta)
            else:
                now.replace_all_uses_with(made, delete_user_cb=lambda user, made=made: user is not made)


def _detach_stopped(graph: fx.Graph) -> None:
    """Passes the operands of operators under ``no_grad`` through ``detach``; for views, the results."""
    for node in [node for node in graph.nodes if STOPPED in node.meta and isinstance(node.target, OpOverload)]:
        if not is_view(node):
            _detach_reads(graph, node)
            continue
        items = isinstance(node.meta.get("val"), tuple | list)
        for result in list(node.users) if items else [node]:
            with graph.inserting_after(result):
                own = _detached(graph, result)
            if own is not result:
                result.replace_all_uses_with(own, delete_user_cb=lambda user, own=own: user is not own)


def _wrong_in_torch(graph: fx.Graph, requires_grad: Callable[[fx.Node], bool]) -> list[Unsupported]:
    """Refuses the user's ``as_strided_scatter`` if a gradient flows through its input.

    torch's derivative wrongly passes the gradient on where the source was written. The bridge's does not, because
    functionalization makes the same operator from in-place writes, whose derivative is right in eager.
    """
    found = [node for node in graph.nodes if node.target is aten.as_strided_scatter.default]
    if not found:
        return []
    aliases = Aliases(graph.nodes, requires_grad)
    reason = "torch's own derivative of it is wrong where the source is written, and ours would differ from eager's"
    hint = "write through x.as_strided(...)"
    return [refused_at(node, reason, hint) for node in found if aliases.followed(node.args[0])]


def _stop_unread(graph: fx.Graph, requires_grad: Callable[[fx.Node], bool]) -> None:
    """Stops the gradient of values written under a detached name that nothing reads (``buffer.data.lerp_(x, 0.1)``).

    In eager it ends at that name: the memory's other names, read later, stay untracked.
    """
    aliases = Aliases(graph.nodes, requires_grad)
    names = Aliases(graph.nodes, requires_grad, cut=is_detach)
    for node in [node for node in graph.nodes if is_detach(node) and aliases.followed(node)]:
        members = names.class_of(node)
        users = dict.fromkeys(user for member in members for user in member.users)
        if not users.keys() - set(members):
            for write in filter(written, users):
                _detach_reads(graph, write, STOP_GRADIENT)  # a copy: the tensor read may be written as well


def _stop_gradients(graph: fx.Graph, requires_grad: Callable[[fx.Node], bool]) -> list[Unsupported]:
    """``detach`` of a tracked tensor → ``stop_gradient``; other ``detach`` → its argument. Refuses a ``detach`` whose
    memory is written and read under both names."""
    aliases = Aliases(graph.nodes, requires_grad)
    stopped = Aliases(graph.nodes, requires_grad, cut=lambda node: is_detach(node) and aliases.followed(node))
    problems, writes = [], stopped.writes()
    for node in [node for node in graph.nodes if is_detach(node)]:
        source = node.args[0]
        if not aliases.followed(node):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            continue
        node.target = STOP_GRADIENT
        later = [
            (other, [each for each in writes.get(stopped.root[one], ()) if stopped.order[each] > stopped.order[node]])
            for one, other in ((node, source), (source, node))
        ]
        if any(found and stopped.used_after(other, found[0]) for other, found in later):
            where = node.meta.get(WHERE, "a line that is not known")
            reason = "memory that is written in place is seen by autograd and, detached, under another name"
            problems.append(Unsupported("detach", where, reason, "clone first"))
    return problems


def _detach_reads(graph: fx.Graph, node: fx.Node, by: OpOverload = aten.detach.default) -> None:
    """Passes an operator's operands through ``detach``, or another operator, but for the tensors that it writes."""
    targets = written(node)
    with graph.inserting_before(node):
        seen = {each: each if each in targets else _detached(graph, each, by) for each in node.all_input_nodes}
    node.args = fx.map_arg(node.args, seen.__getitem__)
    node.kwargs = fx.map_arg(node.kwargs, seen.__getitem__)


def _detached(graph: fx.Graph, value: Any, by: OpOverload = aten.detach.default) -> Any:
    if not isinstance(value, fx.Node) or not _is_float(value.meta.get("val")):
        return value
    made = graph.call_function(by, (value,))
    made.meta = dict(value.meta)
    return made


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


# Untracked writes: under ``no_grad`` or through ``detach``, into memory that autograd tracks → the new numbers with the
# gradient of the tensor before the write, as in eager, where autograd does not see them.


def _write_untracked(graph: fx.Graph, requires_grad: Callable[[fx.Node], bool]) -> None:
    """``x.clamp_(…)`` under ``no_grad``, and ``x.detach().clamp_(…)`` → ``x.copy_(with_gradient(now, x))``, in place;
    ``now`` is ``x.detach().clone().clamp_(…)``."""
    if not any(STOPPED in node.meta or is_detach(node) for node in graph.nodes):
        return
    aliases = Aliases(graph.nodes, requires_grad)
    for node in list(graph.nodes):
        target, *more = written(node) or (None,)
        if target is None or more or not aliases.followed(_tracked(target)):
            continue
        others = [each for each in node.all_input_nodes if each is not target and each in aliases.order]
        if STOPPED in node.meta or (is_detach(target) and not any(map(aliases.followed, others))):
            _write_through(graph, node, target)


def _tracked(target: fx.Node) -> fx.Node:
    return target.args[0] if is_detach(target) else target


def _write_through(graph: fx.Graph, node: fx.Node, target: fx.Node) -> None:
    x, is_hidden = _tracked(target), is_detach(target)
    with graph.inserting_before(node):
        before = _detached(graph, x)
        numbers = graph.call_function(aten.clone.default, (before,))
    node.replace_input_with(target, numbers)
    with graph.inserting_after(node):
        through = graph.call_function(WITH_GRADIENT, (numbers, x))
    with graph.inserting_after(through):
        copied = graph.call_function(aten.copy_.default, (x, through))
    with x.meta["val"].fake_mode:
        numbers.meta.update(told(node), val=torch.empty_like(x.meta["val"]))
    through.meta.update(numbers.meta)
    copied.meta.update(told(node), val=x.meta["val"], **{MEMORY: memory_at(x)})
    if not is_hidden:
        node.replace_all_uses_with(x)
        return
    with graph.inserting_after(copied):
        after = _detached(graph, x)
    node.replace_all_uses_with(after)
    place = {each: position for position, each in enumerate(graph.nodes)}
    for user in [each for each in target.users if place[each] > place[after]]:
        user.replace_input_with(target, after)


# Links of custom autograd Functions: a training graph with the marks of :mod:`bridge.capture.custom_functions` → nodes
# after a Function read its outputs through ``with_gradient``, in place.
#
# A Function's marks are in order: the start of its forward, tangents, backward, outputs. A value between the marks that
# is used outside would be tracked by autograd in the graph, but not in eager.


def link_functions(graph: fx.Graph, uses: Sequence[Use]) -> list[Unsupported]:
    """Links the Functions of a training graph, in place → refusals."""
    problems: list[Unsupported] = []
    for begin in [node for node in graph.nodes if node.target is FUNCTION]:
        problem = _link(graph, begin, uses[begin.args[0]].again)
        if problem is not None:
            where = begin.meta.get(WHERE, "forward")
            problems.append(Unsupported(f"autograd.Function {uses[begin.args[0]].name}", where, problem))
        graph.erase_node(begin)
    return problems


def _link(graph: fx.Graph, begin: fx.Node, again: str) -> str | None:
    """Links one Function → the reason why it cannot be linked, or ``None``."""
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
    for output, mark in of.items():
        for user in [user for user in output.users if user not in ours]:
            user.replace_input_with(output, mark)
    for node in inside:
        target = _written(node)
        while target in ours:
            target = _written(target)
        if target is None or any(user not in ours and is_view(user) for user in target.users):
            continue
        for user in [user for user in node.users if user not in ours]:
            if _written(user) is node:
                user.replace_input_with(node, target)
                continue
            with graph.inserting_before(user):  # autograd does not track the written numbers
                read = graph.call_function(WITH_GRADIENT, (target, None))
            read.meta.update(node.meta)
            user.replace_input_with(node, read)
    outside = [node for node in inside if any(user not in ours for user in node.users)]
    if not all(_decides(node) for node in outside):
        return "a tensor that its forward or backward makes is used outside of it"
    return None


def _decides(node: fx.Node) -> bool:
    """Whether a value of a Function is a new boolean or integer, by which forward decides: the call alone reads it."""
    value, is_new = node.meta.get("val"), not is_view(node) and _written(node) is None
    is_read = all(user.op == "output" for user in node.users) and node.meta[OWN].split(":")[1] == "forward"
    return is_new and is_read and isinstance(value, torch.Tensor) and not _is_float(value)


def _written(node: fx.Node) -> fx.Node | None:
    """The argument that an operator writes in place and returns, or ``None``."""
    source = aliased(node)
    return source if source in written(node) else None


def _parts(begin: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The nodes of a Function, and the marks of its outputs."""
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
