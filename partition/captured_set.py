"""The captured set: a graph and a strategy's choice -> what the backward reads and what it computes itself."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
import tvm_ffi

from autodiff.extents import is_symbol, symbols_alive
from autodiff.ir import Expr, Var, substitute, used_vars
from partition.graph import Choice, JointGraph

__all__ = ["CapturedSet", "captured_set", "fingerprints"]


@dataclass(frozen=True)
class CapturedSet:
    """The values that the backward reads (``primals``, ``outputs``, ``captures``) and those it computes itself.

    ``computed`` are the bindings that do not depend on a grad_out and are still computed in the backward; ``extra``
    are the side bindings that the forward computes only for the sake of a capture. All in joint order.
    """

    primals: tuple[str, ...]
    outputs: tuple[str, ...]
    captures: tuple[str, ...]
    computed: tuple[str, ...]
    extra: tuple[str, ...]


def captured_set(graph: JointGraph, choice: Choice) -> CapturedSet:
    """Walk from what the backward requires until every path ends at a saved value, a parameter or a constant."""
    free = graph.free_outputs if choice.use_outputs else {}
    seen: set[str] = set()
    read: set[str] = set()
    stack = list(graph.required)
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        if graph.nodes[name].value is None or name in free or name in choice.saved:
            read.add(name)
        else:
            stack.extend(graph.nodes[name].inputs)
    captures = tuple(
        name for name in graph.nodes if name in read and name not in free and graph.nodes[name].value is not None
    )
    return CapturedSet(
        primals=tuple(name for name in graph.primals if name in read),
        outputs=tuple(name for name in free if name in read),
        captures=captures,
        computed=tuple(name for name in graph.nodes if name in seen and name not in read),
        extra=_side_work(graph, captures),
    )


def _side_work(graph: JointGraph, captures: tuple[str, ...]) -> tuple[str, ...]:
    wanted = {name for name in captures if name not in graph.forward}
    for name in reversed(graph.nodes):
        if name in wanted:
            wanted.update(read for read in graph.nodes[name].inputs if read in graph.side)
    return tuple(name for name in graph.nodes if name in wanted)


def fingerprints(graph: JointGraph) -> dict[str, int]:
    """A hash per value of the whole computation behind it; primals count by position.

    Two joint functions of one forward give their common values the same fingerprints, whatever the names.
    """
    found: dict[str, int] = {
        name: hash((index, tvm_ffi.structural_hash(graph.nodes[name].var.ty)))
        for index, name in enumerate(graph.primals)
    }
    for name, node in graph.nodes.items():
        if name in graph.forward or name in graph.side:
            found[name] = hash((_hash(node.value), *(found[read] for read in node.inputs)))
    return found


def _hash(value: Expr) -> int:
    """Of an expression, whatever its variables are called and whether they are results of the function."""
    plain = {var: Var("x", var.ty) for var in used_vars(value)}
    found = tvm_ffi.structural_hash(substitute(value, plain), map_free_vars=True)
    names = _symbols(value) if symbols_alive() else []
    return hash((found, *names)) if names else found


def _symbols(value: Expr) -> list[str]:
    """The names of the symbols in an expression, which its structure leaves out, in order."""
    names: list[str] = []
    tvm.relax.analysis.post_order_visit(
        value, lambda part: names.append(part.name) if isinstance(part, Var) and is_symbol(part) else None
    )
    return names
