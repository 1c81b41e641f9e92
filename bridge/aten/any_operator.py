"""Functional operators: an overload without a conversion → whether torch's own kernel may stand for it in a program.

A program runs torch's kernel on the operator's very arguments and, backward, autograd's formula of the operator itself:
the bits are eager's. That is exact for an operator whose results are new tensors, made of its arguments alone. What its
schema or its tags say otherwise, and what reads memory instead of numbers, is refused by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autodiff.extents import Extent
from bridge.aten.registry import UnsupportedUse
from bridge.base.torch_internals import OpOverload, pytree, schema
from bridge.base.torch_shapes import SYMBOLIC
from bridge.capture import TensorForm

__all__ = ["check_functional"]

_TAGS = {
    torch.Tag.nondeterministic_seeded: "a random draw whose distribution no graph holds",
    torch.Tag.dynamic_output_shape: "the shape of what comes out depends on numbers",
    torch.Tag.data_dependent_output: "what comes out is a number that Python reads",
    torch.Tag.inplace_view: "gives a tensor another shape in place",
}

_MEMORY = (
    "as_strided",
    "empty",
    "from_file",
    "new_empty",
    "resize",
    "set",
    "_copy_from",
    "_empty",
    "_efficientzerotensor",
    "_lazy_clone",
    "_mkldnn",
    "_reshape_alias",
    "_resize",
    "to_mkldnn",
)
"""How the names of operators begin that read or make memory as it lies, or leave it without numbers."""

_EFFECTS = ("assert", "sym_constrain", "_make_dep_token")
"""What the names of operators contain whose results are not what they are for."""

_PLAIN = (bool, int, float, complex, str, torch.dtype, type(None), Extent, *SYMBOLIC)


def check_functional(node: fx.Node) -> None:
    """Raises :class:`UnsupportedUse` unless a program may run the operator that ``node`` calls by torch's kernel."""
    target = node.target
    if not isinstance(target, OpOverload):
        raise UnsupportedUse("a call of something that is no operator of torch's")
    its = schema(target)
    if its.is_mutable:
        raise UnsupportedUse("writes into its arguments")
    if any(each.alias_info is not None for each in (*its.arguments, *its.returns)):
        raise UnsupportedUse("returns a view of its arguments that has no functional form")
    for tag, reason in _TAGS.items():
        if tag in target.tags:
            raise UnsupportedUse(reason)
    name = its.name.partition("::")[2]
    if target.namespace == "aten" and (name.startswith(_MEMORY) or any(part in name for part in _EFFECTS)):
        raise UnsupportedUse("is about memory, or about what it does beside its result")
    if "sparse" in name:  # where sizes vary, a form of what it makes does not know its layout
        raise UnsupportedUse("makes a tensor of layout torch.sparse_coo, or takes one")
    given = fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta.get("val"))
    for value in pytree.tree_leaves(given):
        _check_value("takes", value)
    for value in _results(node.meta.get("val")):
        _check_value("makes", value)


def _results(made: Any) -> list[Any]:
    """The results, each a tensor. :class:`UnsupportedUse` for any other."""
    fields = list(made) if isinstance(made, tuple | list) else [made]
    if not fields or not all(isinstance(field, torch.Tensor | TensorForm) for field in fields):
        raise UnsupportedUse("returns something else than tensors")
    return fields


def _check_value(verb: str, value: Any) -> None:
    if isinstance(value, torch.Tensor | TensorForm):
        if value.dtype == torch.complex32:
            raise UnsupportedUse(f"{verb} complex numbers of half precision")
        if isinstance(value, torch.Tensor) and (value.layout is not torch.strided or value.is_quantized):
            raise UnsupportedUse(f"{verb} a tensor of layout {value.layout} and type {value.dtype}")
    elif not isinstance(value, _PLAIN):
        raise UnsupportedUse(f"{verb} a value of type {type(value).__name__}")
