"""Unique names: a function -> the same with every variable findable by its name."""

from __future__ import annotations

from autodiff.body import Binding, Body, on_functions
from autodiff.rewrite import NameSupply

__all__ = ["unique_names"]


@on_functions
def unique_names(body: Body) -> None:
    """Renames variables whose name an earlier variable has: ``x``, ``x`` becomes ``x``, ``x_1``.

    Safe: names carry no meaning in Relax. Parameters come first, so that a binding gives way to a parameter;
    two parameters of one name are renamed too. Why: gradients, plans and captures refer to variables by name.
    """
    supply = NameSupply(body.names())
    used: set[str] = set()
    renamed: dict[Binding, str] = {}
    for binding in [*body.parameters(), *body.bindings]:
        if binding.name in used:
            renamed[binding] = supply.fresh(binding.name)
        used.add(binding.name)
    body.rename(renamed)
