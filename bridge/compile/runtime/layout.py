"""Layout of registers: parameters, intermediates, results → slots, and offsets in an arena.

Arena pool: memory for intermediates that all programs of a process share. Each run takes a *block* for itself and gives
it back, so concurrent and re-entrant runs never share memory. Successive runs take the same block: the pool holds the
largest arena, not the sum, once for each simultaneous run. Taking and giving back are single operations on a list,
atomic under Python's global interpreter lock: no signal handler, finalizer or forked child can find a lock taken.

Input forms: tensors given to a program → the same tensors, dense; a ``ValueError`` names a mismatch.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from autodiff.extents import Dim, sample_of
from autodiff.ir import inverse, itemsize
from autodiff.lazy import cached_property
from autodiff.library import GENERATOR_STATE
from bridge.base.devices import HOST
from bridge.base.session import SESSION
from bridge.base.tensor_properties import TensorChecks, is_nested, tensor_checks
from bridge.base.torch_internals import VF, tensor_at
from bridge.compile.loop_ir.graph import Value
from bridge.compile.loop_ir.views import dense, dense_strides, permute
from bridge.compile.runtime.instructions import MakeView

__all__ = [
    "ALIGNMENT",
    "ARENAS",
    "ArenaPlan",
    "ArenaPool",
    "ArenaSlot",
    "InputForms",
    "PoolBlock",
    "PoolUser",
    "Register",
]
__all__ += ["Register", "RegisterLayout", "Strided", "lying_below", "plan_arena"]

ALIGNMENT = 64  # a cache line, and the widest vector


class ArenaSlot(NamedTuple):
    """A tensor to be placed in an arena, by its slot."""

    slot: int
    nbytes: Dim


_Placeable = TypeVar("_Placeable", Value, ArenaSlot)


@dataclass(frozen=True)
class ArenaPlan(Generic[_Placeable]):
    """Byte offsets of values in a block of ``size`` bytes; offsets are multiples of 64."""

    offsets: Mapping[_Placeable, int]
    size: int


def plan_arena(lifetimes: Mapping[_Placeable, tuple[int, int]]) -> ArenaPlan[_Placeable]:
    """Offsets for values alive from their first to their last step, inclusive, at the sample's sizes.

    Largest first, each at its lowest free offset: deterministic, within a few per cent of the bound on training graphs.
    """
    placed: list[tuple[int, int, int, int]] = []  # begin, end, first, last
    offsets: dict[_Placeable, int] = {}
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
    """For each value, the indices of the values directly below it; values are given in the order of their offsets.

    A value placed after the ends of these overlaps no lower value that is live at the same time, at any sizes: each
    of them is directly below it, or below a value that is.
    """
    found: list[tuple[int, ...]] = []
    beneath: list[int] = []  # per value, all values below it, as bits
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
    """A dense tensor in a slot, ``offset`` bytes after the arena's beginning if it is in the arena.

    Attributes:
        order: a parameter's slot has ``permute(order)`` of the caller's tensor; ``None``: the tensor itself.
    """

    slot: int
    name: str
    shape: tuple[Dim, ...]
    dtype: str
    offset: int = 0
    order: tuple[int, ...] | None = None

    @cached_property
    def given_form(self) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
        """Shape and strides of the caller's tensor if its memory has the slot's layout."""
        view = dense(self.shape)
        given = view if self.order is None else permute(view, inverse(self.order))
        return given.shape, given.strides

    @property
    def numel(self) -> Dim:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> Dim:
        return self.numel * itemsize(self.dtype)

    @property
    def lies_on_host(self) -> bool:
        """Whether it is the state of a GPU's generator, which the executor copies to the GPU."""
        return (self.shape, self.dtype) == GENERATOR_STATE

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass(frozen=True)
class RegisterLayout:
    """Slots of the registers.

    Attributes:
        size: their number.
        params: the inputs, in the first slots.
        arena: intermediates in ``arena_bytes`` bytes; if those are symbolic, the sample's.
        fresh: results, in new memory at each call.
        views: of tensors in the arena and of constants, made once.
        results: slots of the results.
        memory: for each result, the slot of the tensor that owns its memory.
        below: with symbolic extents, for each intermediate the indices of those directly below it in the arena.
        allocated: results of library calls in memory of their own; empty once sizes are bound.
        laid_out: packed constants, made once when the program is bound to its constants.
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
        """Slots of the arena and of views that stay filled between calls, as do slots of constants."""
        return {*(register.slot for register in self.arena), *(view.writes[0] for view in self.views)}

    def fill(self, registers: list, memory: torch.Tensor) -> None:
        """Puts the arena's tensors into their slots; ``memory``: aligned uint8."""
        typed: dict[str, tuple[torch.Tensor, int]] = {}  # the whole memory by element type, so that a slot is one view
        for placed in self.arena:
            if placed.dtype not in typed:
                size = itemsize(placed.dtype)
                typed[placed.dtype] = memory[: len(memory) - len(memory) % size].view(placed.torch_dtype), size
            shape = placed.shape
            if 0 in shape:
                registers[placed.slot] = VF.empty(shape, dtype=placed.torch_dtype, device=memory.device)
            else:
                base, size = typed[placed.dtype]
                registers[placed.slot] = tensor_at(base, shape, dense_strides(shape), placed.offset // size)


_USES = 256
"""Uses of a pool after which blocks that were free at each of them are dropped."""


class PoolBlock:
    """``memory``: uint8 [size], aligned; ``bound``: key of a user → its data for this block."""

    __slots__ = ("__weakref__", "bound", "memory", "size")

    def __init__(self, size: int, device: torch.device = HOST):
        raw = VF.empty(size + ALIGNMENT, dtype=torch.uint8, device=device)
        begin = -raw.data_ptr() % ALIGNMENT
        self.memory = raw[begin : begin + size]
        self.size = size
        self.bound: dict[int, Any] = {}


class PoolUser:
    """A user of a pool.

    Attributes:
        key: in ``bound`` of a block.
        take: returns a block of at least its size, for the caller alone; ``give`` returns it to the pool.
    """

    __slots__ = ("__weakref__", "give", "key", "take")

    def __init__(self, key: int, take: Callable[[], PoolBlock], give: Callable[[PoolBlock], None]):
        self.key, self.take, self.give = key, take, give


class ArenaPool:
    """Blocks on a device for the runs of any number of users, each with a maximum size.

    The pool returns memory to torch's allocator when a larger block replaces a block, when blocks stay free for long
    while others are taken, and when no living user needs a block of its size.

    Attributes:
        give: takes a block back.
    """

    def __init__(self, device: torch.device = HOST) -> None:
        self._device = device
        self._free: list[PoolBlock] = []
        self.give: Callable[[PoolBlock], None] = self._free.append
        self._blocks: list[weakref.ref[PoolBlock]] = []  # free ones and taken ones
        self._users: dict[int, tuple[weakref.ref, int]] = {}
        self._keys = itertools.count()
        self._left, self._uses = _USES, 0  # the least number of free blocks left, among the latest uses

    def enroll(self, size: int) -> PoolUser:
        """Registers a user of up to ``size`` bytes; its data in blocks is dropped with it."""
        key = next(self._keys)
        user = PoolUser(key, partial(self.take, size), self.give)
        self._users[key] = weakref.ref(user, lambda _: self._gone(key)), size
        return user

    def take(self, size: int) -> PoolBlock:
        """A block of at least ``size`` bytes for the caller alone, which must give it back."""
        free = self._free
        try:
            block = free.pop()
        except IndexError:
            return self._allocate(size)
        if free or block.size < size:
            free.append(block)
            return self._choose(size)
        self._left = 0
        return block

    @property
    def held_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.size for block in self._living())

    @property
    def free_bytes(self) -> int:
        """Bytes of the free blocks."""
        return sum(block.size for block in tuple(self._free))

    def clear(self) -> None:
        """Drops the free blocks."""
        self._free.clear()

    def _choose(self, size: int) -> PoolBlock:
        """The smallest free block that is large enough, or a new one in place of the largest free block."""
        block = self._fitting(size)
        return self._allocate(size) if block is None else block

    def _fitting(self, size: int) -> PoolBlock | None:
        by_size = sorted(self._free, key=lambda block: block.size)
        for block in by_size:
            if block.size >= size and self._out(block):
                self._let_go()
                return block
        any(map(self._out, reversed(by_size)))  # up to the first that no other thread has taken
        return None

    def _out(self, block: PoolBlock) -> bool:
        """Removes a block from the free list; ``False`` if another thread took it first."""
        try:
            self._free.remove(block)
        except ValueError:
            return False
        return True

    def _let_go(self) -> None:
        """Counts a use that left blocks free; after ``_USES``, drops the smallest blocks that were never needed."""
        self._left = min(self._left, len(self._free))
        self._uses += 1
        if self._uses >= _USES:
            for block in sorted(self._free, key=lambda block: block.size)[: self._left]:
                self._out(block)
            self._left, self._uses = _USES, 0

    @torch.inference_mode(False)  # it serves runs of any mode
    def _allocate(self, size: int) -> PoolBlock:
        self._left = 0
        block = PoolBlock(size, self._device)
        self._blocks.append(weakref.ref(block, self._blocks.remove))
        return block

    def _living(self) -> list[PoolBlock]:
        return [block for reference in tuple(self._blocks) if (block := reference()) is not None]

    def _gone(self, key: int) -> None:
        """Drops a user's data, and free blocks that are larger than any living user needs."""
        _, size = self._users.pop(key, (None, 0))
        for block in self._living():
            block.bound.pop(key, None)
        if not any(block.size <= size for block in tuple(self._free)):  # another user needs as much
            return
        largest = max((size for _, size in tuple(self._users.values())), default=-1)
        for block in tuple(self._free):
            if block.size > largest:
                self._out(block)


ARENAS = SESSION.cache("programs", ArenaPool())
"""The host's pool."""

_KIND, _DEVICE = attrgetter("shape", "dtype"), attrgetter("device")
#: Variants of valid inputs that are remembered: requires grad, parameter, inference mode, strided.
_MAX_LOOKS = 4

Strided = tuple[tuple[int, tuple[int, ...]], ...]
"""Places and strides of inputs that are not dense in their slots' order."""


class InputForms:
    """Checks shapes, element types and devices of a program's inputs, and makes the inputs dense.

    Args:
        name: of the program.
        params: its parameters.
        device: of the parameters that are not on the host.
    """

    def __init__(self, name: str, params: Sequence[Register], device: torch.device):
        self._name, self._params = name, params
        self._kinds = [(torch.Size(param.given_form[0]), param.torch_dtype) for param in params]
        self._devices = [HOST if param.lies_on_host else device for param in params]
        self._turned = [(place, param.order) for place, param in enumerate(params) if param.order is not None]
        self._looks: list[tuple[TensorChecks, Strided]] = []  # variants of valid inputs

    def dense(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The inputs in their slots' orders, copied if not dense. Some may require grad: autograd must be off.

        Raises:
            ValueError: a mismatch of their number, a shape, an element type or a device.
        """
        found = None
        if not any(map(is_nested, inputs)):
            for alike, strided in self._looks:
                if alike.exact(*inputs) or alike.again(inputs):
                    found = strided
                    break
        if found is None:
            found = self._look(inputs)
        in_order = self._in_order(inputs) if self._turned else inputs
        return in_order if found == () else [tensor.contiguous() for tensor in in_order]

    def _in_order(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if not self._turned:
            return inputs
        turned = list(inputs)
        for place, order in self._turned:
            turned[place] = turned[place].permute(order)
        return turned

    def as_they_lie(self, inputs: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Strided]:
        """The inputs, and the strides of non-dense ones; beyond ``_MAX_LOOKS`` variants, dense copies."""
        known = () if any(map(is_nested, inputs)) else self._looks
        strided = next((strided for alike, strided in known if alike(inputs)), None)
        strided = self._look(inputs) if strided is None else strided
        if strided is not None:
            return inputs, strided
        copies = [tensor.contiguous() for tensor in self._in_order(inputs)]
        for place, order in self._turned:
            copies[place] = copies[place].permute(inverse(order))
        return copies, ()

    def _look(self, inputs: Sequence[torch.Tensor]) -> Strided | None:
        """The strided inputs of a new variant; ``None``: too many variants, some may be strided."""
        if list(map(_KIND, inputs)) != self._kinds or list(map(_DEVICE, inputs)) != self._devices:
            self._reject(inputs)
        in_order = self._in_order(inputs)
        strided = tuple(
            (place, inputs[place].stride()) for place, each in enumerate(in_order) if not each.is_contiguous()
        )
        if len(self._looks) < _MAX_LOOKS:
            self._looks.append((tensor_checks(inputs, given_twice=False), strided))
            return strided
        return None if strided else ()

    def _reject(self, inputs: Sequence[torch.Tensor]) -> None:
        if len(inputs) != len(self._kinds):
            raise ValueError(f"{self._name}: wanted {len(self._kinds)} inputs, got {len(inputs)}")
        for slot, (tensor, kind, device) in enumerate(zip(inputs, self._kinds, self._devices, strict=True)):
            if (_KIND(tensor), tensor.device) != (kind, device):
                raise ValueError(
                    f"{self._name}: input {slot} ({self._params[slot].name}) has shape {tuple(tensor.shape)} and"
                    f" {tensor.dtype} on {tensor.device}, wanted {tuple(kind[0])} and {kind[1]} on {device}"
                )
