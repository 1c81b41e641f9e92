"""Dynamic scalars: a module and Python numbers that it uses → a twin of the module that takes them as 0-d tensors.

A number that is an argument or an attribute is a constant of the traced graph. A number that changes from call to call
(an annealed weight) is better an input. In the twin a :class:`Number` stands in its place: it scales and shifts float32
and float64 tensors as the Python number does, and any other use (a comparison, ``float()``, a shape, an argument of
another function) raises. So a twin that can be traced uses the number in no other way.

Why that is exact: eager computes ``x * 0.3`` in the tensor's type, with the number rounded to it; so does ``x * t``
for a 0-d tensor ``t`` of that type. (Half types round only the result, and are refused.) Both compute among numbers in
float64.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bridge.base.devices import HOST
from bridge.base.pytrees import packed_arguments, unpacked
from bridge.base.torch_autograd import checkpoint_frame
from bridge.base.torch_internals import pytree
from bridge.capture.twin import Twin

_EXACT = (torch.float32, torch.float64)
#: Integers are computed as float64: up to this bound, they and their products of two are exact.
_LARGEST_INT = 2**24
_LARGEST_FLOAT = torch.finfo(torch.float32).max
_LARGEST = 2.0**53

_ARITHMETIC = ("mul", "multiply", "add", "sub", "subtract", "div", "divide", "true_divide", "__rsub__", "__rdiv__")
_ARITHMETIC += ("mul_", "add_", "sub_", "div_")
"""Names of torch's functions of a tensor and a number that compute the same of a tensor and a 0-d tensor."""


class NotArithmeticError(TypeError):
    """A dynamic scalar is used otherwise than to scale and shift tensors."""


@dataclass(frozen=True)
class NumberPlace:
    """The place of a number: a leaf of the arguments or an attribute of a module.

    Attributes:
        kind: ``int`` or ``float``.
        leaf: its index among the leaves of ``(args, kwargs)``; ``None`` for an attribute.
        path, name: the dotted path of the attribute's module, and its name.
    """

    kind: type
    leaf: int | None = None
    path: str = ""
    name: str = ""


def is_number(value: Any, kind: type) -> bool:
    """Whether a value is a number of type ``kind`` within the bounds in which a 0-d float64 tensor is exact."""
    if type(value) is not kind or kind not in (int, float):
        return False
    return abs(value) <= (_LARGEST_INT if kind is int else _LARGEST_FLOAT)


def number_tensor(value: float, device: torch.device = HOST) -> torch.Tensor:
    """A 0-d float64 tensor of a number. A GPU fills it in its stream, because a copy from the host would wait."""
    if device == HOST:
        return torch.tensor(value, dtype=torch.float64, device=HOST)
    return torch.full((), value, dtype=torch.float64, device=device)


def with_dynamic_scalars(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    places: Sequence[NumberPlace],
    device: torch.device = HOST,
) -> tuple[nn.Module, tuple]:
    """A twin of ``module`` and its positional arguments: a tuple of the numbers' tensors on ``device``, then ``args``.

    The twin's modules are copies with the same tensors, so that the stand-ins stay inside.

    Raises:
        NotArithmeticError: ``module`` has ``forward`` as an instance attribute.
    """
    if "forward" in module.__dict__:
        raise NotArithmeticError("a forward of the module's own, which is not bound to a twin")
    twin = Twin(module, lambda tensor: tensor).module
    run = twin.forward
    owners = {place: twin.get_submodule(place.path) for place in places if place.leaf is None}
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [
        number_tensor(owners[place].__dict__[place.name] if place.leaf is None else leaves[place.leaf], device)
        for place in places
    ]

    def forward(numbers: tuple[torch.Tensor, ...], *args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves(packed_arguments((args, kwargs)))
        before = []
        for place, tensor in zip(places, numbers, strict=True):
            number = Number(tensor, _LARGEST_INT if place.kind is int else None)
            if place.leaf is not None:
                leaves[place.leaf] = number
                continue
            attributes = owners[place].__dict__
            before.append((attributes, place.name, attributes[place.name], number))
            attributes[place.name] = number
        args, kwargs = unpacked(pytree.tree_unflatten(leaves, spec))
        try:
            result = run(*args, **kwargs)
            if any(attributes.get(name) is not number for attributes, name, _, number in before):
                raise NotArithmeticError("a number that changes from call to call is set")
            return result
        finally:
            for attributes, name, value, _ in before:
                attributes[name] = value

    twin.__dict__["forward"] = forward
    return twin, (tuple(tensors), *args)


#: Names of the special methods of numbers, without underscores.
_USES = (
    "bool float int index complex hash str format abs eq ne lt le gt ge round trunc floor ceil pow rpow floordiv "
    "rfloordiv mod rmod divmod rdivmod truediv rtruediv mul rmul add radd sub rsub neg pos invert lshift rlshift "
    "rshift rrshift and rand or ror xor rxor reduce_ex getattr"
)


def refusing_all_use(kind: type) -> type:
    """Class decorator: a number's special methods that ``kind`` does not define raise :class:`NotArithmeticError`."""

    def refuse(self: Any, *_: Any) -> Any:
        raise NotArithmeticError("a number that changes from call to call is read")

    for name in (f"__{use}__" for use in _USES.split()):
        if name not in vars(kind) or vars(kind)[name] is None:  # __hash__ is None beside an __eq__
            setattr(kind, name, refuse)
    return kind


@refusing_all_use
class Number:
    """Stand-in for a Python number while forward is traced: a 0-d float64 tensor with exact arithmetic only.

    Args:
        tensor: its value.
        largest: for an int, a bound on its absolute value; ``None`` for a float.
    """

    __slots__ = ("_largest", "_tensor")

    def __init__(self, tensor: torch.Tensor, largest: float | None):
        self._tensor = tensor
        self._largest = largest

    @property
    def __class__(self) -> type:
        return float if self._largest is None else int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if getattr(func, "__name__", "") not in _ARITHMETIC or kwargs or len(args) != 2:
            raise NotArithmeticError(f"{getattr(func, '__name__', func)} of a number that changes from call to call")
        tensor, number = args
        if type(number) is cls:
            return func(tensor, number._like(tensor))
        return func(tensor._like(number), number)  # torch.mul(0.3, x)

    def _like(self, tensor: Any) -> torch.Tensor:
        """The number, rounded to the tensor's dtype as in eager."""
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _EXACT:
            raise NotArithmeticError("a number that changes, beside something else than a tensor of 32 or 64 bits")
        return self._tensor.to(tensor.dtype)

    def _with(self, other: Any, compute: Callable[[Any, Any], Any], largest: Callable[[Any, Any], Any]) -> Any:
        """``compute(self, other)`` for a constant or another number; ``largest`` computes the bound of an int."""
        if type(other) is Number:
            tensor, bound = other._tensor, other._largest
        elif type(other) in (int, float):
            if type(other) is int and abs(other) > _LARGEST_INT:
                raise NotArithmeticError("a large integer")
            tensor, bound = float(other), abs(other) if type(other) is int else None
        else:
            return NotImplemented
        if self._largest is None or bound is None:
            both = None
        elif (both := largest(self._largest, bound)) > _LARGEST:
            raise NotArithmeticError("integers that may become too large for float64")
        return Number(compute(self._tensor, tensor), both)

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return other * self._like(other)
        if self._largest is not None and not (type(other) is float or (type(other) is int and other >= 0)):
            raise NotArithmeticError("an integer that may get another sign: 0 has none, -0.0 has")
        return self._with(other, operator.mul, operator.mul)

    def __add__(self, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return other + self._like(other)
        return self._with(other, operator.add, operator.add)

    def __sub__(self, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return self._like(other) - other
        return self._with(other, operator.sub, operator.add)

    def __rsub__(self, other: Any) -> Any:
        return self._with(other, lambda number, constant: constant - number, operator.add)

    def __truediv__(self, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return other.reciprocal() * self._like(other)
        if type(other) not in (int, float) or other == 0:  # Python raises where a number is divided by zero
            raise NotArithmeticError("a number divided by another one that changes")
        return Number(self._tensor / float(other), None)

    def __neg__(self) -> Number:
        if self._largest is not None:
            raise NotArithmeticError("an integer with another sign: 0 has none, -0.0 has")
        return Number(-self._tensor, None)

    def __pos__(self) -> Number:
        return self

    __radd__, __rmul__ = __add__, __mul__

    def __repr__(self) -> str:
        return "a dynamic scalar"


# Counters: integers on the module that each call of forward counts up by a constant, ``self.calls += 1``.
#
# A compiled call runs no Python; it adds the constant afterwards. That is exact if forward uses the value in no other
# way: so in the fake run a stand-in that supports only addition takes each counter's place
# (:mod:`bridge.capture.steady_call`).


@dataclass(frozen=True)
class Counter:
    """An attribute that each call counts up.

    Attributes:
        path, name: the dotted path of its module, and its name.
        step: the increment per call; may be negative.
    """

    path: str
    name: str
    step: int


@refusing_all_use
class Counted:
    """Stand-in for a counter: the sum added to its unknown old value; any other use raises."""

    __slots__ = ("place", "step")

    def __init__(self, step: int, place: int):
        self.step = step
        self.place = place

    @property
    def __class__(self) -> type:
        return int

    def __add__(self, other: Any) -> Counted:
        if type(other) is not int:
            raise NotArithmeticError("a counter to which something else than a constant is added")
        if checkpoint_frame() is not None:
            raise NotArithmeticError("a counter that eager's backward counts up again")
        return Counted(self.step + other, self.place)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Counted:
        return self + -other if type(other) is int else NotImplemented
