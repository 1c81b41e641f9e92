"""Functional operators: an overload without a conversion → whether a program may run torch's own kernel for it.

A program runs torch's kernel on the operator's own arguments and, backward, autograd's formula of the operator: the
bits are eager's. That is exact for an operator whose results are new tensors computed from its arguments alone. An
operator with another schema or tag, or one that reads memory instead of numbers, is refused by name.

Preserved operators → a library call: torch's own kernel forward, its own derivative backward.
The library call carries the operator's name and its arguments as text, with the tensors' places marked; see
``operator`` in :mod:`autodiff.library`. The backward computes the operator again, so this serves operators that are
rare, or cheap compared with their neighbours.

Graph search: a node → whether it, or a node that it is computed from, satisfies a predicate.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from autodiff.extents import Extent
from autodiff.ir import Expr
from bridge.aten.complex_value import Complex, joined_form
from bridge.aten.registry import UnsupportedUse, converts, lies_elsewhere
from bridge.base.errors import swallowed
from bridge.base.torch_internals import OpOverload, aten, pytree, schema, storage_id
from bridge.base.torch_shapes import SYMBOLIC
from bridge.capture import SHAPES, WHOLE, TensorMetadata

_TAGS = {
    torch.Tag.nondeterministic_seeded: "a random draw whose distribution no graph holds",
    torch.Tag.dynamic_output_shape: "the shape of a result depends on numbers",
    torch.Tag.data_dependent_output: "its result is a number that Python reads",
    torch.Tag.inplace_view: "gives a tensor another shape in place",
}

_MEMORY = tuple("as_strided empty from_file new_empty resize set to_mkldnn _copy_from _empty _mkldnn _resize".split())
_MEMORY += ("_efficientzerotensor", "_lazy_clone", "_reshape_alias")
"""Name prefixes of operators that depend on a tensor's memory layout, or return uninitialized memory."""

_EFFECTS = ("assert", "sym_constrain", "_make_dep_token")
"""Name parts of operators that are called for a side effect, not for their results."""

_PLAIN = (bool, int, float, complex, str, torch.dtype, type(None), Extent, *SYMBOLIC)


def check_functional(node: fx.Node) -> None:
    """Raises :class:`UnsupportedUse` unless a program may run torch's kernel for the operator that ``node`` calls."""
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
    if "sparse" in name:  # with dynamic sizes, a result's metadata has no layout
        raise UnsupportedUse("makes a tensor of layout torch.sparse_coo, or takes one")
    given = fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta.get("val"))
    for value in pytree.tree_leaves(given):
        _check_value("takes", value)
    for value in _results(node.meta.get("val")):
        _check_value("makes", value)


def _results(made: Any) -> list[Any]:
    """The results of a node but for ``None`` in the place of one that is not asked for, as a masked operator
    (``convolution_backward``) returns it; :class:`UnsupportedUse` for one that is no tensor."""
    fields = [each for each in made if each is not None] if isinstance(made, tuple | list) else [made]
    if not fields or not all(isinstance(field, torch.Tensor | TensorMetadata) for field in fields):
        raise UnsupportedUse("returns something else than tensors")
    return fields


def _check_value(verb: str, value: Any) -> None:
    if isinstance(value, torch.Tensor | TensorMetadata):
        if value.dtype == torch.complex32:
            raise UnsupportedUse(f"{verb} complex numbers of half precision")
        if isinstance(value, torch.Tensor) and (value.layout is not torch.strided or value.is_quantized):
            raise UnsupportedUse(f"{verb} a tensor of layout {value.layout} and type {value.dtype}")
    elif not isinstance(value, _PLAIN):
        raise UnsupportedUse(f"{verb} a value of type {type(value).__name__}")


_REFLECTIONS = (aten.linalg_householder_product.default, aten.ormqr.default)
_NORMS = {
    aten.linalg_vector_norm.default: lambda ord=2, *_: ord,
    aten.norm.Scalar: lambda p=2: p,
    aten.dist.default: lambda other, p=2: p,
}
"""Operators whose order may be 0, with a function that gets it from the arguments after the first."""


def describe(args: tuple, kwargs: dict[str, Any], saved: Sequence[int] = ()) -> tuple[str, list[Any]]:
    """``(args, kwargs, saved)`` as JSON in which ``{"$tensor": i}`` stands for the i-th of the returned tensors and
    dynamic sizes; ``{"$complex": i}`` for a complex one, which the library takes with both parts in a last axis."""
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

    text = json.dumps(pytree.tree_map(written, [list(args), kwargs, list(saved)]), sort_keys=True)
    return text, tensors


def _tensors(node: fx.Node) -> list[fx.Node]:
    """The tensor arguments of a node."""
    leaves = [each for each in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(each, fx.Node)]
    return [each for each in leaves if isinstance(each.meta.get("val"), torch.Tensor | TensorMetadata)]


def _refuse_without_gradient(node: fx.Node) -> None:
    """Refuses a node whose gradient by torch's formula is undefined, which a program cannot return."""
    if node.target in _REFLECTIONS and any(0 in each.meta["val"].shape for each in _tensors(node)):
        raise UnsupportedUse("Householder reflections of nothing: eager has no gradient there, not even zeros")
    if node.target in _NORMS and _NORMS[node.target](*node.args[1:]) == 0:
        raise UnsupportedUse("a norm of order 0: eager has no gradient there, not even zeros", "write (x != 0).sum()")


def _saved_results(node: fx.Node) -> list[int]:
    """Indices of the results that autograd saves, by a run on meta tensors; all float results if that run fails.

    None of a composite operator with a formula for its shape: a result may be a view of a saved tensor.
    """
    if node.target in SHAPES:
        return []
    results = _results(node.meta["val"])
    places = [place for place, each in enumerate(results) if each.dtype.is_floating_point]
    seen: set[int] = set()

    def plain(arg: fx.Node) -> Any:
        value = arg.meta["val"]
        if not isinstance(value, torch.Tensor):
            return value
        follows = value.dtype.is_floating_point or value.dtype.is_complex
        return torch.empty_like(value, device="meta", requires_grad=follows)

    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda t: seen.add(storage_id(t)), id):
            made = node.target(*fx.map_arg(node.args, plain), **fx.map_arg(node.kwargs, plain))
    except Exception as error:  # noqa: BLE001 - any error that torch raises for meta tensors
        swallowed(error)
        return places
    return [place for place, each in enumerate(_results(made)) if storage_id(each) in seen and not each.is_complex()]


@converts(*WHOLE)
def whole(importer, node, *args, **kwargs):
    _refuse_without_gradient(node)
    if any(map(lies_elsewhere, _tensors(node))):
        raise UnsupportedUse(f"{node.target} on the host beside a GPU's tensors")
    text, tensors = describe(args, kwargs, _saved_results(node))
    tensors = [importer.whole_of(tensor) for tensor in tensors]
    forms = fx.node.map_aggregate(node.meta["val"], joined_form)
    if not isinstance(forms, tuple | list):
        return importer.library("operator", [str(node.target), text, *tensors], forms)
    made = importer.library("operator", [str(node.target), text, *tensors], _results(forms))
    places = itertools.count()
    return tuple(None if form is None else importer.item(made, next(places)) for form in forms)


def computed_from(
    node: fx.Node, is_found: Callable[[fx.Node], bool], operands: Callable[[fx.Node], Iterable[fx.Node]]
) -> bool:
    """Whether ``is_found`` holds for a node, or for one that it reaches through ``operands``; visits each node once."""
    waiting, seen = [node], {node}
    while waiting:
        now = waiting.pop()
        if is_found(now):
            return True
        more = [each for each in operands(now) if each not in seen]
        seen.update(more)
        waiting += more
    return False
