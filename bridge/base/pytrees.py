"""Pytrees in words: the structure of a call's arguments → a name for each leaf, and a description of differences.

Picks: positions → a function in C that takes the elements at these positions of a sequence.

Python objects in arguments and results as pytree nodes: a dataclass, a cache → its attributes, and back.

torch.export knows tuples, lists, dicts and registered classes. Objects of other classes that forward makes and returns
are put into :class:`ObjectNode`, the only node type registered here: no user class is. A rebuilt object has its class
and its attributes, in their order; no ``__init__`` runs. It equals eager's result if the call made the object and its
attributes hold only tensors, plain values and objects like it; any other object is left as it is, and refused as a
result. Two runs tell whether the call made it: then they return different objects. An argument's plain attributes are
leaves, as plain arguments are: an entry compares them one by one. A returned tensor on which forward has set plain
attributes is an object of that kind as well.

Python functions among the arguments (the ``mask_mod`` of a ``BlockMask``) → a :class:`FunctionKind` of their code, and
their closures' contents, defaults and attributes, as an object's attributes are. An object that occurs twice is rebuilt
once.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from types import BuiltinFunctionType, CellType, CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from bridge.base.torch_fakes import attributes_set_on
from bridge.base.torch_higher_order import BlockMask
from bridge.base.torch_internals import pytree


def tensor_leaves(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of a tree, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def leaf_names(spec: pytree.TreeSpec) -> list[str]:
    """Names of the leaves of ``(args, kwargs)`` in order, as in ``"args[0]['mask']"`` or ``"kwargs['x'].scale"``."""
    args, kwargs = spec.children()
    return [*_names(args, "args"), *_names(kwargs, "kwargs")]


def _names(spec: pytree.TreeSpec, path: str) -> list[str]:
    if spec.is_leaf():
        return [path]
    return [
        name for key, child in zip(_keys(spec), spec.children(), strict=True) for name in _names(child, f"{path}{key}")
    ]


def _keys(spec: pytree.TreeSpec) -> list[str]:
    """The path from a node to each child: ``"[0]"``, ``"['x']"`` or ``".x"``."""
    if spec.type is ObjectNode:
        _, attributes, layout, _ = spec.context
        names = [f".{name}" for name, _ in layout[:attributes]] + [f"[{name!r}]" for name, _ in layout[attributes:]]
        return [name for name, (_, plain) in zip(names, layout, strict=True) if plain is None]
    count = spec.num_children
    fields = getattr(spec.context if isinstance(spec.context, type) else spec.type, "_fields", None)
    if fields is not None and len(fields) == count:
        return [f".{name}" for name in fields]
    keys = dict_keys(spec)
    return [f"[{key!r}]" for key in (range(count) if keys is None else keys)]


def dict_keys(spec: pytree.TreeSpec) -> list[Any] | None:
    """The keys of a structure that is a dictionary, in order."""
    context = spec.context
    if isinstance(context, list) and len(context) == 2 and isinstance(context[1], list):  # a defaultdict's
        context = context[1]
    is_keys = isinstance(context, list | tuple) and len(context) == spec.num_children
    return list(context) if is_keys and not issubclass(spec.type, tuple | list) else None


def structure_difference(then: pytree.TreeSpec, now: pytree.TreeSpec) -> tuple[str, str]:
    """The differing place of two unequal structures of ``(args, kwargs)``, and the difference: both in words."""
    counts = then.child(0).num_children, now.child(0).num_children
    if counts[0] != counts[1]:
        return "number of positional arguments", f"compiled for {counts[0]}, called with {counts[1]}"
    for part, path in enumerate(("args", "kwargs")):
        if (found := _difference(then.child(part), now.child(part), path)) is not None:
            return found
    return "structure of the arguments", f"compiled for {then}, called with {now}"


def _difference(then: pytree.TreeSpec, now: pytree.TreeSpec, path: str) -> tuple[str, str] | None:
    if (then.type, then.context, then.num_children) != (now.type, now.context, now.num_children):
        return f"structure of argument {path}", f"compiled for {_described(then)}, called with {_described(now)}"
    for key, first, second in zip(_keys(then), then.children(), now.children(), strict=True):
        if (found := _difference(first, second, f"{path}{key}")) is not None:
            return found
    return None


def _described(spec: pytree.TreeSpec) -> str:
    if spec.is_leaf():
        return "a single value"
    if spec.type is ObjectNode:
        return f"{spec.context[0].__name__} with {[name for name, _ in spec.context[2]]}"
    keys = dict_keys(spec)
    kind = spec.context if isinstance(spec.context, type) else spec.type
    return f"{kind.__name__} of {spec.num_children if keys is None else keys}"


def containers_of(value: Any, kinds: tuple[type, ...] = (list, dict)) -> list[Any]:
    """The lists and dictionaries in nested lists, tuples, dictionaries and objects; ``kinds``: other types."""
    found, objects = [], set[int]()

    def visit(value: Any) -> None:
        if isinstance(value, kinds):
            found.append(value)
        if isinstance(value, (list, tuple, dict)):
            list(map(visit, value.values() if isinstance(value, dict) else value))
        elif _is_object(value) and id(value) not in objects:
            objects.add(id(value))
            list(map(visit, dict(_attributes(value)).values()))

    visit(value)
    return found


def picker(places: Sequence[int]) -> Callable[[Any], Sequence[Any]]:
    """A function that takes the elements at these positions of a list or tuple, as a sequence."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


_TENSOR = "the tensor"

#: Immutable attribute types: one value may be returned at every call.
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, type, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def is_plain(value: Any) -> bool:
    """Whether a value is immutable and holds no other object."""
    return isinstance(value, _PLAIN)


class WithWholes(NamedTuple):
    """A result with overlapping parts of whole tensors, and these tensors: the caller receives views of them."""

    result: Any
    wholes: list[Any]


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionKind:
    """Python functions that are equal but for the contents of their closures, their defaults and their attributes.

    Attributes:
        code: theirs, and ``space``: their global names.
        names: ``__name__``, ``__qualname__``, ``__module__``.
        counts: how many defaults there are, and which defaults by keyword.
    """

    code: CodeType
    space: dict[str, Any]
    names: tuple[str, str, str | None]
    counts: tuple[int, tuple[str, ...]]

    @property
    def __name__(self) -> str:
        return self.names[0]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FunctionKind) or self.space is not other.space:
            return False
        return (self.code, self.names, self.counts) == (other.code, other.names, other.counts)

    def __hash__(self) -> int:
        return hash((self.code, self.names, self.counts))

    def make(self, values: list[Any], attributes: dict[str, Any]) -> FunctionType:
        """A function that closes over values, and has those after these as defaults."""
        cells, (count, keywords) = len(self.code.co_freevars), self.counts
        defaults, rest = values[cells : cells + count], values[cells + count :]
        closure = tuple(map(CellType, values[:cells]))
        made = FunctionType(self.code, self.space, self.names[0], tuple(defaults) or None, closure)
        made.__qualname__, made.__module__ = self.names[1:]
        made.__kwdefaults__ = dict(zip(keywords, rest, strict=True)) or None
        made.__dict__.update(attributes)
        return made


@dataclasses.dataclass(frozen=True)
class Again:
    """An object of the arguments, or a container of the result, that occurs before, by its number there."""

    number: int
    __name__ = "an object that is there twice"


class Repeated:
    """The kind of a list or dictionary of the result that occurs again; it is the node's only attribute."""


@dataclasses.dataclass(eq=False)
class ObjectNode:
    """Stands for an object of a class unknown to pytree.

    Attributes:
        kind: the object's class; of a function or a repeated object its :class:`FunctionKind` or :class:`Again`.
        attributes: its attributes by name, packed.
        items: its items, packed, if it is a dict.
        value: the object itself; ``None`` after flattening and unflattening.
        is_argument: whether plain attributes and items are leaves as well.
    """

    kind: Any
    attributes: dict[str, Any]
    items: dict[Any, Any]
    value: Any = None
    is_argument: bool = False

    def make(self, before: list[Any]) -> Any:
        """A new object like it; ``before``: those made before it, to which it is added."""
        if self.kind is torch.Size:
            return torch.Size(self.attributes.values())
        if isinstance(self.kind, Again):
            return before[self.kind.number]
        attributes, items = (
            {name: unpacked(value, before) for name, value in values.items()}
            for values in (self.attributes, self.items)
        )
        made = attributes["value"] if self.kind is Repeated else _made(self.kind, attributes, items)
        before.append(made)
        return made


def _made(kind: Any, attributes: dict[str, Any], items: dict[Any, Any]) -> Any:
    if kind is torch.Tensor:
        made = items[_TENSOR]
        vars(made).update(attributes)
        return made
    if isinstance(kind, FunctionKind):
        return kind.make([*attributes.values()], items)
    if kind is partial:
        made = partial(attributes["func"], *attributes["args"], **attributes["keywords"])
        made.__dict__.update(items)
        return made
    builtin = next(base for base in kind.__mro__ if type(vars(base).get("__new__")) is BuiltinFunctionType)
    made = builtin.__new__(kind)
    own = getattr(made, "__dict__", {})
    for name, value in attributes.items():
        if inspect.ismemberdescriptor(getattr(kind, name, None)):  # a slot
            object.__setattr__(made, name, value)  # past the frozen dataclass's own `__setattr__`
        else:
            own[name] = value
    for key, value in items.items():  # past a `__setitem__` of the class's own
        _base(made).__setitem__(made, key, value)
    return made


def _flatten(node: ObjectNode) -> tuple[list[Any], tuple]:
    """Children: all values of an argument; for a result, all but the plain values, which are part of the structure."""
    values = [*node.attributes.items(), *node.items.items()]
    plain = () if node.kind is torch.Size or node.is_argument else _PLAIN
    children = [value for _, value in values if not isinstance(value, plain)]
    layout = [(name, (value,) if isinstance(value, plain) else None) for name, value in values]
    return children, (node.kind, len(node.attributes), layout, node.is_argument)


def _unflatten(children: Any, context: tuple) -> ObjectNode:
    kind, attributes, layout, is_argument = context
    remaining = iter(children)
    values = [(name, next(remaining) if plain is None else plain[0]) for name, plain in layout]
    return ObjectNode(kind, dict(values[:attributes]), dict(values[attributes:]), None, is_argument)


pytree.register_pytree_node(ObjectNode, _flatten, _unflatten, serialized_type_name="tvm_dispatch.ObjectNode")


def packed(value: Any, is_argument: bool = False, given: Sequence[torch.Tensor] = ()) -> Any:
    """A value with an :class:`ObjectNode` for each object that can be rebuilt; the value itself if there is none.

    ``is_argument``: the value is an argument of a module: a ``torch.Size`` in it stays one, and is refused; functions
    are objects. ``given``: tensors that the call has not made, whose attributes stay theirs.
    """
    repeated = set() if is_argument else _repeated(value)
    leaves, spec = pytree.tree_flatten(value, is_leaf=lambda each: _is_whole(each) or id(each) in repeated)
    kinds = _is_object if not is_argument else _is_argument_object
    made_anew = [kinds(leaf) or id(leaf) in repeated or (_is_size(leaf) and not is_argument) for leaf in leaves]
    if not any(made_anew):
        return value
    seen: dict[int, int | None] = dict.fromkeys(map(id, given))
    pairs = zip(leaves, made_anew, strict=True)
    made = [_packed(leaf, seen, is_argument, repeated) if anew else leaf for leaf, anew in pairs]
    return pytree.tree_unflatten(made, spec)


packed_arguments: Callable[[Any], Any] = partial(packed, is_argument=True)


def unpacked(result: Any, before: list[Any] | None = None) -> Any:
    """The inverse of :func:`packed`, with new objects; the result itself if it has no nodes.

    ``before``: the objects rebuilt so far, to which these are added.
    """
    leaves, spec = pytree.tree_flatten(result, is_leaf=lambda value: isinstance(value, (ObjectNode, torch.Size)))
    if not any(isinstance(leaf, ObjectNode) for leaf in leaves):
        return result
    made = [] if before is None else before
    return pytree.tree_unflatten([leaf.make(made) if isinstance(leaf, ObjectNode) else leaf for leaf in leaves], spec)


def has_objects(spec: pytree.TreeSpec) -> bool:
    """Whether a packed result's structure has object nodes."""
    return spec.type is ObjectNode or any(has_objects(child) for child in spec.children())


def _repeated(value: Any) -> set[int]:
    """The lists and dictionaries that occur more than once, by id."""
    counts = Counter(map(id, containers_of(value)))
    return {each for each, count in counts.items() if count > 1}


def _packed(leaf: Any, seen: dict[int, int | None], is_argument: bool, repeated: set[int]) -> Any:
    """An object's node with packed attributes; an object that holds unsupported values stays itself.

    ``seen``: by the id of each object so far, how many were packed before it; ``None`` while it is being packed.
    ``repeated``: lists and dictionaries of a result that occur again; an object that does stays itself.
    """
    if _is_size(leaf):  # pytree treats it as a tuple, and returns a tuple
        return ObjectNode(torch.Size, {str(axis): extent for axis, extent in enumerate(leaf)}, {})
    if id(leaf) not in repeated and not (_is_argument_object(leaf) if is_argument else _is_object(leaf)):
        return leaf
    if id(leaf) in seen:
        number, is_known = seen[id(leaf)], is_argument or id(leaf) in repeated
        return leaf if number is None or not is_known else ObjectNode(Again(number), {}, {}, leaf, is_argument)
    seen[id(leaf)] = None
    again = id(leaf) in repeated
    node = ObjectNode(Repeated, {"value": leaf}, {}, leaf) if again else _node_of(leaf, is_argument)
    inner = repeated - {id(leaf)}
    for values in (node.attributes, node.items):
        for name, value in values.items():
            if is_argument and isinstance(value, type):  # not a constant of the call
                return leaf
            if isinstance(value, _PLAIN):
                continue
            leaves, spec = pytree.tree_flatten(value, is_leaf=lambda each: _is_whole(each) or id(each) in inner)
            leaves = [_packed(each, seen, is_argument, repeated) for each in leaves]
            if not all(isinstance(each, (torch.Tensor, ObjectNode, *_PLAIN)) for each in leaves):
                return leaf
            values[name] = pytree.tree_unflatten(leaves, spec)
    seen[id(leaf)] = sum(number is not None for number in seen.values())
    return node


def _node_of(value: Any, is_argument: bool) -> ObjectNode:
    """An object's node, with its attributes as they are."""
    if isinstance(value, torch.Tensor):
        return ObjectNode(torch.Tensor, dict(attributes_set_on(value)), {_TENSOR: value})
    if type(value) is partial:
        attributes = {"func": value.func, "args": value.args, "keywords": value.keywords}
        return ObjectNode(partial, attributes, dict(value.__dict__), value, is_argument)
    if type(value) is not FunctionType:
        keys = _base(value).__iter__(value) if isinstance(value, dict) else ()
        items = {key: dict.__getitem__(value, key) for key in keys}
        return ObjectNode(type(value), dict(_attributes(value)), items, value, is_argument)
    defaults, keywords = value.__defaults__ or (), value.__kwdefaults__ or {}
    attributes = {
        name: cell.cell_contents for name, cell in zip(value.__code__.co_freevars, _cells(value), strict=True)
    }
    attributes |= {f"__defaults__[{place}]": each for place, each in enumerate(defaults)}
    attributes |= {f"__kwdefaults__[{name!r}]": each for name, each in keywords.items()}
    names, counts = (value.__name__, value.__qualname__, value.__module__), (len(defaults), tuple(keywords))
    kind = FunctionKind(value.__code__, value.__globals__, names, counts)
    return ObjectNode(kind, attributes, dict(value.__dict__), value, is_argument)


def _cells(function: FunctionType) -> tuple[CellType, ...]:
    return function.__closure__ or ()


def objects_of(packed_result: Any) -> list[Any]:
    """The objects behind a packed result's nodes."""
    nodes = pytree.tree_leaves(packed_result, is_leaf=lambda value: isinstance(value, ObjectNode))
    found = [node for node in nodes if isinstance(node, ObjectNode)]
    own = [node.value for node in found if node.value is not None]
    return own + [value for node in found for value in objects_of([*node.attributes.values(), *node.items.values()])]


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size)


def _is_whole(value: Any) -> bool:
    """Whether pytree would lose a part of the object: the functions of a registered ``BlockMask``, for example."""
    return isinstance(value, torch.Size | BlockMask)


def _is_argument_object(value: Any) -> bool:
    """Whether a value among the arguments is an object, or a function of which all is known."""
    if type(value) is not FunctionType:
        return not isinstance(value, torch.Tensor) and (type(value) is partial or _is_object(value))
    return all(cell != CellType() for cell in _cells(value))


def _is_object(value: Any) -> bool:
    """Whether class, attributes and, for a dict, items make up the whole value; of a tensor: whether it has attributes,
    all of them plain."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return bool(own := attributes_set_on(value)) and all(map(is_plain, own.values()))
    if isinstance(value, (nn.Module, BaseException, ObjectNode, *_PLAIN)) or callable(value):
        return False
    if kind.__module__ == "builtins" or inspect.ismodule(value):
        return False
    if dataclasses.is_dataclass(kind):
        return not isinstance(value, (tuple, list, dict, str, int, float)) and not hasattr(kind, "__del__")
    return _memory(kind) == _memory(_base(value)) and kind.__itemsize__ == 0 and not hasattr(kind, "__del__")


def _base(value: Any) -> Any:
    """The built-in class that holds an object's items, if it has any."""
    return next(base for base in (OrderedDict, dict, object) if isinstance(value, base))


def _memory(kind: type) -> int:
    """Bytes of an instance without its pointers to ``__dict__`` and to weak references."""
    pointers = (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return kind.__basicsize__ - pointers * struct.calcsize("P")


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of an object's attributes: ``__dict__`` and a dataclass's slots."""
    yield from getattr(value, "__dict__", {}).items()
    if dataclasses.is_dataclass(value):
        own = getattr(value, "__dict__", {})
        for field in dataclasses.fields(value):
            if field.name not in own and hasattr(value, field.name):
                yield field.name, getattr(value, field.name)
