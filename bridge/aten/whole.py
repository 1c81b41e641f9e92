"""Preserved operators → a library call: torch's own kernel forward, its own derivative backward.

The library call carries the operator's name and its arguments as text, with the tensors' places marked; see
``operator`` in :mod:`autodiff.library`. The backward computes the operator again, so this is for operators that are
rare or cheap beside what surrounds them.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import fx

from autodiff.extents import Extent
from autodiff.ir import Expr
from bridge.aten.complex_value import Complex, joined_form
from bridge.aten.dims import lies_elsewhere
from bridge.aten.registry import UnsupportedUse, converts
from bridge.base.torch_internals import OpOverload, aten, pytree
from bridge.capture import WHOLE, WHOLE_FUNCTIONS, TensorForm

__all__ = ["describe", "whole"]


_REFLECTIONS = (aten.linalg_householder_product.default, aten.ormqr.default)
_NORMS = {
    aten.linalg_vector_norm.default: lambda ord=2, *_: ord,
    aten.norm.Scalar: lambda p=2: p,
    aten.dist.default: lambda other, p=2: p,
}
"""Operators whose order may be 0, and how their arguments after the first say it."""


def describe(args: tuple, kwargs: dict[str, Any]) -> tuple[str, list[Any]]:
    """``(args, kwargs)`` as JSON in which ``{"$tensor": i}`` stands for the i-th of the returned tensors and sizes that
    vary; for a complex one, which the library takes with its parts side by side, ``{"$complex": i}``."""
    tensors: list[Any] = []

    def written(leaf: Any) -> Any:
        if isinstance(leaf, Expr | Extent):
            tensors.append(leaf)
            return {"$tensor": len(tensors) - 1}
        if isinstance(leaf, Complex):
            tensors.append(leaf)
            return {"$complex": len(tensors) - 1}
        if isinstance(leaf, complex):
            return {"$number": [leaf.real, leaf.imag]}
        if isinstance(leaf, torch.dtype):
            return {"$dtype": str(leaf).removeprefix("torch.")}
        return leaf

    text = json.dumps(pytree.tree_map(written, [list(args), kwargs]), sort_keys=True)
    return text, tensors


def _tensors(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node takes, or what stands for a node and has its arguments."""
    leaves = [each for each in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(each, fx.Node)]
    return [each for each in leaves if isinstance(each.meta.get("val"), torch.Tensor | TensorForm)]


def _refuse_without_gradient(node: fx.Node) -> None:
    """Where torch's formula gives no gradient at all, which a program cannot return."""
    if node.target in _REFLECTIONS and any(0 in each.meta["val"].shape for each in _tensors(node)):
        raise UnsupportedUse("Householder reflections of nothing: eager has no gradient there, not even zeros")
    if node.target in _NORMS and _NORMS[node.target](*node.args[1:]) == 0:
        raise UnsupportedUse("a norm of order 0: eager has no gradient there, not even zeros", "write (x != 0).sum()")


@converts(*WHOLE, *WHOLE_FUNCTIONS)
def whole(importer, node, *args, **kwargs):
    _refuse_without_gradient(node)
    if any(map(lies_elsewhere, _tensors(node))):
        raise UnsupportedUse(f"{node.target} on the host beside a GPU's tensors")
    name = str(node.target)
    if node.target in WHOLE_FUNCTIONS:
        computed = WHOLE_FUNCTIONS[node.target]
        if isinstance(computed.operator, OpOverload):  # else it is ours alone
            name, (args, kwargs) = str(computed.operator), computed.call(args)
    text, tensors = describe(args, kwargs)
    tensors = [importer.whole_of(tensor) for tensor in tensors]
    forms = fx.node.map_aggregate(node.meta["val"], joined_form)
    made = importer.library("operator", [name, text, *tensors], forms)
    if not isinstance(forms, tuple | list):
        return made
    return tuple(importer.item(made, index) for index in range(len(forms)))
