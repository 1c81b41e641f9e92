"""Layout of registers: parameters, intermediates, results -> slots, and offsets in an arena."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from autodiff.extents import Dim, sample_of
from autodiff.ir import itemsize
from autodiff.library import GENERATOR_STATE
from bridge.compile.loop_ir.graph import Value
from bridge.compile.loop_ir.views import dense, dense_strides, inverse, permute
from bridge.compile.runtime.instructions import MakeView

__all__ = ["ALIGNMENT", "ArenaPlan", "Register", "RegisterLayout", "lying_below", "plan_arena"]


ALIGNMENT = 64  # a cache line, and the widest vector


@dataclass(frozen=True)
class ArenaPlan:
    """Byte offsets of values in a block of ``size`` bytes; offsets are multiples of 64."""

    offsets: Mapping[Value, int]
    size: int


def plan_arena(lifetimes: Mapping[Value, tuple[int, int]]) -> ArenaPlan:
    """Offsets for values alive from their first to their last step, both included, of the sample's sizes.

    Largest first, each at the lowest offset that is free during its life: within a few per cent of the lower bound on
    training graphs, and deterministic.
    """
    placed: list[tuple[int, int, int, int]] = []  # begin, end, first, last
    offsets: dict[Value, int] = {}
    nbytes = {value: sample_of(value.nbytes) for value in lifetimes}
    for value in sorted(lifetimes, key=lambda value: -nbytes[value]):
        first, last = lifetimes[value]
        size = -(-nbytes[value] // ALIGNMENT) * ALIGNMENT
        taken = sorted((begin, end) for begin, end, start, stop in placed if start <= last and first <= stop)
        offset = 0
        for begin, end in taken:
            if offset + size <= begin:
                break
            offset = max(offset, end)
        offsets[value] = offset
        placed.append((offset, offset + size, first, last))
    return ArenaPlan(offsets, max((end for _, end, _, _ in placed), default=0))


def lying_below(lifetimes: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Of each value, those right below it, by index; the values are given in the order of their offsets.

    A value that lies behind the ends of those overlaps none of all that lie below it and live when it does, whatever
    the sizes are: each of them is one of those, or below one.
    """
    found: list[tuple[int, ...]] = []
    beneath: list[int] = []  # all that a value is behind, as bits
    for index, (first, last) in enumerate(lifetimes):
        direct, covered = [], 0
        for other in range(index - 1, -1, -1):
            start, stop = lifetimes[other]
            if start <= last and first <= stop and not covered >> other & 1:
                direct.append(other)
                covered |= beneath[other] | 1 << other
        found.append(tuple(direct))
        beneath.append(covered)
    return tuple(found)


@dataclass(frozen=True)
class Register:
    """A dense tensor in a slot; one in the arena lies ``offset`` bytes behind its beginning.

    Attributes:
        order: of a parameter: the slot has ``permute(order)`` of what a caller gives; ``None``: it has that.
    """

    slot: int
    name: str
    shape: tuple[Dim, ...]
    dtype: str
    offset: int = 0
    order: tuple[int, ...] | None = None

    @cached_property
    def given_form(self) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
        """Shape and strides of what a caller gives where it lies as the slot has it."""
        view = dense(self.shape)
        given = view if self.order is None else permute(view, inverse(self.order))
        return given.shape, given.strides

    @cached_property
    def given_kind(self) -> tuple[torch.Size, torch.dtype]:
        """Shape, of numbers, and element type of what a caller gives, as a tensor has them."""
        return torch.Size(self.given_form[0]), self.torch_dtype

    @property
    def numel(self) -> Dim:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> Dim:
        return self.numel * itemsize(self.dtype)

    @property
    def lies_on_host(self) -> bool:
        """Whether it is the state of a GPU's generator: whoever computes on the GPU brings it there."""
        return (self.shape, self.dtype) == GENERATOR_STATE

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass(frozen=True)
class RegisterLayout:
    """Slots of the registers.

    Attributes:
        size: how many there are.
        params: the inputs, in the first slots.
        arena: intermediates, which lie in ``arena_bytes`` bytes; the sample's, where they are symbolic.
        fresh: results, in new memory at each call.
        views: of tensors in the arena and of constants, made once.
        results: slots of the results.
        memory: of each result, the slot of the tensor whose memory it is, or is a view of.
        below: where extents are symbolic, of each intermediate those right below it in the arena, by index.
        allocated: what library calls return in memory of their own; with sizes bound, nothing is said about it.
        laid_out: what is made once of constants, in memory of its own, when the program is bound to these.
    """

    size: int
    params: tuple[Register, ...]
    arena: tuple[Register, ...]
    arena_bytes: int
    fresh: tuple[Register, ...]
    views: tuple[MakeView, ...]
    results: tuple[int, ...]
    memory: tuple[int, ...]
    below: tuple[tuple[int, ...], ...] = ()
    allocated: tuple[Register, ...] = ()
    laid_out: tuple[Register, ...] = ()

    @property
    def filled(self) -> set[int]:
        """Slots of the arena and of views that stay filled between calls; those of constants also do."""
        return {*(register.slot for register in self.arena), *(view.writes[0] for view in self.views)}

    def fill(self, registers: list, memory: torch.Tensor) -> None:
        """Puts the tensors of the arena, which is to lie in ``memory``, aligned uint8, into their slots."""
        typed: dict[str, torch.Tensor] = {}  # all of the memory, by element type: then a slot is one view
        for placed in self.arena:
            if placed.dtype not in typed:
                whole = len(memory) - len(memory) % itemsize(placed.dtype)
                typed[placed.dtype] = memory[:whole].view(placed.torch_dtype)
            if placed.numel == 0:
                registers[placed.slot] = torch.empty(placed.shape, dtype=placed.torch_dtype, device=memory.device)
            else:
                base = typed[placed.dtype]
                first = base.storage_offset() + placed.offset // itemsize(placed.dtype)
                registers[placed.slot] = base.as_strided(placed.shape, dense_strides(placed.shape), first)
