"""Conditions on the arguments of a call: structure and constants, then tensors; arguments → argument tensors.

A constant must have the compiled value; a scalar input may be any number of its type.

Signature binding: arguments by position, by name or by default → the sample's form. ``m(x, mask)``, ``m(x, mask=mask)``
and, if ``mask`` is the default, ``m(x)`` run forward with the same parameters, so a call is bound to its signature as
Python does. A forward with ``*args`` or ``**kwargs`` (a decorator's wrapper) can tell these forms apart, so its calls
must have the sample's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import nn

from autodiff.extents import Dim
from bridge.base.errors import ARGUMENTS, STRUCTURE, GuardFailure
from bridge.base.pytrees import dict_keys, has_objects, leaf_names, objects_of, packed_arguments, structure_difference
from bridge.base.tensor_properties import is_nested
from bridge.base.torch_internals import pytree
from bridge.capture import Captured, is_number
from bridge.dispatch.guards.condition import CheckSource
from bridge.dispatch.guards.sizes import argument_sizes
from bridge.dispatch.guards.tensors import SizedTensorGuard, TensorGuard
from bridge.guards import alike
from bridge.state import SampleCall, same

__all__ = ["SAVED", "AnyNumber", "ArgumentGuard", "changed_number", "signature_of"]


@dataclass(frozen=True)
class AnyNumber:
    """Expected value of a scalar input, or of a counter that a call only increments.

    Attributes:
        kind: ``int`` or ``float``.
        counts: whether it is a counter, which may be any ``int``.
    """

    kind: type
    counts: bool = False

    def __repr__(self) -> str:
        return f"any {self.kind.__name__}"

    def fits(self, now: Any) -> bool:
        """Whether a value is one of the expected ones."""
        return type(now) is int if self.counts else is_number(now, self.kind)


def _same_or_any_number(now: Any, then: Any) -> bool:
    return then.fits(now) if type(then) is AnyNumber else alike(now, then)


def changed_number(now: Any, then: Any) -> bool:
    """Whether both values are numbers of one type."""
    return is_number(now, type(then)) and is_number(then, type(now))


SAVED = "tvm_dispatch_signature"
"""Attribute of a wrapper around a forward: the forward's signature, for signature binding."""

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def signature_of(forward: Callable[..., Any]) -> inspect.Signature | None:
    """Forward's signature for signature binding; ``None`` if calls cannot be bound exactly."""
    function = getattr(forward, "__func__", forward)
    if isinstance(saved := getattr(function, SAVED, None), inspect.Signature):
        return saved
    if not isinstance(function, FunctionType) or hasattr(function, "__signature__"):
        return None
    signature = inspect.signature(forward, follow_wrapped=False)
    return None if any(each.kind in _VARIADIC for each in signature.parameters.values()) else signature


class ArgumentGuard:
    """The conditions of one entry on the arguments.

    Args:
        captured: the captured call, whose sample defines structure and constants.
        tensors: the sample's argument tensors.
        forward: the module's forward, for signature binding.
        saves: whether autograd saves tensors of the call.
        numbers: leaf → type of the arguments that are scalar inputs.
        kin: objects that must not be arguments (:class:`bridge.guards.Reads`).
    """

    def __init__(
        self,
        captured: Captured,
        tensors: Sequence[torch.Tensor],
        forward: Callable[..., Any],
        *,
        saves: bool,
        numbers: Mapping[int, type] = MappingProxyType({}),
        kin: Sequence[Any] = (),
    ):
        self._structure = _Structure(captured.given.spec, forward, kin)
        self.paths = leaf_names(captured.given.spec)
        leaves = list(zip(captured.given.leaves, captured.given.is_tensor, strict=True))
        self.tensor_leaves = [i for i, (_, is_tensor) in enumerate(leaves) if is_tensor]
        self._constants = {
            i: AnyNumber(numbers[i]) if i in numbers else leaf
            for i, (leaf, is_tensor) in enumerate(leaves)
            if not is_tensor
        }
        self._same = _same_or_any_number if numbers else same
        names = [self.paths[i] for i in self.tensor_leaves]
        shapes = captured.sizes.shapes[: len(captured.sizes.shapes) - captured.sizes.counted]
        self._shapes = shapes or tuple(tuple(tensor.shape) for tensor in tensors)
        #: Reads the sizes of the argument tensors; ``None``: static shapes.
        self.sizes = argument_sizes(captured, names)
        self._given = argument_sizes(captured, names, counted=False) if captured.sizes.counted else self.sizes
        self._followed = captured.given.followed
        tensors = self._seen(tensors)
        self._tensors = (TensorGuard if self.sizes is None else partial(SizedTensorGuard, sizes=self._given))(
            tensors,
            kinds=[(torch.Tensor, nn.Parameter)] * len(tensors),
            names=names,
            stage=ARGUMENTS,
            saves=saves,
            explain_type=_explain_type,
        )

    def write(self, source: CheckSource, inference: str) -> None:
        """Writes the conditions; the generated code assigns the argument tensors to ``tensors``."""
        self._structure.write(source)
        same, explain = source.name(self._same, "same"), source.name(self._explain_constant, "other constant")
        for i, then in self._constants.items():
            value = source.name(then, f"then {self.paths[i]}")
            unlike = f"leaves[{i}] is not {value} and not {same}(leaves[{i}], {value})"
            source.refuse(unlike, f"{explain}({i}, {value}, leaves[{i}])")
        pick = "leaves" if not self._constants else f"[{', '.join(f'leaves[{i}]' for i in self.tensor_leaves)}]"
        source.add(f"tensors = {pick}")
        seen = "tensors"
        if self._followed:
            seen = "seen"
            source.add(f"seen = {source.name(self._seen, 'but for requires_grad')}(tensors)")
        self._tensors.write(source, seen, inference, nested="tensors" if self.tensor_leaves else "")

    def _seen(self, tensors: Sequence[Any]) -> list[Any]:
        """The tensors as their conditions see them: whether one requires grad does not matter where forward sets it."""
        pairs = enumerate(tensors)
        return [each.detach() if i in self._followed and isinstance(each, torch.Tensor) else each for i, each in pairs]

    def leaves(self, call: SampleCall) -> list[Any]:
        """All leaves, in the sample's order. :class:`GuardFailure` if the structure differs."""
        return self._structure.leaves(call.args, call.kwargs, thorough=True)

    def changed_numbers(self, call: SampleCall) -> dict[int, Any] | None:
        """Leaf → compiled value, for the constants that differ; ``None`` if one of them is not a number.

        Raises:
            GuardFailure: the structure differs.
        """
        leaves = self.leaves(call)
        changed = {i: then for i, then in self._constants.items() if not self._same(leaves[i], then)}
        return changed if all(changed_number(leaves[i], then) for i, then in changed.items()) else None

    def compiled_shapes(self, call: SampleCall) -> list[tuple[str, tuple[Dim, ...], torch.Tensor]]:
        """Name, compiled shape and tensor of each tensor argument; empty if more than tensors and numbers differ."""
        try:
            leaves = self.leaves(call)
            if self.changed_numbers(call) is None:
                return []
        except GuardFailure:
            return []
        tensors = [leaves[i] for i in self.tensor_leaves]
        if not all(isinstance(each, torch.Tensor) and not is_nested(each) for each in tensors):
            return []
        return list(zip((self.paths[i] for i in self.tensor_leaves), self._shapes, tensors, strict=True))

    def sizes_fit(self, call: SampleCall) -> bool:
        """Whether all argument tensors have the compiled shapes; the structure must match."""
        shapes = self.compiled_shapes(call)
        if self.sizes is not None:
            return bool(shapes) and self._given.failure([tensor for *_, tensor in shapes]) is None
        return all(shape == tuple(tensor.shape) for _, shape, tensor in shapes)

    def _explain_constant(self, leaf: int, then: Any, now: Any) -> GuardFailure:
        what = f"value of argument {self.paths[leaf]}"
        return GuardFailure(STRUCTURE, what, f"compiled for {then!r}, called with {_brief(now)}")


class _Structure:
    """The arguments' pytree structure.

    Both checks compare types, keys and lengths with the same ``spec``: the fast one walks the values itself, quicker
    than ``pytree``; the thorough one flattens them with ``pytree``, which can name the difference.
    """

    def __init__(self, spec: pytree.TreeSpec, forward: Callable[..., Any], kin: Sequence[Any]):
        self._spec, self._kin = spec, kin
        self._num_positional = spec.child(0).num_children
        self._keywords = list(spec.child(1).context)
        self._shape = [_shape_of(part, i) for part in spec.children() for i in range(part.num_children)]
        self._is_flat, self._has_objects = not any(self._shape), has_objects(spec)
        #: Number of arguments if all are positional leaves: then only the number is compared.
        self.flat_count = self._num_positional if self._is_flat and not self._keywords else None
        self._signature = signature_of(forward)  # another condition guards forward itself
        parameters = {} if self._signature is None else self._signature.parameters
        self._positional = list(parameters)[: self._num_positional]
        self._collected = _collected(forward, self._keywords) if self._signature is None else []
        self._defaults = {name: parameter.default for name, parameter in parameters.items()}
        self._other_bindings: set[tuple] = set()  # other argument forms of calls that matched

    def write(self, source: CheckSource) -> None:
        """Writes the condition; the generated code assigns the arguments' leaves to ``leaves``."""
        find = f"leaves = {source.name(self.leaves, 'leaves of')}(args, kwargs, thorough)"
        if self.flat_count is None:
            source.add(find)
            source.refuse("leaves is None")
            return
        source.add("leaves = args", f"if thorough or kwargs or len(args) != {self.flat_count}:", f"    {find}")
        source.add("    if leaves is None:", "        return None")

    def leaves(self, args: tuple, kwargs: dict[str, Any], thorough: bool = False) -> list[Any] | None:
        """The leaves if structure and form are the sample's, or the form is an earlier match's; else ``None``.

        ``thorough``: binds any form to the signature; :class:`GuardFailure` if the structure differs.
        """
        if thorough:
            return self._flattened(args, kwargs)
        if self._other_bindings and (len(args), *kwargs) in self._other_bindings:
            args, kwargs = self._as_sampled(args, kwargs)
        if len(args) != self._num_positional or len(kwargs) != len(self._keywords) or self._is_reordered(kwargs):
            return None
        try:
            values = [*args, *[kwargs[name] for name in self._keywords]]
        except KeyError:
            return None
        if self._is_flat:
            return values
        if self._has_objects:
            values = packed_arguments(values)
        leaves: list[Any] = []
        fits = all(_take(*pair, leaves) for pair in zip(values, self._shape, strict=True))
        return leaves if fits and not (self._kin and self._has_kin(values)) else None

    def _has_kin(self, packed: Any) -> bool:
        return any(each is other for each in objects_of(packed) for other in self._kin)

    def _flattened(self, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
        other = None
        if len(args) != self._num_positional or kwargs.keys() != set(self._keywords):
            other = (len(args), *kwargs)
            args, kwargs = self._as_sampled(args, kwargs)
        if kwargs.keys() != set(self._keywords):
            detail = f"compiled for {sorted(self._keywords)}, called with {sorted(kwargs)}"
            raise GuardFailure(STRUCTURE, "keyword arguments", detail)
        if self._is_reordered(kwargs):
            detail = f"compiled for {self._keywords}, called with {list(kwargs)}"
            raise GuardFailure(STRUCTURE, "order of keyword arguments", detail)
        packed = packed_arguments((args, {name: kwargs[name] for name in self._keywords}))
        leaves, spec = pytree.tree_flatten(packed)
        if not same_structure(spec, self._spec):
            raise GuardFailure(STRUCTURE, *structure_difference(self._spec, spec))
        if self._has_kin(packed):
            raise GuardFailure(STRUCTURE, "an argument's identity", "an object that forward reads elsewhere, too")
        if other is not None:
            self._other_bindings.add(other)
        return leaves

    def _is_reordered(self, kwargs: dict[str, Any]) -> bool:
        """Whether forward's ``**kwargs`` has another order than the sample's; the order of named arguments is none."""
        return bool(self._collected) and [name for name in kwargs if name in self._collected] != self._collected

    def _as_sampled(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Signature binding: the call's arguments in the sample's form; unchanged if they cannot be bound to it.

        A parameter that the sample omitted must have its default.
        """
        if self._signature is None:
            return args, kwargs
        try:
            bound = self._signature.bind(*args, **kwargs).arguments
        except TypeError:
            return args, kwargs
        given = {*self._positional, *self._keywords}
        if any(name not in given and not _is_default(value, self._defaults[name]) for name, value in bound.items()):
            return args, kwargs
        values = {**self._defaults, **bound}
        return tuple([values[name] for name in self._positional]), {name: values[name] for name in self._keywords}


def _is_default(value: Any, default: Any) -> bool:
    """Whether a value means a parameter's default to forward, which may ask for a container's identity."""
    return value is default or (not isinstance(value, (list, tuple, dict)) and same(value, default))


def _collected(forward: Callable[..., Any], keywords: Sequence[str]) -> list[str]:
    """The keywords that forward's ``**kwargs`` collects, if there are several."""
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    count = 0 if code is None else code.co_argcount + code.co_kwonlyargcount
    named = code.co_varnames[code.co_posonlyargcount : count] if count else ()
    collected = [name for name in keywords if name not in named]
    return collected if len(collected) > 1 else []


def _shape_of(spec: pytree.TreeSpec, index: int) -> tuple | None:
    """The structure of one child for :func:`_take`: ``None`` for a leaf."""
    child = spec.child(index)
    if child.is_leaf():
        return None
    return child.type, child.context, [_shape_of(child, i) for i in range(child.num_children)], child


def same_structure(now: pytree.TreeSpec, then: pytree.TreeSpec) -> bool:
    """Whether two structures are equal, and the keys of their dictionaries as well by type (``1`` is not ``True``)."""
    is_same = now == then and same(dict_keys(now), dict_keys(then))
    return is_same and all(map(same_structure, now.children(), then.children()))


def _take(value: Any, shape: tuple | None, leaves: list[Any]) -> bool:
    """Appends the leaves of ``value`` if it has this structure; whether it has."""
    if shape is None:
        leaves.append(value)
        return True
    kind, context, children, spec = shape
    if type(value) is not kind:
        return False
    if kind is tuple or kind is list:
        fields = value
    elif kind is dict:
        if not same([*value], context):
            return False
        fields = value.values()
    else:
        found, now = pytree.tree_flatten(value)
        leaves += found
        return same_structure(now, spec)
    return len(fields) == len(children) and all(map(_take, fields, children, [leaves] * len(children)))


def _explain_type(path: str, now: Any) -> GuardFailure:
    if not isinstance(now, torch.Tensor):
        what = f"structure of argument {path}"
        return GuardFailure(STRUCTURE, what, f"a tensor was compiled, called with {_brief(now)}")
    return GuardFailure(ARGUMENTS, f"type of {path}", f"a tensor subclass, {type(now).__name__}")


def _brief(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:80]
