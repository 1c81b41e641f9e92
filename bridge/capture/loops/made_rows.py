"""Row builder: operators on values of a record → a new record with these rows and the layouts of their results.

Operators run only on meta tensors, which give the layouts of new values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bridge.base.torch_fakes import meta_tensor
from bridge.base.torch_internals import aten, storage_id
from bridge.capture.loops.proven_loop import StepParts
from bridge.capture.observation import Draw
from bridge.capture.rows import Form, Record, Row, ValueRef, form_of, mapped, values_in

_META = torch.device("meta")


class MadeRows:
    """Builds the rows of a new record from the values of an old one; meta tensors give the layouts of new values."""

    def __init__(self, of: Record):
        known = {"inputs": of.inputs, "literals": dict(of.literals), "free": of.free, "reads": of.reads}
        self.record = Record(forms=list(of.forms), memory=list(of.memory), **known)
        self.draws: list[Draw] = []
        self.like: Row | None = None  # gives line, path and grad mode of the next rows
        self._metas: dict[int, torch.Tensor] = {}
        self._memory: dict[int, int] = {}

    def shape(self, value: ValueRef) -> Sequence[int]:
        """The shape of a value."""
        return self.record.forms[value.number].shape

    def _meta(self, value: ValueRef) -> torch.Tensor:
        number = value.number
        if number not in self._metas:
            self._metas[number] = made = meta_tensor(self.record.forms[number])
            memory = self.record.memory[number]
            self._memory.setdefault(storage_id(made), number if memory < 0 else memory)
        return self._metas[number]

    def _value(self, made: torch.Tensor, device: torch.device, requires_grad: bool = False) -> ValueRef:
        number = len(self.record.forms)
        self.record.forms.append(form_of(made)._replace(device=device, requires_grad=requires_grad))
        self.record.memory.append(self._memory.setdefault(storage_id(made), number))
        self._metas[number] = made
        return ValueRef(number)

    def literal(self, tensor: torch.Tensor) -> ValueRef:
        """Adds a literal: a tensor that is no input and made by no row."""
        made = self._value(tensor.to(_META), tensor.device)
        self.record.literals[made.number] = tensor
        return made

    def of_layout(self, form: Form, base: ValueRef | None) -> ValueRef:
        """A new value with a layout; ``base``: a value whose memory it shares."""
        if base is not None and self.record.forms[base.number].dtype == form.dtype:
            made = self._meta(base).as_strided(form.shape, form.stride)
        else:
            made = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=_META)
        return self._value(made, form.device, form.requires_grad)

    def add(self, op: Any, args: tuple, kwargs: dict, results: Any, draw: Draw | None = None) -> None:
        """Adds a row."""
        like, before = self.like, len(self.draws)
        if draw is not None:
            self.draws.append(draw)
        draws = before, len(self.draws)
        self.record.rows.append(Row(op, args, kwargs, results, like.grad, draws, like.where, like.path))

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Adds a row for an operator's call and makes its results as new values → the results."""
        device = self.record.forms[next(values_in(args))].device
        with torch.no_grad():
            metas = mapped((args, kwargs), ValueRef, self._meta)
            results = mapped(op(*metas[0], **metas[1]), torch.Tensor, lambda made: self._value(made, device))
        self.add(op, args, kwargs, results)
        return results

    def part(self, whole: ValueRef, dim: int, begin: int, extent: int, squeezed: bool) -> ValueRef:
        """Takes a part of a value, as :class:`bridge.capture.loops.proven_loop.Part`."""
        if squeezed:
            return self.call(aten.select.int, whole, dim, begin)
        return self.narrowed(whole, dim, begin, extent)

    def contiguous(self, value: ValueRef) -> ValueRef:
        """A contiguous copy."""
        return self.call(aten.clone.default, value, memory_format=torch.contiguous_format)

    def slice(self, value: ValueRef, dim: int, begin: int, end: int, step: int = 1) -> ValueRef:
        """The slices ``begin``, ``begin + step``, … below ``end`` along ``dim``."""
        return self.call(aten.slice.Tensor, value, dim, begin, end, *[step] * (step > 1))

    def narrowed(self, value: ValueRef, dim: int, begin: int, extent: int) -> ValueRef:
        """``extent`` adjacent slices from ``begin`` on; the tensor itself if these are all slices."""
        return value if extent == self.shape(value)[dim] else self.slice(value, dim, begin, begin + extent)

    def in_order(self, value: ValueRef, axes: list[int]) -> ValueRef:
        """A permutation of the axes; the tensor itself for the identity."""
        return value if axes == sorted(axes) else self.call(aten.permute.default, value, axes)

    def to_dim(self, steps: ValueRef, dim: int) -> ValueRef:
        """Moves the first axis to ``dim``."""
        return self.in_order(steps, [*range(1, dim + 1), 0, *range(dim + 1, len(self.shape(steps)))])

    def to_front(self, value: ValueRef, dim: int) -> ValueRef:
        """Moves the axis ``dim`` to the front."""
        return self.in_order(value, [dim, *(each for each in range(len(self.shape(value))) if each != dim)])

    def flip(self, value: ValueRef) -> ValueRef:
        """The first axis, reversed."""
        return self.call(aten.flip.default, value, [0])

    def windows(self, value: ValueRef, parts: StepParts, steps: int) -> ValueRef:
        """The parts of all steps with the steps in front; parts may overlap or leave gaps."""
        dim, extent, apart, squeezed = parts.dim, parts.extent, abs(parts.step), parts.squeezed
        if apart == extent and not squeezed:
            value = self.call(aten.unflatten.int, value, dim, [steps, extent])
        elif apart != extent:
            value = self.call(aten.unfold.default, value, dim, extent, apart)
            rank = len(self.shape(value))
            if squeezed:
                value = self.call(aten.squeeze.dim, value, -1)
            else:
                value = self.in_order(value, [*range(dim + 1), rank - 1, *range(dim + 1, rank - 1)])
        return self.to_front(value, dim)
