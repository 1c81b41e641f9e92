"""Sample call: the user's sample → arguments, decided by forward's signature → forward's call after pre-hooks."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import AdditionalInputs, Dim, ShapesCollection

from bridge.base.errors import Unsupported, UnsupportedModule, swallowed
from bridge.base.pytrees import packed_arguments, unpacked
from bridge.base.torch_internals import COMPILED_CALL, pytree, pytree_node_type
from bridge.capture.draws import IsolatedRNG
from bridge.capture.refusals import check_call
from bridge.guards import Reads, recorded_reads, undo
from bridge.state import SampleCall, generators_put_back

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def normalize_sample(
    module: nn.Module, sample_input: Any, sample_kwargs: Mapping[str, Any] | None
) -> tuple[tuple, dict[str, Any]]:
    """Normalizes a sample → ``(args, kwargs)`` of the sample call.

    A tensor, a dataclass or a similar object is one argument. A tuple or a list holds the positional arguments, and a
    mapping (a dict, an ``OrderedDict``, a ``UserDict``, transformers' ``BatchEncoding``) the keyword arguments.
    ``None`` beside ``sample_kwargs`` is no argument. A list, a named tuple or a mapping that does not fit forward's
    signature this way, but fits as the only positional argument, is that argument.

    Raises:
        TypeError: for anything else, for keyword arguments given twice, and for a sample that fits the signature in
            both ways; the message has both ways to write it.

    Example:
        >>> normalize_sample(nn.Linear(3, 2), {"input": x}, None)
        ((), {'input': x})
    """
    if sample_kwargs is not None and not isinstance(sample_kwargs, Mapping):
        raise TypeError(f"sample_kwargs: wanted a mapping of keyword arguments, got {type(sample_kwargs).__name__}")
    kwargs = dict(sample_kwargs or {})
    if isinstance(sample_input, torch.Tensor):
        return (sample_input,), kwargs
    if type(sample_input) is tuple:
        return sample_input, kwargs
    if sample_input is None and sample_kwargs is not None:
        return (), kwargs
    if isinstance(sample_input, tuple | list):
        return _sequence(module, sample_input, kwargs)
    if isinstance(sample_input, Mapping):
        return _mapping(module, sample_input, kwargs)
    if packed_arguments(sample_input) is not sample_input:
        return (sample_input,), kwargs
    raise TypeError(
        "sample_input: wanted a tensor or a dataclass (one positional argument), a tuple or a list (positional "
        f"arguments) or a mapping (keyword arguments), got {type(sample_input).__name__}"
    )


def _sequence(module: nn.Module, sample: tuple | list, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    several = tuple(sample), kwargs
    if not _takes_one(module, sample, kwargs):
        return several
    if not _fits(module, *several):
        return (sample,), kwargs
    kind = type(sample).__name__
    raise TypeError(
        f"sample_input: a {kind} of {len(sample)} can be {_forward(module)}'s positional arguments, or one argument. "
        f"Give sample_input=tuple(sample) for module(*sample), sample_input=(sample,) for module(sample)"
    )


def _mapping(module: nn.Module, sample: Mapping, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    twice = sorted(map(str, set(sample) & set(kwargs)))
    fits_as_one = _takes_one(module, sample, kwargs)
    if all(isinstance(name, str) for name in sample):
        several = (), {**sample, **kwargs}
        named = set(sample) & set(_named(module))
        fits = not twice and _fits(module, *several)
        if fits and (named or not fits_as_one or not sample):
            return several
        if not fits_as_one:
            if twice:
                raise TypeError(f"sample_kwargs repeats what sample_input gives: {', '.join(twice)}")
            return several  # fits in no way: the call raises its own error
        if fits:
            raise TypeError(
                f"sample_input: a mapping with the keys {', '.join(sample)} can be {_forward(module)}'s keyword "
                "arguments, or one argument. Give sample_input=(), sample_kwargs=dict(sample) for module(**sample), "
                "sample_input=(sample,) for module(sample)"
            )
        if named:
            reason = "some of its keys are names of parameters, and it does not fit them"
            raise TypeError(
                f"sample_input: a mapping with the keys {', '.join(sample)} for {_forward(module)}: {reason}. Give the "
                "keyword arguments that it takes, or sample_input=(sample,) for module(sample)"
            )
    return (sample,), kwargs


def _takes_one(module: nn.Module, sample: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the sample fits as the only positional argument, for a named parameter (``*args`` proves nothing)."""
    return _fits(module, (sample,), kwargs) and any(
        each.kind not in _VARIADIC for each in list(inspect.signature(module.forward).parameters.values())[:1]
    )


def _fits(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> bool:
    try:
        inspect.signature(module.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):  # a forward written in C has no signature
        return False
    return True


def _named(module: nn.Module) -> list[str]:
    """The names of forward's parameters without ``*args`` and ``**kwargs``."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [each.name for each in parameters if each.kind not in _VARIADIC]


def _forward(module: nn.Module) -> str:
    return f"{type(module).__name__}.forward{inspect.signature(module.forward)}"


# Dynamic shapes: ``dynamic_shapes=`` in torch.export's form and a sample → the dynamic dimensions of its leaves.
#
# The specification is checked against the sample: its structure, names, static sizes and ranges. Dimensions with one
# name get one symbol; the capture finds further equal ones.


_FORM = "torch.export's form: None, or by argument (a dict by name, a tuple by position) and by dimension"
LEAST = 2
"""The smallest dynamic size: PyTorch treats 0 (empty) and 1 (broadcasting) specially, so each has its own program."""


@dataclass(frozen=True)
class DynamicDim:
    """A dimension that the user specified as dynamic.

    Attributes:
        leaf: the tensor's index among the leaves of ``(args, kwargs)``; ``None`` where the sample has no tensor.
        dimension: its index, from 0.
        place: its place in the specification, as in ``"['x'][0]"``.
        dim: the specification's words, as in ``"batch"`` or ``"Dim.AUTO"``.
        name: name of the extent: the user's, else made of the argument's name and the dimension.
        low, high: the least and greatest size; ``high=None``: no bound.
        required: whether a program for the sample's size alone is an error; ``Dim.AUTO`` allows it.
    """

    leaf: int | None
    dimension: int
    place: str
    dim: str
    name: str
    low: int
    high: int | None
    required: bool


#: Pseudo-dimension: makes sizes dynamic that a call counts from its tensors (:mod:`bridge.capture.counted_dims`).
ALL_COUNTS = DynamicDim(-1, 0, "counted sizes", "Dim.AUTO", "count", LEAST, None, required=False)


def dynamic_dims(call: SampleCall, dynamic_shapes: Any) -> tuple[DynamicDim, ...]:
    """The dynamic dimensions of a sample call, in the specification's order.

    Args:
        dynamic_shapes: as for ``torch.export.export``: nested dicts, tuples and lists by argument, for a tensor
            ``None`` or one entry per dimension: ``None``, ``Dim.STATIC`` or its size for a static one, a ``Dim``,
            ``Dim.DYNAMIC`` or ``Dim.AUTO``; or a ``ShapesCollection`` or ``AdditionalInputs``.

    Raises:
        TypeError, ValueError: ``dynamic_shapes`` has another form, or does not fit this sample.
    """
    module, args, kwargs = call.module, call.args, call.kwargs
    if isinstance(dynamic_shapes, ShapesCollection | AdditionalInputs):
        dynamic_shapes = dynamic_shapes.dynamic_shapes(module, args, kwargs)
    if dynamic_shapes is None:
        return ()
    if not isinstance(dynamic_shapes, dict | tuple | list):
        raise TypeError(f"dynamic_shapes: wanted {_FORM}, got {type(dynamic_shapes).__name__}")
    if not dynamic_shapes:
        return ()
    leaves, spec = pytree.tree_flatten((args, kwargs))
    # one object per leaf, so that its id identifies it: a caller may pass a tensor twice
    leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    place_of = {id(leaf): index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    try:
        sample = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except TypeError:
        return ()  # the sample does not fit forward: the run raises that error
    values = sample if isinstance(dynamic_shapes, dict) else tuple(sample.values())
    found = tuple(_Reader(list(sample), place_of).inside(dynamic_shapes, values, ()))
    _check_names(found, leaves)
    return found


def refuse_numbers(module_name: str, dims: tuple[DynamicDim, ...]) -> None:
    """Raises :class:`UnsupportedModule` for a dynamic value that is no dimension of a tensor."""
    reason = "a number that varies, and is no size of a tensor"
    found = [Unsupported(f"dynamic_shapes{each.place}", "forward", reason) for each in dims if each.leaf is None]
    if found:
        raise UnsupportedModule(module_name, found)


class _Reader:
    """Walks a specification beside the sample; a path holds the keys down to the current value."""

    def __init__(self, names: list[str], leaf_of: dict[int, int]):
        self._names = names
        self._leaf_of = leaf_of

    def inside(self, spec: Any, values: dict[str, Any] | tuple, path: tuple) -> Iterator[DynamicDim]:
        """Yields the dynamic dimensions inside a dict (``values`` a dict) or another container (a tuple)."""
        place = _place(path)
        if isinstance(values, dict):
            if not isinstance(spec, dict):
                raise TypeError(f"dynamic_shapes{place}: wanted a dict of {list(values)}, got {type(spec).__name__}")
            if spec.keys() != values.keys():
                raise ValueError(f"dynamic_shapes{place}: wanted what the sample has, {list(values)}, got {list(spec)}")
            pairs = [(key, spec[key], values[key]) for key in values]
        else:
            entries = list(spec.values()) if isinstance(spec, dict) else spec
            if not isinstance(entries, tuple | list):
                raise TypeError(f"dynamic_shapes{place}: wanted {len(values)} entries, got {type(spec).__name__}")
            if len(entries) != len(values):
                raise ValueError(
                    f"dynamic_shapes{place}: wanted as many as the sample has, {len(values)}, got {len(entries)}"
                )
            pairs = list(zip(range(len(values)), entries, values, strict=True))
        for key, entry, value in pairs:
            yield from self._of_value(entry, value, (*path, key))

    def _of_value(self, spec: Any, value: Any, path: tuple) -> Iterator[DynamicDim]:
        if spec is None:
            return
        if isinstance(value, torch.Tensor):
            yield from self._of_tensor(spec, value, path)
        elif isinstance(value, dict) and (isinstance(spec, dict) or type(value) is dict):
            yield from self.inside(spec, dict(value), path)
        elif value is not None and not pytree.tree_structure(value).is_leaf():
            node = pytree.SUPPORTED_NODES[pytree_node_type(value)]
            yield from self.inside(spec, tuple(node.flatten_fn(value)[0]), path)
        elif _is_dim(spec):
            yield DynamicDim(None, 0, _place(path), _words(spec), self._name(spec, path), LEAST, None, required=True)
        elif spec is not Dim.STATIC:
            kind = type(value).__name__
            raise TypeError(f"dynamic_shapes{_place(path)}: wanted None where the sample has a {kind}, got {spec!r}")

    def _of_tensor(self, spec: Any, tensor: torch.Tensor, path: tuple) -> Iterator[DynamicDim]:
        count, place = tensor.dim(), _place(path)
        if isinstance(spec, dict):
            entries = spec
            if wrong := [key for key in spec if type(key) is not int or not -count <= key < count]:
                raise ValueError(f"dynamic_shapes{place}: no dimension {wrong[0]!r}, the sample has {count} there")
        elif isinstance(spec, tuple | list):
            entries = dict(enumerate(spec))
            if len(spec) != count:
                raise ValueError(
                    f"dynamic_shapes{place}: wanted one entry for each of {count} dimensions, got {len(spec)}"
                )
        else:
            raise TypeError(
                f"dynamic_shapes{place}: wanted None, or a dict, a tuple or a list by dimension, "
                f"got {type(spec).__name__}"
            )
        for dimension, entry in entries.items():
            size, here = tensor.shape[dimension], _place((*path, dimension))
            if entry is None or entry is Dim.STATIC:
                continue
            if type(entry) is int:
                if entry != size:
                    raise ValueError(f"dynamic_shapes{here}: wanted the sample's {size}, got {entry}")
            elif _is_dim(entry):
                dimension %= count
                name, leaf = self._name(entry, (*path, dimension)), self._leaf_of[id(tensor)]
                low, high = _bounds(entry)
                required = not isinstance(entry, type(Dim.AUTO)) or entry.type is not Dim.AUTO.type
                made = DynamicDim(leaf, dimension, here, _words(entry), name, max(low, LEAST), high, required)
                if not (size < LEAST and not required):  # Dim.AUTO is static for sizes 0 and 1
                    _check_sample(made, size)
                    yield made
            else:
                raise TypeError(f"dynamic_shapes{here}: wanted None, a Dim or a number, got {entry!r}")

    def _name(self, dim: Any, path: tuple) -> str:
        own = getattr(dim, "__name__", "")
        if own.isidentifier():
            return own
        keys = [self._names[path[0]] if isinstance(path[0], int) else path[0], *path[1:]]
        return "_".join(map(str, keys))


def _check_sample(made: DynamicDim, size: int) -> None:
    if size < made.low or (made.high is not None and size > made.high):
        bounds = f"from {made.low}" + ("" if made.high is None else f" to {made.high}")
        raise ValueError(
            f"dynamic_shapes{made.place}: wanted a sample of a size {bounds} for dimension {made.dim}, got {size}"
        )


def _check_names(found: tuple[DynamicDim, ...], leaves: list[Any]) -> None:
    """Checks that dimensions with one name have one size in the sample."""
    sizes: dict[str, tuple[int, str]] = {}
    for each in found:
        if each.leaf is None:
            continue
        size = leaves[each.leaf].shape[each.dimension]
        first, place = sizes.setdefault(each.name, (size, each.place))
        if first != size:
            raise ValueError(
                f"dynamic_shapes{each.place}: wanted the size that {each.dim} has at {place}, {first}, got {size}"
            )


def _place(path: tuple) -> str:
    return "".join(f"[{key!r}]" for key in path)


def _is_dim(value: Any) -> bool:
    return isinstance(value, Dim) or (type(value) is type(Dim.AUTO) and value is not Dim.STATIC)


def _words(dim: Any) -> str:
    return getattr(dim, "__name__", None) or f"Dim.{dim.type.name}"


def _bounds(dim: Any) -> tuple[int, int | None]:
    """``(low, high)`` of a dimension; ``Dim`` has sympy's numbers, of which infinity becomes ``None``."""
    low, high = (str(bound) for bound in (dim.min, dim.max))
    return int(low) if low.lstrip("-").isdigit() else LEAST, int(high) if high.isdigit() else None


# Forward pre-hooks of a dispatched module: a sample → forward's call, in the state that the hooks leave.
#
# A module's own hooks run around the compiled call. So forward sees the attributes that they set (a normalized weight,
# a mask) and the arguments that they return. Adding a sample runs the hooks once, and undoes their changes at the end.


@contextmanager
def after_pre_hooks(call: SampleCall) -> Iterator[SampleCall]:
    """Yields forward's call; while active, the attributes that the module's forward pre-hooks set are set."""
    module = call.module
    args, kwargs = _as_called(module, *unpacked((call.args, call.kwargs)))
    hooks = module._forward_pre_hooks
    if not hooks:
        yield SampleCall(module, args, kwargs).as_pytree()
        return
    check_call(SampleCall(module, args, kwargs).as_pytree())  # a shard's hook would gather it
    with undo(module) as before:
        reads = recorded_reads(Reads({}, module.named_modules()))
        with IsolatedRNG(restores=True), generators_put_back(), reads.recorded():
            for key, hook in hooks.items():
                args, kwargs = _hooked(module, key in module._forward_pre_hooks_with_kwargs, hook, args, kwargs)
    left = before.take_back()
    if left is None:
        yield SampleCall(module, args, kwargs).as_pytree()
        return
    left.do()
    try:
        yield SampleCall(module, args, kwargs).as_pytree()
    finally:
        left.undo()


class _Given(BaseException):
    """The arguments of a call; no ``except Exception`` catches it."""


def _as_called(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments that ``nn.Module.__call__`` gets, if the module's class overrides ``__call__``."""
    if type(module).__call__ is nn.Module.__call__:
        return args, kwargs
    thread, own = threading.get_ident(), module.__dict__
    before = own.get(COMPILED_CALL)

    def given(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return (before or module._call_impl)(*args, **kwargs)
        raise _Given(args, kwargs)

    own[COMPILED_CALL] = given
    try:
        with IsolatedRNG(restores=True), generators_put_back():
            module(*args, **kwargs)
    except _Given as found:
        return found.args
    except Exception as error:  # noqa: BLE001 - eager's own error, which the capture reports
        swallowed(error)
    finally:
        own[COMPILED_CALL] = before
        if before is None:
            del own[COMPILED_CALL]
    return args, kwargs


def _hooked(module: nn.Module, keywords: bool, hook: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
    result = hook(module, args, kwargs) if keywords else hook(module, args)
    if result is None:
        return args, kwargs
    if keywords:
        return result
    return (result if isinstance(result, tuple) else (result,)), kwargs
