"""Types that enter a function: module tensors, arguments, literals → those that Relax does not compute with."""

from __future__ import annotations

from bridge.aten.complex_value import PARTS
from bridge.aten.dims import ELEMENT_TYPES
from bridge.base.errors import Unsupported
from bridge.capture import Captured, where_is

__all__ = ["unknown_types"]


def unknown_types(captured: Captured) -> list[Unsupported]:
    """Tensors that enter the function and are of types that Relax does not compute with."""
    nodes = {node.name: node for node in captured.graph.nodes if node.op == "placeholder"}
    entering = [(spec.name, spec.name, spec.dtype) for spec in captured.module_tensors]
    entering += [(f"argument {index}", "forward", fake.dtype) for index, fake in enumerate(captured.arguments)]
    for name, value in captured.literals.items():
        where = next(filter(None, map(where_is, nodes[name].users)), captured.module_name)
        entering.append(("a tensor literal", where, value.dtype))
    return [
        Unsupported(what, at, f"values of type {t}") for what, at, t in entering if t not in (*ELEMENT_TYPES, *PARTS)
    ]
