"""Dynamic shapes: ``dynamic_shapes=`` in torch.export's form → refused by name where a dimension is meant to vary.

Compiled code here has static extents: arenas, loop bounds and vector lanes are laid out for them. Calls of several
lengths get an entry each (``on_miss="compile"``), which shares everything but the compilation.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.export import AdditionalInputs, Dim, ShapesCollection

from bridge.base.errors import Unsupported, UnsupportedModule
from bridge.base.torch_internals import pytree, pytree_node_type

__all__ = ["refuse_dynamic"]

_FORM = "torch.export's form: None, or by argument (a dict by name, a tuple by position) and by dimension"
_HINT = 'leave dynamic_shapes out and give on_miss="compile": every length gets an entry of its own'


def refuse_dynamic(module: nn.Module, args: tuple, kwargs: dict[str, Any], dynamic_shapes: Any) -> None:
    """Checks a specification of dynamic shapes against the sample call ``module(*args, **kwargs)``.

    Args:
        dynamic_shapes: as for ``torch.export.export``: nested dicts, tuples and lists by argument, for a tensor
            ``None`` or one entry per dimension: ``None``, ``Dim.STATIC`` or its size for a static one; or a
            ``ShapesCollection``.

    Raises:
        UnsupportedModule: names every dimension that is meant to vary.
        TypeError, ValueError: something else than such a specification, or not one of this sample.
    """
    if isinstance(dynamic_shapes, AdditionalInputs):
        reason = "further samples mean that sizes vary; compiled code has static shapes"
        refused = [Unsupported("dynamic_shapes=AdditionalInputs", "add_tvm_dispatch", reason, _HINT)]
        raise UnsupportedModule(type(module).__name__, refused)
    if isinstance(dynamic_shapes, ShapesCollection):
        dynamic_shapes = dynamic_shapes.dynamic_shapes(module, args, kwargs)
    if dynamic_shapes is None:
        return
    if not isinstance(dynamic_shapes, dict | tuple | list):
        raise TypeError(f"dynamic_shapes: wanted {_FORM}, got {type(dynamic_shapes).__name__}")
    if not dynamic_shapes:
        return
    try:
        sample = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except TypeError:
        return  # the sample does not fit forward, which will be said
    if isinstance(dynamic_shapes, dict):
        found = _inside(dynamic_shapes, sample, "")
    else:
        found = _inside(dynamic_shapes, tuple(sample.values()), "")
    problems = [
        Unsupported(
            f"dynamic_shapes{path}",
            "add_tvm_dispatch",
            f"dimension {dim} is meant to vary; compiled code has static shapes",
            _HINT,
        )
        for path, dim in found
    ]
    if problems:
        raise UnsupportedModule(type(module).__name__, problems)


def _dynamic(spec: Any, value: Any, path: str) -> Iterator[tuple[str, str]]:
    """The dimensions that are meant to vary, each with its path and name."""
    if spec is None:
        return
    if isinstance(value, torch.Tensor):
        yield from _of_tensor(spec, value, path)
    elif isinstance(value, dict) and (isinstance(spec, dict) or type(value) is dict):
        yield from _inside(spec, dict(value), path)
    elif value is not None and not pytree.tree_structure(value).is_leaf():
        node = pytree.SUPPORTED_NODES[pytree_node_type(value)]
        yield from _inside(spec, tuple(node.flatten_fn(value)[0]), path)
    elif _is_dim(spec):
        yield path, _name(spec)
    elif spec is not Dim.STATIC:
        kind = type(value).__name__
        raise TypeError(f"dynamic_shapes{path}: wanted None where the sample has a {kind}, got {spec!r}")


def _inside(spec: Any, values: dict[str, Any] | tuple, path: str) -> Iterator[tuple[str, str]]:
    """As :func:`_dynamic`, for the parts of a dict or of anything else that has parts."""
    if isinstance(values, dict):
        if not isinstance(spec, dict):
            raise TypeError(f"dynamic_shapes{path}: wanted a dict of {list(values)}, got {type(spec).__name__}")
        if spec.keys() != values.keys():
            raise ValueError(f"dynamic_shapes{path}: wanted what the sample has, {list(values)}, got {list(spec)}")
        pairs = [(key, spec[key], values[key]) for key in values]
    else:
        entries = list(spec.values()) if isinstance(spec, dict) else spec
        if not isinstance(entries, tuple | list):
            raise TypeError(f"dynamic_shapes{path}: wanted {len(values)} entries, got {type(spec).__name__}")
        if len(entries) != len(values):
            raise ValueError(
                f"dynamic_shapes{path}: wanted as many as the sample has, {len(values)}, got {len(entries)}"
            )
        pairs = list(zip(range(len(values)), entries, values, strict=True))
    for key, entry, value in pairs:
        yield from _dynamic(entry, value, f"{path}[{key!r}]")


def _of_tensor(spec: Any, tensor: torch.Tensor, path: str) -> Iterator[tuple[str, str]]:
    count = tensor.dim()
    if isinstance(spec, dict):
        entries = spec
        if wrong := [key for key in spec if type(key) is not int or not -count <= key < count]:
            raise ValueError(f"dynamic_shapes{path}: no dimension {wrong[0]!r}, the sample has {count} there")
    elif isinstance(spec, tuple | list):
        entries = dict(enumerate(spec))
        if len(spec) != count:
            raise ValueError(f"dynamic_shapes{path}: wanted one entry for each of {count} dimensions, got {len(spec)}")
    else:
        raise TypeError(
            f"dynamic_shapes{path}: wanted None, or a dict, a tuple or a list by dimension, got {type(spec).__name__}"
        )
    for dimension, entry in entries.items():
        place = f"dynamic_shapes{path}[{dimension}]"
        if entry is None or entry is Dim.STATIC:
            continue
        if type(entry) is int:
            if entry != tensor.shape[dimension]:
                raise ValueError(f"{place}: wanted the sample's {tensor.shape[dimension]}, got {entry}")
        elif _is_dim(entry):
            yield f"{path}[{dimension}]", _name(entry)
        else:
            raise TypeError(f"{place}: wanted None, a Dim or a number, got {entry!r}")


def _is_dim(value: Any) -> bool:
    return isinstance(value, Dim) or (type(value) is type(Dim.AUTO) and value is not Dim.STATIC)


def _name(dim: Any) -> str:
    return getattr(dim, "__name__", None) or f"Dim.{dim.type.name}"
