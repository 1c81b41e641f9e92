"""Number inputs: a module and Python numbers that it reads → a twin of the module that takes them as 0-d tensors.

A number that is an argument or an attribute is a constant of the traced graph. One that changes from call to call (a
weight that is annealed) had better be an input. In the twin a :class:`Number` stands in its place: it scales and shifts
tensors of 32 or 64 bits as the Python number does, and any other use of it (a comparison, ``float()``, a shape, an
argument of another function) raises. So a twin that can be traced does nothing else with the number.

Why that is exact: eager computes ``x * 0.3`` in the tensor's type, with the number rounded to it; so does ``x * t``
for a 0-d tensor ``t`` of that type (half types round only the result, and are refused). Arithmetic among numbers is
float64's, on both sides.
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

__all__ = ["Counted", "Counter", "NotArithmeticError", "NumberPlace", "is_number", "number_tensor"]
__all__ += ["with_dynamic_scalars"]

_EXACT = (torch.float32, torch.float64)
#: Integers are computed as float64: up to here each is one, and products of two such are.
_LARGEST_INT = 2**24
_LARGEST_FLOAT = torch.finfo(torch.float32).max
_LARGEST = 2.0**53

_ARITHMETIC = {
    "mul": operator.mul,
    "multiply": operator.mul,
    "add": operator.add,
    "sub": operator.sub,
    "subtract": operator.sub,
    "div": operator.truediv,
    "divide": operator.truediv,
    "true_divide": operator.truediv,
    "mul_": torch.Tensor.mul_,
    "add_": torch.Tensor.add_,
    "sub_": torch.Tensor.sub_,
    "div_": torch.Tensor.div_,
    "__rsub__": lambda tensor, number: number - tensor,
    "__rdiv__": lambda tensor, number: tensor.reciprocal() * number,  # as torch does
}


class NotArithmeticError(TypeError):
    """A number that was to become an input is used for something else than to scale and shift tensors."""


@dataclass(frozen=True)
class NumberPlace:
    """Where a number is found.

    Attributes:
        kind: ``int`` or ``float``.
        leaf: its index among the leaves of ``(args, kwargs)``; ``None`` for an attribute.
        path, name: the attribute's module, as a dotted path, and name.
    """

    kind: type
    leaf: int | None = None
    path: str = ""
    name: str = ""


def is_number(value: Any, kind: type) -> bool:
    """Whether a value is a number of this kind that a 0-d float64 tensor holds exactly, in eager's reach."""
    if type(value) is not kind or kind not in (int, float):
        return False
    return abs(value) <= (_LARGEST_INT if kind is int else _LARGEST_FLOAT)


def number_tensor(value: float, device: torch.device = HOST) -> torch.Tensor:
    """The input for a number. A GPU fills it in its stream: a copy from the host would wait for it."""
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
    """A twin of ``module`` and its positional arguments: a tuple of the numbers' tensors, then ``args``.

    The numbers lie on ``device``. The twin's modules are objects of their own with the same tensors, so that nobody
    else sees the stand-ins.

    Raises:
        NotArithmeticError: the module cannot have a twin.
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
            before.append((attributes, place.name, attributes[place.name]))
            attributes[place.name] = number
        args, kwargs = unpacked(pytree.tree_unflatten(leaves, spec))
        try:
            return run(*args, **kwargs)
        finally:
            for attributes, name, value in before:
                attributes[name] = value

    twin.__dict__["forward"] = forward
    return twin, (tuple(tensors), *args)


#: What Python may ask of a number, besides the arithmetic that a stand-in has.
_USES = (
    "bool float int index complex hash str format abs eq ne lt le gt ge round trunc floor ceil pow rpow floordiv "
    "rfloordiv mod rmod divmod rdivmod truediv rtruediv mul rmul add radd sub rsub neg pos invert lshift rlshift "
    "rshift rrshift and rand or ror xor rxor reduce_ex getattr"
)


def refusing_all_use(kind: type) -> type:
    """A class decorator: what a number can do and ``kind`` does not define raises :class:`NotArithmeticError`."""

    def refuse(self: Any, *_: Any) -> Any:
        raise NotArithmeticError("a number that changes from call to call is read")

    for name in (f"__{use}__" for use in _USES.split()):
        if name not in vars(kind) or vars(kind)[name] is None:  # __hash__ is None beside an __eq__
            setattr(kind, name, refuse)
    return kind


@refusing_all_use
class Number:
    """Stands for a Python number while forward is traced: a 0-d float64 tensor that can do what an input can.

    Args:
        tensor: its value.
        largest: of an int, the largest absolute value that it can have; ``None`` for a float.
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
        compute = _ARITHMETIC.get(getattr(func, "__name__", ""))
        if compute is None or kwargs or len(args) != 2:
            raise NotArithmeticError(f"{getattr(func, '__name__', func)} of a number that changes from call to call")
        tensor, number = args
        if type(number) is cls:
            return compute(tensor, number._like(tensor))
        return compute(tensor._like(number), number)  # torch.mul(0.3, x)

    def _like(self, tensor: Any) -> torch.Tensor:
        """The number, rounded to the tensor's type as eager rounds it."""
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _EXACT:
            raise NotArithmeticError("a number that changes, beside something else than a tensor of 32 or 64 bits")
        return self._tensor.to(tensor.dtype)

    def _with(self, other: Any, compute: Callable[[Any, Any], Any], largest: Callable[[Any, Any], Any]) -> Any:
        """A number computed of this one and a constant or another number; the bound on an int goes the same way."""
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
        return "a number input"


# Counters: integers on the module that each call of forward counts up by a constant, ``self.calls += 1``.
#
# A compiled call runs no Python; it adds the constant afterwards. That is the same function of the old value if forward
# does nothing else with it: so in the run on fake tensors a stand-in that can only be added to takes each counter's
# place (:mod:`bridge.capture.steady_call`).


@dataclass(frozen=True)
class Counter:
    """An attribute that each call counts up.

    Attributes:
        path, name: its module, as a dotted path, and its name.
        step: what a call adds; may be negative.
    """

    path: str
    name: str
    step: int


@refusing_all_use
class Counted:
    """Stands for a counter: its old value, which nothing knows, and what was added to it; any other use raises."""

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
