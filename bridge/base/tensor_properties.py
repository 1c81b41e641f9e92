"""Tensor properties: all properties that compiled code relies on, and a quick test of a list of tensors for them.

The quick test is Dynamo's own guard, which compares a list of tensors in one call: 60 ns a tensor instead of 400 ns
property by property. It is not a public interface, so it is tested once per process, on tensors that differ in each of
the properties; if it is missing or overlooks one of them, the properties are compared one by one.

Views of complex tensors: compiled code takes and returns real and imaginary parts in a last dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter, eq
from typing import Any, NamedTuple

import torch
from torch import nn

from bridge.base.devices import HOST
from bridge.base.torch_internals import VF, neg_view, tensor_guards

#: Checked before Dynamo's guard, which ends the process over a nested tensor, since that has no strides.
is_nested = attrgetter("is_nested")


@dataclass(frozen=True)
class Property:
    """A property that a call's tensor must share with the compiled sample's.

    Attributes:
        name: its key.
        read: its value, comparable with ``==``.
        differing: tensors that differ from ``torch.zeros(2, 3)`` in it, to test a quick comparison.
        field: its name in a failure message.
        show: its value in a failure message.
        words: a text that replaces the values in a failure message.
        same: (present value, expected value, shape) → whether different values mean the same, where they can.
    """

    name: str
    read: Callable[[torch.Tensor], Any]
    differing: Callable[[], list[Any]]
    field: str = ""
    show: Callable[[Any], Any] = lambda value: value
    words: str = ""
    same: Callable[[Any, Any, torch.Size], bool] | None = None


def bits_of(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor as bytes."""
    return tensor.detach().to(HOST).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same_strides(now: tuple[int, ...], then: tuple[int, ...], shape: torch.Size) -> bool:
    """Whether strides are equal where an extent is not 0 or 1: draws and results follow them."""
    return all(a == b for a, b, extent in zip(now, then, shape, strict=True) if extent > 1)


def span_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last of a tensor, including gaps."""
    if 0 in shape:
        return 0
    return 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))


def _inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(2, 3)


def _swapped() -> torch.Tensor:
    tensor = torch.zeros(2, 3)
    tensor.data = torch.zeros(3, 2)
    return tensor


def _zeros(**options: Any) -> Callable[[], list[torch.Tensor]]:
    return lambda: [torch.zeros(2, 3, **options)]


class _Subclass(torch.Tensor):
    pass


#: In the order of the reasons. Only strided tensors have strides; nested ones do not even have a shape.
PROPERTIES = (
    # Dynamo's guard is never handed a nested tensor.
    Property("nested", is_nested, lambda: [], "layout", words="a nested tensor"),
    Property("shape", attrgetter("shape"), lambda: [torch.zeros(3, 2), torch.zeros(2, 3, 1), _swapped()], show=tuple),
    Property("dtype", attrgetter("dtype"), lambda: [torch.zeros(2, 3).double(), torch.zeros(2, 3).bfloat16()]),
    Property("requires_grad", attrgetter("requires_grad"), _zeros(requires_grad=True)),
    Property("device", attrgetter("device"), _zeros(device="meta")),
    Property("layout", attrgetter("layout"), lambda: [torch.zeros(2, 3).to_sparse()]),
    Property(
        "sign bit",
        torch.Tensor.is_neg,
        lambda: [neg_view(torch.zeros(2, 3))],
        "layout",
        words="a tensor with its sign bit set aside (is_neg)",
    ),
    Property(
        "strides",
        torch.Tensor.stride,
        lambda: [torch.zeros(3, 2).t(), torch.zeros(2, 1).expand(2, 3), torch.zeros(2, 6)[:, ::2]],
        same=same_strides,
    ),
)


def properties_of(tensor: torch.Tensor) -> list[Any]:
    """All properties, comparable with ``==``; for a nested or sparse tensor, those without strides."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        sizes = [] if tensor.is_nested else tensor.shape
        return [tensor.is_nested, tensor.layout, tensor.dtype, tensor.device, tensor.requires_grad, *sizes]
    return [each.read(tensor) for each in PROPERTIES]


#: Additional properties of a quick comparison.
_OTHERS = (type, torch.Tensor.is_inference)


class TensorChecks(NamedTuple):
    """A test of a call's tensors for equal properties. It may say no where only torch's modes differ.

    Attributes:
        exact: tensors, as positional arguments → whether they match; Dynamo's guard in C, where it is used, refuses a
            list that holds a tensor twice.
        again: a list that holds a tensor twice → whether it matches; false for other lists.
    """

    exact: Callable[..., bool]
    again: Callable[[Sequence[torch.Tensor]], bool]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> bool:
        return self.exact(*tensors) or self.again(tensors)


def tensor_checks(tensors: Sequence[torch.Tensor], given_twice: bool = True) -> TensorChecks:
    """The test for tensors with the properties of a sample, which it does not keep alive.

    ``given_twice``: whether it accepts a tensor given twice where the sample's are different; faster to make without.
    """
    if tensors and _dynamo_is_exact():
        if not given_twice and len(set(map(id, tensors))) == len(tensors):
            return TensorChecks(_dynamos(tensors), _never)
        return _by_dynamo(tensors)
    one_by_one = _by_property(tensors)
    return TensorChecks(lambda *now: one_by_one(now), _never)


def _never(tensors: Sequence[torch.Tensor]) -> bool:
    return False


def _by_dynamo(tensors: Sequence[torch.Tensor]) -> TensorChecks:
    one_by_one = _by_property(tensors)
    return TensorChecks(_dynamos(tensors), lambda now: len(set(map(id, now))) < len(now) and one_by_one(now))


def _dynamos(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    return tensor_guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def _by_property(tensors: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], bool]:
    reads = [*_OTHERS, *(each.read for each in PROPERTIES)]

    def values(of: Sequence[torch.Tensor]) -> Iterator[Any]:
        return (read(tensor) for tensor in of for read in reads)

    count, expected = len(tensors), list(values(tensors))
    return lambda now: len(now) == count and all(map(eq, values(now), expected))


@functools.cache
def _dynamo_is_exact() -> bool:
    """Whether Dynamo's guard exists, accepts an equal tensor, and sees every difference that matters."""
    sample = torch.zeros(2, 3)
    try:
        check = _by_dynamo([sample])
    except (ImportError, AttributeError, TypeError, ValueError):
        return False
    different = [tensor for each in PROPERTIES for tensor in each.differing()]
    different += [nn.Parameter(torch.zeros(2, 3), requires_grad=False), torch.zeros(2, 3).as_subclass(_Subclass), 3]
    different.append(_inference_tensor())
    return check([torch.ones(2, 3)]) and not any(check([each]) for each in different)


def as_parts(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as a real view of its parts, which shares memory and gradients; a real tensor itself.

    A pending conjugation is computed first.
    """
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


as_complex: Callable[[torch.Tensor], torch.Tensor] = torch.view_as_complex
"""The complex view of a real tensor with parts in its last dimension."""


def is_parts_view(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether one of two tensors in one memory is complex and the other shows its parts unchanged (not conjugated)."""
    if view.is_complex() == base.is_complex() or view.is_conj() or base.is_conj():
        return False
    return view.dtype.to_real() == base.dtype.to_real()


def offset_in(view: torch.Tensor, base: torch.Tensor) -> int:
    """The offset of a view from the first element of ``base``; in real elements if one of the two is complex."""
    if view.is_complex() == base.is_complex():
        return view.storage_offset() - base.storage_offset()
    return view.storage_offset() * (1 + view.is_complex()) - base.storage_offset() * (1 + base.is_complex())


def view_in(
    base: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """The view of this dtype, shape and strides at an offset of :func:`offset_in`. In a conjugated ``base``, imaginary
    parts have their sign bit set aside, as in eager."""
    if dtype.is_complex == base.is_complex():
        return base.as_strided(shape, stride, base.storage_offset() + offset)
    if base.is_conj() and not any(step % 2 for step in stride):
        view = view_in(base.conj(), dtype, shape, stride, offset)
        return neg_view(view) if offset % 2 else view
    parts = as_parts(base)
    if not dtype.is_complex:
        return parts.as_strided(shape, stride, parts.storage_offset() + offset)
    pairs = (*shape, 2), (*(2 * step for step in stride), 1)
    return as_complex(parts.as_strided(*pairs, parts.storage_offset() + offset))


def laid_out(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """The tensor with these strides, which may repeat elements: itself, or a copy."""
    if tuple(tensor.stride()) == tuple(stride):
        return tensor
    once = tensor[tuple(slice(0, 1) if not step else slice(None) for step in stride)]
    own = VF.empty_strided(once.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(once)
    return own.expand(tensor.shape)
