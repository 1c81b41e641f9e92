"""Parts of an entry as plain data: steps, draws, structures of arguments and results, signatures.

Structures of arguments and results: pytree specifications ↔ plain data, without the classes of the user's code.
Tuples, lists, dicts, named tuples and ``torch.Size`` come back as they are. A result of another class (transformers'
outputs, a dataclass) comes back as a :class:`ResultRecord`: names and values, by attribute, name or position.

Parts of an entry as plain data: steps of a call, draws, outputs, module tensors ↔ what JSON holds.
Frozen dataclasses of a closed list are written by name and field, torch's types by name; anything else is refused.
"""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict, namedtuple
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch

from bridge.base.objects import ObjectNode, WithWholes
from bridge.base.torch_internals import pytree
from bridge.capture import Draw, DropoutOperand, OperatorCall, Output, Parameter, PreCallExpression, ValueIndex
from bridge.dispatch import STEPS
from bridge.state import ModuleTensor

__all__ = ["ResultRecord", "from_plain", "signature_data", "signature_from", "structure_of", "to_plain", "to_structure"]


_LEAF = None
_SEQUENCES = {tuple: "tuple", list: "list"}
_MAPPINGS = {dict: "dict", OrderedDict: "ordered dict"}
_KEYS = (str, int, bool)


class ResultRecord(dict):
    """A result whose class was not saved: ``result.logits``, ``result["logits"]`` and ``result[0]`` are the same.

    Values that are ``None`` are left out of positions, as in transformers' outputs.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return dict.__getitem__(self, name)
        except KeyError:
            raise AttributeError(f"the record has {', '.join(self)}, no {name!r}") from None

    def __getitem__(self, key: Any) -> Any:
        return dict.__getitem__(self, key) if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self) -> tuple:
        """The values that are not ``None``."""
        return tuple(value for value in self.values() if value is not None)


def _flatten(record: ResultRecord) -> tuple[list[Any], tuple[str, ...]]:
    return list(record.values()), tuple(record)


def _unflatten(values: Iterable[Any], names: tuple[str, ...]) -> ResultRecord:
    return ResultRecord(zip(names, values, strict=True))


pytree.register_pytree_node(ResultRecord, _flatten, _unflatten, serialized_type_name="tvm_dispatch.Record")


def to_structure(spec: pytree.TreeSpec) -> Any:
    """Plain data for a specification. ``TypeError`` for a node that cannot be told without its class."""
    if spec.is_leaf():
        return _LEAF
    children = [to_structure(child) for child in spec.children()]
    kind, context = spec.type, spec.context
    if context is WithWholes:
        raise TypeError("a result whose elements share memory, as expand makes it")
    if kind in _SEQUENCES:
        return {"kind": _SEQUENCES[kind], "children": children}
    if kind in _MAPPINGS:
        if not all(type(key) in _KEYS for key in context):
            raise TypeError(f"a {kind.__name__} with keys other than texts and integers")
        return {"kind": _MAPPINGS[kind], "keys": list(context), "children": children}
    fields = getattr(context if isinstance(context, type) else kind, "_fields", None)
    if fields is not None and len(fields) == len(children):
        named = context if isinstance(context, type) else kind
        return {"kind": "named tuple", "name": named.__name__, "keys": list(fields), "children": children}
    if kind is ObjectNode:
        return _of_object(context, children)
    if isinstance(context, list | tuple) and len(context) == len(children) and all(type(k) is str for k in context):
        return {"kind": "record", "keys": list(context), "children": children}
    raise TypeError(f"a result of class {kind.__name__}")


def _of_object(context: tuple, children: list[Any]) -> Any:
    made, _, layout = context
    if any(plain is not None for _, plain in layout):
        names = [name for name, plain in layout if plain is not None]
        raise TypeError(f"an object of class {made.__name__} with values that are no tensors: {', '.join(names)}")
    kind = "size" if made is torch.Size else "record"
    return {"kind": kind, "keys": [str(name) for name, _ in layout], "children": children}


def structure_of(plain: Any) -> pytree.TreeSpec:
    """The specification that plain data of :func:`to_structure` tells of."""
    return pytree.tree_structure(_skeleton(plain))


def _skeleton(plain: Any) -> Any:
    if plain is _LEAF:
        return 0
    children = [_skeleton(child) for child in plain["children"]]
    kind, keys = plain["kind"], plain.get("keys", ())
    if kind in ("tuple", "list"):
        return tuple(children) if kind == "tuple" else children
    pairs = dict(zip(keys, children, strict=True))
    if kind == "named tuple":
        return namedtuple(plain["name"], keys)(*children)
    if kind == "size":
        return ObjectNode(torch.Size, pairs, {})
    made = {"dict": dict, "ordered dict": OrderedDict, "record": ResultRecord}.get(kind)
    if made is None:
        raise ValueError(f"a structure of unknown kind {kind!r}")
    return made(pairs)


_PARTS = (Draw, ModuleTensor, DropoutOperand, OperatorCall, Output, Parameter, ValueIndex, PreCallExpression)
_CLASSES = {kind.__name__: kind for kind in (*STEPS, *_PARTS)}
_TORCH = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


def to_plain(value: Any) -> Any:
    """What JSON holds. ``TypeError`` for anything that cannot be told without the user's code."""
    if value is None or type(value) in (bool, int):
        return value
    if isinstance(value, str):
        return str(value)
    if type(value) is float:
        return value if math.isfinite(value) else {"is": "float", "value": repr(value)}
    if type(value) in (tuple, torch.Size):
        return [to_plain(item) for item in value]
    if type(value) in (list, frozenset):
        return {"is": type(value).__name__, "items": [to_plain(item) for item in value]}
    if isinstance(value, pytree.TreeSpec):
        return {"is": "structure", "value": to_structure(value)}
    if isinstance(value, torch.device):
        return {"is": "device", "value": str(value)}
    for name, kind in _TORCH.items():
        if isinstance(value, kind):
            return {"is": name, "value": str(value).removeprefix("torch.")}
    if type(value) in _CLASSES.values():
        return {"is": type(value).__name__} | {each.name: to_plain(getattr(value, each.name)) for each in fields(value)}
    raise TypeError(f"a value of class {type(value).__name__}")


def from_plain(plain: Any) -> Any:
    """The inverse of :func:`to_plain`. ``ValueError`` for what is none of those that it makes."""
    if isinstance(plain, list):
        return tuple(from_plain(item) for item in plain)
    if not isinstance(plain, dict):
        return plain
    name = plain.get("is")
    if name == "structure":
        return structure_of(plain["value"])
    given = {key: from_plain(item) for key, item in plain.items() if key != "is"}
    if name in ("list", "frozenset"):
        return (list if name == "list" else frozenset)(given["items"])
    if name == "float":
        return float(given["value"])
    if name == "device":
        return torch.device(given["value"])
    if name in _TORCH:
        found = getattr(torch, given["value"], None)
        if isinstance(found, _TORCH[name]):
            return found
    if name not in _CLASSES or given.keys() != {each.name for each in fields(_CLASSES[name])}:
        raise ValueError(f"wanted a part of an entry, got {name!r} with {', '.join(given)}")
    return _CLASSES[name](**given)


def signature_data(signature: inspect.Signature | None) -> list[list[Any]] | None:
    """Name, kind and default of each parameter; ``None`` where a default cannot be told, or there is no signature."""
    if signature is None:
        return None
    try:
        return [
            [each.name, each.kind.name, [] if each.default is each.empty else [to_plain(each.default)]]
            for each in signature.parameters.values()
        ]
    except TypeError:
        return None


def signature_from(data: list[list[Any]] | None) -> inspect.Signature | None:
    """The inverse of :func:`signature_data`. ``ValueError`` for what is no signature."""
    return None if data is None else inspect.Signature([_parameter(*each) for each in data])


def _parameter(name: str, kind: str, default: list[Any]) -> inspect.Parameter:
    value = from_plain(default[0]) if default else inspect.Parameter.empty
    return inspect.Parameter(name, getattr(inspect.Parameter, kind), default=value)
