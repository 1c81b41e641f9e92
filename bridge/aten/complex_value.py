"""Complex values in the importer: a complex tensor of the traced graph → two Relax values, real and imaginary part.

Inputs and outputs of the compiled function are real: the two parts in a last dimension, as
``torch.view_as_real`` shows a complex tensor without a copy. The gradient of a real loss with respect to that view is
PyTorch's gradient of the complex tensor, seen the same way; so nothing after the importer knows complex numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from tvm import relax

from autodiff.ir import Expr, shape
from bridge.aten.registry import UnsupportedUse, dims
from bridge.capture import TensorMetadata

PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}
"""Complex types → the types of their parts."""


@dataclass(frozen=True)
class Complex:
    """A complex tensor as two real ones of its shape; ``packed``: the value with both in its last dimension, if any."""

    real: Expr
    imaginary: Expr
    packed: Expr | None = None

    @property
    def parts(self) -> tuple[Expr, Expr]:
        return self.real, self.imaginary


def parts_of(value: Expr | Complex) -> tuple[Expr, ...]:
    """The parts of a complex value; a real one is its only part."""
    return value.parts if isinstance(value, Complex) else (value,)


def of_parts(parts: Iterable[Expr]) -> Expr | Complex:
    """The inverse of :func:`parts_of`."""
    made = tuple(parts)
    return made[0] if len(made) == 1 else Complex(*made)


def part_type(complex_type: torch.dtype) -> torch.dtype:
    """The type of the parts. :class:`UnsupportedUse` for ``complex32``, which has no arithmetic in torch."""
    if complex_type not in PARTS:
        raise UnsupportedUse(f"values of type {complex_type}")
    return PARTS[complex_type]


def part_form(form: Any) -> Any:
    """The metadata (a fake tensor or TensorMetadata) of a part; unchanged for a real tensor; fields of tuples alike."""
    if isinstance(form, tuple | list):
        return type(form)(map(part_form, form))
    if isinstance(form, TensorMetadata):
        return form.to(part_type(form.dtype)) if form.dtype.is_complex else form
    if isinstance(form, torch.Tensor) and form.dtype.is_complex:
        return torch.empty_strided(form.shape, form.stride(), dtype=part_type(form.dtype), device="meta")
    return form


def is_complex_form(form: Any) -> bool:
    """Whether tensor metadata is complex."""
    return isinstance(form, torch.Tensor | TensorMetadata) and form.dtype.is_complex


def joined_form(form: Any) -> Any:
    """The metadata of a complex tensor with both parts in a last dimension; unchanged for a real tensor."""
    if not is_complex_form(form):
        return form
    return TensorMetadata((*dims(form.shape), 2), part_type(form.dtype))


def separated(importer: Any, packed: Expr) -> Complex:
    """The parts of a value that has both in its last dimension."""
    axis, extents = len(shape(packed)) - 1, list(shape(packed))[:-1]

    def part(index: int) -> Expr:
        return importer.reshape(importer.slice(packed, [axis], [index], [index + 1]), extents)

    return Complex(part(0), part(1), packed)


def joined(importer: Any, value: Complex) -> Expr:
    """One value with both parts in a last dimension."""
    if value.packed is not None:
        return value.packed
    axis, extents = len(shape(value.real)), [*shape(value.real), 1]
    return importer.emit(relax.op.concat([importer.reshape(part, extents) for part in value.parts], axis))


def as_complex(importer: Any, value: Any, element_type: str) -> Complex:
    """A complex, real or Python number, size or value as parts of the given type."""
    if isinstance(value, Complex | complex):
        parts = value.parts if isinstance(value, Complex) else (value.real, value.imag)
        return Complex(*(importer.cast(part, element_type) for part in parts))
    real = importer.cast(value, element_type)
    is_value = isinstance(value, Expr)
    return Complex(real, importer.emit(relax.op.zeros_like(real)) if is_value else importer.constant(0, element_type))
