"""Provenance: a variable of any stage → the ATen operator, the module and the user's line that it comes from.

Variables of the forward are named after the traced graph's nodes (``gelu``, ``linear_4__2``), parameters after the
module's tensors, masks after their draws, and every node knows its module path and its line. Passes hand names on.
What a pass adds under a name of its own (``layer_norm_mean``) belongs to the node that it is computed for. A variable
of the backward (``bw_12``) belongs to the forward operation whose values it uses, or, where it uses none, to what it
is computed from; ``grad_<parameter>`` to the parameter's reader.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from autodiff.ir import Function, bindings, used_vars
from bridge.aten import Imported
from bridge.capture import Captured, where_is

__all__ = ["Origin", "module_path", "origins"]

_GRADIENT = "grad_"
_MASK = re.compile(r"mask_\d+")


@dataclass(frozen=True)
class Origin:
    """Where a value comes from; each field is empty where it is not known.

    Attributes:
        aten: the operator, as in ``aten.gelu.default``.
        module: the dotted path in the module that was lowered.
        line: the user's line, ``file:line: code``.
        node: the traced graph's node.
    """

    aten: str = ""
    module: str = ""
    line: str = ""
    node: str = ""

    def __str__(self) -> str:
        return "  ".join(part for part in (self.module, self.aten, self.line) if part)


def module_path(node: fx.Node) -> str:
    """The dotted path of the innermost module whose forward made a node; empty for the module itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0] if stack else ""


def _origin(node: fx.Node) -> Origin:
    return Origin(str(node.target), module_path(node), where_is(node) or "", node.name)


def origins(captured: Captured, imported: Imported, functions: Iterable[Function]) -> dict[str, Origin]:
    """The origin of every named value of these functions, as far as it is known.

    ``functions``: in the order of the lowering; variables of the forward first appear before the joint function.
    """
    known, rank = _named(captured, imported)
    for function in functions:
        body = [(var.name, [used.name for used in used_vars(value)]) for var, value in bindings(function)]
        unknown = {name for name, _ in body if name not in known}
        backward = {name for name in unknown if name.startswith((_GRADIENT, "bw"))}
        if unknown - backward:
            _forward(body, unknown - backward, known, rank)
        _backward([(name, sources) for name, sources in body if name in backward], known, rank)
    return known


def _named(captured: Captured, imported: Imported) -> tuple[dict[str, Origin], dict[str, int]]:
    """Nodes, parameters and masks; and the position in the graph of what each belongs to."""
    known: dict[str, Origin] = {}
    rank: dict[str, int] = {}

    def add(name: str, node: fx.Node, position: int) -> None:
        known.setdefault(name, _origin(node))
        rank.setdefault(name, position)

    position_of = {node: position for position, node in enumerate(captured.graph.nodes)}
    names = [_parameter(spec.name) for spec in captured.module_tensors]
    for node, position in position_of.items():
        if node.op == "call_function":
            add(node.name, node, position)
        reader = next((user for user in node.users if user.op == "call_function"), None)
        if node.op == "placeholder" and reader is not None and node.name in captured.placeholders:
            index = captured.placeholders[node.name]
            add(names[index] if index < len(names) else node.name, reader, position_of[reader])
    drawn = {index: name for name, index in captured.draw_of.items()}
    nodes = {node.name: node for node in position_of}
    inputs = {f"mask_{k}": draw for k, draw in enumerate(imported.dropout_draws)}
    inputs.update((f"draw_{draw}", draw) for draw in imported.input_draws)
    for name, draw in inputs.items():
        if draw in drawn:
            node = nodes[drawn[draw]]
            add(name, node, position_of[node])
    return known, rank


def _forward(
    body: list[tuple[str, list[str]]], unknown: set[str], known: dict[str, Origin], rank: dict[str, int]
) -> None:
    """``linear__2`` is the node's; what else is new belongs to what it is computed for: its readers, backwards."""
    for name in unknown:
        mask = _MASK.match(name)
        owner = name.split("__")[0] if name.split("__")[0] in rank else mask.group() if mask else ""
        if owner in known and owner in rank:
            known[name], rank[name] = known[owner], rank[owner]
    for name, sources in reversed(body):
        if name in known:
            for source in sources:
                if source in unknown and source not in known:
                    known[source] = known[name]
                    if name in rank:  # else a value of the backward reads it, which has no place in the graph
                        rank[source] = rank[name]


def _backward(body: list[tuple[str, list[str]]], known: dict[str, Origin], rank: dict[str, int]) -> None:
    depth: dict[str, int] = {}  # like rank, for values of the backward
    for name, sources in body:
        direct = [source for source in sources if source in rank]
        derived = [source for source in sources if source in depth]
        if direct:  # the latest of several forward values is the one that the rule belongs to
            owner = max(direct, key=rank.__getitem__)
            depth[name] = rank[owner]
        elif derived:  # the backward runs against the forward: the earliest is where it has arrived
            owner = min(derived, key=depth.__getitem__)
            depth[name] = depth[owner]
        else:
            owner = ""
        parameter = name[len(_GRADIENT) :] if name.startswith(_GRADIENT) else ""
        if parameter in known:
            owner = parameter
        if owner in known:
            known[name] = known[owner]


def _parameter(path: str) -> str:
    return "p_" + "".join(c if c.isalnum() else "_" for c in path)
