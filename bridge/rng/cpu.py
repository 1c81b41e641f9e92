"""Compiled Bernoulli draws: masks and a CPU generator → PyTorch's bits and PyTorch's state afterwards.

PyTorch draws Bernoulli masks one element after another. Here a vectorized Mersenne Twister
(:mod:`bridge.compile.cpu.mt19937`) starts from the generator's state, fills the masks and puts the advanced state
back, so what draws next, ours or PyTorch's, goes on where eager PyTorch would.

The rule that it follows is PyTorch's own, not a documented one, and other builds have others (on Intel's processors a
generator of MKL). So the code is compared with PyTorch before it is used: :func:`compiled`.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import not_

import torch
import tvm_ffi

from bridge.base.locks import free_in_children
from bridge.base.log import channel
from bridge.base.threads import others_wait
from bridge.compile import STATE_WORDS, Built, bernoulli_function, host_backend

__all__ = ["Kernels", "Mask", "compiled", "draw", "draw_by_torch"]

log = channel("mt19937")

_LOCK = free_in_children(threading.Lock())  # a generator's state is read, advanced and put back by one thread at a time
_ATTEMPTS = 8


@dataclass(frozen=True)
class Mask:
    """A mask to draw: one byte per element, true with ``probability``, a float64 in [0, 1].

    Elements are drawn in the order of the memory; ``dtype`` is that of the tensor that eager draws into.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    probability: float
    dtype: torch.dtype = torch.bool

    def __post_init__(self):
        if not 0 <= self.probability <= 1:
            raise ValueError(f"a mask's probability must be in [0, 1], got {self.probability}")

    @cached_property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @cached_property
    def threshold(self) -> int:
        """What a 53-bit integer must be below for a true element: ``k * 2**-53 < p`` without rounding."""
        return math.ceil(math.ldexp(self.probability, 53))

    @cached_property
    def dense(self) -> bool:
        """Whether the elements fill their memory, in whatever order of dimensions."""
        below = 1
        for stride, extent in sorted(zip(self.stride, self.shape, strict=True)):
            if extent != 1:
                if stride != below:
                    return self.count == 0
                below *= extent
        return True

    def empty(self) -> torch.Tensor:
        """A bool tensor to draw into."""
        return torch.empty_strided(self.shape, self.stride, dtype=torch.bool, device="cpu")


@dataclass(frozen=True)
class Kernels:
    """The compiled functions of :mod:`bridge.compile.cpu.mt19937`."""

    bernoulli: tvm_ffi.Function = field(repr=False)
    code: tuple[Built, ...] = field(default=(), repr=False, compare=False)  # machine code, which lives as long as this

    def fill(self, state: torch.Tensor, masks: Sequence[Mask], tensors: Sequence[torch.Tensor]) -> bool:
        """Fills the tensors in order and advances ``state``, uint8 [5056]; ``False`` if that is no state."""
        pointer = _pointer(state)
        return all(
            self.bernoulli(pointer, _pointer(tensor), mask.count, mask.threshold)
            for mask, tensor in zip(masks, tensors, strict=True)
        )


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def draw(kernels: Kernels, masks: Sequence[Mask], generator: torch.Generator | None = None) -> list[torch.Tensor]:
    """Draws dense masks in order, and leaves the generator where PyTorch would have left it.

    Args:
        kernels: what :func:`compiled` gave.
        generator: a CPU generator; PyTorch's default one if ``None``.

    Returns:
        bool tensors with the masks' shapes and strides, each in memory of its own.

    Another thread may draw by PyTorch meanwhile, whose lock cannot be taken from here: then its numbers would come
    again. So PyTorch draws while any other thread does anything but wait. One that begins to is noticed, for the state
    is looked at again before the advanced one replaces it; masks are then drawn anew, by PyTorch. What is left is a
    thread that wakes or is started and draws between those two calls.
    """
    generator = torch.default_generator if generator is None else generator
    if not others_wait():
        return [draw_by_torch(mask, generator) for mask in masks]
    tensors = [mask.empty() for mask in masks]
    with _LOCK:
        for _ in range(_ATTEMPTS):
            state = generator.get_state()
            before = state.numpy().tobytes()
            if state.numel() != 8 * STATE_WORDS or not kernels.fill(state, masks, tensors):
                break
            if _replace_state(generator, before, state):
                return tensors
        return [draw_by_torch(mask, generator) for mask in masks]


def _replace_state(generator: torch.Generator, before: bytes, state: torch.Tensor) -> bool:
    """Sets the state if it still is what it was, in one go: no bytecode in between, after which another thread might
    have its turn, and nothing that lets go of the interpreter's lock, as ``ndarray.tobytes`` does, and a tensor that
    dies."""
    now: list[torch.Tensor] = []  # keeps it
    read = map(not_, map(now.append, map(torch.Generator.get_state, [generator])))
    is_same = map(before.__eq__, map(bytes, map(memoryview, map(torch.Tensor.numpy, now))))
    return all(chain(read, is_same, map(generator.set_state, [state])))


def draw_by_torch(mask: Mask, generator: torch.Generator | None = None) -> torch.Tensor:
    """The mask as PyTorch draws it, in eager's dtype where that decides about the bits; bool."""
    if _same_bits(mask.dtype):
        return mask.empty().bernoulli_(mask.probability, generator=generator)
    drawn = torch.empty_strided(mask.shape, mask.stride, dtype=mask.dtype, device="cpu")
    return drawn.bernoulli_(mask.probability, generator=generator).to(torch.bool)


@functools.cache
def _same_bits(dtype: torch.dtype) -> bool:
    """Whether PyTorch's Bernoulli numbers are the same in a tensor of bytes."""
    generators = [torch.Generator().manual_seed(_SEED) for _ in range(2)]
    pairs = zip((torch.bool, dtype), generators, strict=True)
    ours, theirs = (torch.empty(1000, dtype=kind).bernoulli_(0.7, generator=g).to(torch.bool) for kind, g in pairs)
    return torch.equal(ours, theirs) and _equal_states(*generators)


def compiled() -> Kernels | None:
    """The compiled draws, or ``None`` where this build of PyTorch draws otherwise (logged once).

    Compiled when first asked for, and compared with PyTorch, bits and states, on generators of their own.
    """
    (bernoulli,) = host_backend().build([("bridge_bernoulli", bernoulli_function())])
    return _checked(bernoulli)


@functools.lru_cache(maxsize=1)
def _checked(bernoulli: Built) -> Kernels | None:
    kernels = Kernels(bernoulli.function, (bernoulli,))
    if _draws_as_torch(kernels):
        return kernels
    log.info(
        "PyTorch %s draws Bernoulli masks by a rule of its own here; dropout masks are left to it.", torch.__version__
    )
    return None


_SEED = 20
_CHECKS = ((1, 0.9), (311, 0.5), (2, 0.1), (1000, 0.9), (0, 0.5), (313, 1.0), (624, 0.0), (5, 1 / 3))
"""(elements, probability): the draws of a check, one after the other, so that they start all over the block."""


def _draws_as_torch(kernels: Kernels) -> bool:
    """Whether bits and states are PyTorch's from a fresh seed, and when an odd number of outputs has been used."""
    for used in (0, 1, 622):
        ours, theirs = (torch.Generator().manual_seed(_SEED + used) for _ in range(2))
        for generator in (ours, theirs):
            torch.rand(used, generator=generator)  # one output an element
        if not _equal_states(ours, theirs):
            return False
        for count, probability in _CHECKS:
            mask = Mask((count,), (1,), probability)
            expected = torch.empty(count, dtype=torch.bool).bernoulli_(probability, generator=theirs)
            state = ours.get_state()
            made = [mask.empty()]
            if state.numel() != 8 * STATE_WORDS or not kernels.fill(state, [mask], made):
                return False
            ours.set_state(state)
            if not torch.equal(made[0], expected) or not _equal_states(ours, theirs):
                return False
    return True


def _equal_states(ours: torch.Generator, theirs: torch.Generator) -> bool:
    return torch.equal(ours.get_state(), theirs.get_state())
