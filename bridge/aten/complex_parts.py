"""Conversion of nodes with complex operands or results: arithmetic on the parts, part by part, or torch's kernel.

A node is converted in the first of three ways that knows it: by a rule of its own
(:mod:`bridge.aten.complex_arithmetic`); as the real operator on each of the parts, where it is linear and treats them
alike, or only moves elements; by torch's kernel on complex views of the joined parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from bridge.aten.any_operator import check_functional, whole
from bridge.aten.complex_arithmetic import COMPLEX, SEES_COMPLEX, multiplied
from bridge.aten.complex_value import Complex, as_complex, is_complex_form, part_form, separated
from bridge.aten.registry import CONVERSIONS
from bridge.base.torch_internals import aten
from bridge.capture import STOP_GRADIENT

__all__ = ["convert_complex", "is_complex"]

_PART_BY_PART = {
    *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.view_copy.default),
    *(aten.squeeze.dims, aten.squeeze.dim, aten.squeeze.default, aten.unsqueeze.default, aten.expand.default),
    *(aten.permute.default, aten.permute_copy.default, aten.transpose.int, aten.t.default, aten.narrow_copy.default),
    *(aten.slice.Tensor, aten.select.int, aten.split_with_sizes.default, aten.split.Tensor, aten.unbind.int),
    *(aten.flip.default, aten.repeat.default, aten.roll.default, aten.clone.default, aten.alias.default),
    *(aten.detach.default, aten.lift_fresh_copy.default, aten.unfold.default, aten.diagonal.default),
    *(aten.diagonal_copy.default, aten.unbind_copy.int, aten.as_strided.default, aten.as_strided_copy.default),
    *(aten.tril.default, aten.triu.default, aten.neg.default, aten.positive.default, aten._neg_view.default),
    *(aten.sum.dim_IntList, aten.sum.default, aten.cumsum.default),
    *(aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_select.default, aten.gather.default),
    *(aten.im2col.default, aten.col2im.default),
    *(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default),
    *(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default),
    STOP_GRADIENT,
}
"""What does the same with the real and the imaginary part of its first operand."""

_ALL_OPERANDS = {
    *(aten.cat.default, aten.stack.default, aten.where.self, aten.slice_scatter.default, aten.select_scatter.default),
    *(aten.index_put.default, aten._unsafe_index_put.default, aten.index_add.default, aten.index_copy.default),
    *(aten.scatter.src, aten.scatter_add.default, aten.diagonal_scatter.default, aten.as_strided_scatter.default),
    *(aten.constant_pad_nd.default, aten.masked_fill.Scalar, aten.scatter.value),
}
"""The same, of several operands: real ones among them, and numbers, are complex ones without an imaginary part."""

_NUMBERS = {aten.constant_pad_nd.default: 2, aten.masked_fill.Scalar: 2, aten.scatter.value: 3}
"""Which argument is a number to write."""

_PRODUCTS = {aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default}
"""Products of two complex tensors: four real ones."""


def is_complex(node: fx.Node, args: Any, kwargs: Any) -> bool:
    """Whether complex numbers take part in a node."""
    found: list[bool] = []
    fx.node.map_aggregate((args, kwargs), lambda value: found.append(isinstance(value, Complex | complex)))
    fx.node.map_aggregate(node.meta.get("val"), lambda value: found.append(is_complex_form(value)))
    return any(found)


def convert_complex(importer: Any, node: fx.Node, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The value(s) of a node with complex operands or results."""
    parts = _of_parts(node)
    if node.target in COMPLEX:
        made = COMPLEX[node.target](importer, node if node.target in SEES_COMPLEX else parts, *args, **kwargs)
        if made is not NotImplemented:
            return made
    if node.target in _PART_BY_PART and isinstance(args[0], Complex):
        return _part_by_part(importer, parts, args, kwargs)
    if node.target in _ALL_OPERANDS and is_complex_form(node.meta["val"]):
        element_type = importer.out_dtype(parts)
        return _part_by_part(importer, parts, _promoted(importer, node, args, element_type), kwargs)
    if node.target in _PRODUCTS and all(isinstance(arg, Complex) for arg in args):
        real = CONVERSIONS[node.target]
        return multiplied(importer, *args, lambda importer, a, b: real(importer, parts, a, b))
    return _whole(importer, node, args, kwargs)


def _of_parts(node: fx.Node) -> fx.Node:
    """The node with real operands and results: what a real conversion is given for one of the parts."""
    graph = fx.Graph()

    def operand(arg: fx.Node) -> fx.Node:
        made = graph.placeholder(arg.name)
        made.meta = {**arg.meta, "val": part_form(arg.meta.get("val"))}
        return made

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), operand)
    made = graph.call_function(node.target, args, kwargs)
    made.name, made.meta = node.name, {**node.meta, "val": part_form(node.meta.get("val"))}
    return made


def _part_by_part(importer: Any, node: fx.Node, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The real operator on the real parts, then on the imaginary ones."""

    def side(index: int) -> Any:
        chosen = [
            fx.node.map_aggregate(
                each, lambda value: value.parts[index] if isinstance(value, Complex | _Number) else value
            )
            for each in (args, kwargs)
        ]
        return CONVERSIONS[node.target](importer, node, *chosen[0], **chosen[1])

    real, imaginary = side(0), side(1)
    if isinstance(real, tuple):
        return tuple(map(Complex, real, imaginary))
    return Complex(real, imaginary)


def _promoted(importer: Any, node: fx.Node, args: tuple, element_type: str) -> tuple:
    """Floating operands, and the numbers to write, as complex ones; positions and conditions as they are."""

    def promoted(value: Any, arg: Any) -> Any:
        if isinstance(value, Complex):
            return as_complex(importer, value, element_type)
        if isinstance(arg, fx.Node) and arg.meta["val"].dtype.is_floating_point:
            return as_complex(importer, value, element_type)
        return value

    found = [
        [promoted(value, each) for value, each in zip(arg, node.args[place], strict=True)]
        if isinstance(arg, list | tuple)
        else promoted(arg, node.args[place])
        for place, arg in enumerate(args)
    ]
    if node.target in _NUMBERS and len(found) > _NUMBERS[node.target]:
        place = _NUMBERS[node.target]
        number = complex(found[place])
        found[place] = _Number((number.real, number.imag))
    return tuple(found)


def _whole(importer: Any, node: fx.Node, args: tuple, kwargs: dict[str, Any]) -> Any:
    """torch's kernel: complex operands and results with their parts side by side."""
    check_functional(node)
    forms, made = node.meta["val"], whole(importer, node, *args, **kwargs)
    if not isinstance(forms, tuple | list):
        return separated(importer, made) if is_complex_form(forms) else made
    return tuple(
        separated(importer, each) if is_complex_form(form) else each for each, form in zip(made, forms, strict=True)
    )


@dataclass(frozen=True)
class _Number:
    """A number that is written, in parts."""

    parts: tuple[float, float]
