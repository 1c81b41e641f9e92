"""A CPU generator's memory: the addresses of its mutex and engine, and compiled functions that work on it in place.

torch's draws lock the mutex and then advance the engine. Python has no access to the mutex, so compiled code uses its
address (:mod:`bridge.compile.cpu.mt19937`). The layout is private to torch, the C++ library and the interpreter, so it
is verified: the engine is found by the words of ``get_state``, in memory that is read through the kernel, which does
not fault on unmapped pages; the mutex must be free, and must stop another thread's ``torch.rand`` while it is held.

Generator states: draws that programs make by themselves → seed and offset before each.
A CUDA generator's seed and offset are read, and the offset is advanced as by eager's kernel, without waiting for the
device. Library functions read the states of in-kernel draws on the host; states of recomputed dropout masks
(:mod:`bridge.compile.codegen.philox`) reach the device as a kernel's argument (:mod:`bridge.compile.cuda.copies`).
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bridge.base.generators import MOVING, default_generator
from bridge.base.log import channel
from bridge.base.threads import free_in_children
from bridge.base.torch_internals import VF
from bridge.capture import Draw
from bridge.compile import (
    DOUBLE,
    FLOAT,
    STATE_WORDS,
    WORDS,
    Built,
    bernoulli_function,
    gpu_of,
    hold_function,
    host_backend,
    swap_function,
)

__all__ = ["LOCK", "EngineOffsets", "GeneratorStates", "find_layout", "functions", "is_the_lock", "layout_for"]
__all__ += ["swap_state"]

_STATE_BYTES = 5056
_HANDLE = 16
"""Offset of the C++ object's address in the Python object, behind its header."""
_LOCK = 16
"""Offset of the mutex in the C++ object: behind the virtual table pointer and the reference counts."""
_LOCK_BYTES = 40
_FARTHEST = 512
"""The greatest offset of an engine."""


@dataclass(frozen=True)
class EngineOffsets:
    """Offsets in bytes: of the C++ object's address in the Python object; of mutex and engine in the C++ object."""

    handle: int
    lock: int
    engine: int

    def addresses(self, generator: torch.Generator) -> tuple[int, int]:
        """Addresses of a CPU generator's mutex and engine, valid while the generator lives."""
        start = ctypes.c_uint64.from_address(id(generator) + self.handle).value
        return start + self.lock, start + self.engine


def find_layout() -> EngineOffsets | None:
    """The layout of this torch's generators, or ``None`` if a check fails."""
    if sys.platform != "linux" or sys.byteorder != "little" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    if torch.Generator.__basicsize__ < _HANDLE + 8:
        return None
    found = set()
    for used in (0, 1, 623, 1000):  # outputs: a fresh block, the middle of one, an exhausted one
        generator = torch.Generator().manual_seed(1 + used)
        VF.rand(used, generator=generator)
        state = generator.get_state()
        if state.numel() != _STATE_BYTES:
            return None
        has_double, has_float = used == 1, used == 623
        words = state.view(torch.int64)
        words[[628, 630, 631]] = VF.tensor([0x123456789ABCDEF, has_double, has_float << 32 | 0x3F812345])
        generator.set_state(state)
        start = ctypes.c_uint64.from_address(id(generator) + _HANDLE).value
        memory = _read(start, _FARTHEST + 4 * STATE_WORDS)
        found.add(_engine_at(memory, generator.get_state()))
        if memory[_LOCK : _LOCK + _LOCK_BYTES] != bytes(_LOCK_BYTES):
            return None
    engine = found.pop()
    if found or engine is None or engine < _LOCK + _LOCK_BYTES:
        return None
    return EngineOffsets(_HANDLE, _LOCK, engine)


def _engine_at(memory: bytes, state: torch.Tensor) -> int | None:
    """The offset of the engine with the state of ``get_state`` in the memory, or ``None``."""
    seed, left, seeded, following, *words = struct.unpack_from("<QiiQ624Q", bytes(state.tolist()))
    _, double, _, has_double, single, has_single = struct.unpack_from("<dQdQII", bytes(state.tolist()), 8 * 627)
    at = memory.find(struct.pack("<624I", *words)) - 4 * WORDS
    if at < 0 or at % 8:
        return None
    engine = memory[at : at + 4 * STATE_WORDS]
    expected = {0: ("<Qi", seed, left), 12: ("<B", seeded), 16: ("<I", following)}
    expected[4 * FLOAT + 4], expected[4 * DOUBLE + 8] = ("<B", has_single), ("<B", has_double)
    if has_single:
        expected[4 * FLOAT] = ("<I", single)
    if has_double:
        expected[4 * DOUBLE] = ("<Q", double)
    fits = (engine[offset:].startswith(struct.pack(*packed)) for offset, packed in expected.items())
    return at if len(engine) == 4 * STATE_WORDS and all(fits) else None


def _read(address: int, size: int) -> bytes:
    """A copy of the memory up to the first unmapped page: writing it to a pipe reports that page instead of a fault."""
    page = os.sysconf("SC_PAGESIZE")
    write = ctypes.CDLL(None).write
    write.restype, write.argtypes = ctypes.c_ssize_t, (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
    reader, writer = os.pipe()
    try:
        pieces = []
        while size > 0:
            wanted = min(size, page - address % page)
            count = write(writer, address, wanted)
            if count <= 0:
                break
            pieces.append(os.read(reader, count))
            address, size = address + count, size - count
        return b"".join(pieces)
    finally:
        os.close(reader)
        os.close(writer)


def is_the_lock(hold: Callable[[int, int], int], layout: EngineOffsets) -> bool:
    """Whether another thread's ``torch.rand`` waits while the mutex is held (by the compiled ``hold_function``), and
    then draws the right numbers."""
    ours, twin = (torch.Generator().manual_seed(5) for _ in range(2))
    stage = ctypes.c_int64(0)
    drawn: list[torch.Tensor] = []

    def draw() -> None:
        while stage.value == 0:
            os.sched_yield()
        drawn.append(VF.rand(3, generator=ours))
        stage.value = 2

    other = threading.Thread(target=draw, daemon=True)
    lock, _ = layout.addresses(ours)
    try:
        other.start()
        waited = hold(lock, ctypes.addressof(stage))
    finally:
        stage.value = stage.value or 2  # always lets the other thread end
    other.join()
    wanted = [VF.rand(3, generator=twin), twin.get_state()]
    return bool(waited and drawn) and all(map(VF.equal, [*drawn, ours.get_state()], wanted))


log = channel("mt19937")

LOCK = free_in_children(threading.RLock())
"""Held around every call of a function that locks a generator, so that none is locked during a fork."""


@functools.cache
def functions() -> tuple[Built, Built]:
    """``bernoulli_function`` on one thread and ``hold_function``, in one call of the compiler."""
    wanted = [("bridge_bernoulli", bernoulli_function(False)), ("bridge_hold", hold_function())]
    bernoulli, hold = host_backend().build(wanted)
    hold.function.release_gil = True  # the other thread needs it
    return bernoulli, hold


@functools.lru_cache(maxsize=1)
def layout_for(hold: Built) -> EngineOffsets | None:
    """The layout of torch's generators, if the found mutex is their lock; else ``None`` (logged once)."""
    layout = find_layout()
    if layout is not None and is_the_lock(hold.function, layout):
        return layout
    log.info("the lock of PyTorch %s's generators was not found; dropout masks are left to it.", torch.__version__)
    return None


def swap_state(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Moves torch's default generator to ``after`` if it is at ``before``; returns whether it did.

    Both are results of ``get_state``. Atomic under the generator's lock; where the lock was not found, another thread
    can draw in between.
    """
    layout, generator = layout_for(functions()[1]), torch.default_generator
    if layout is not None and (swap := _checked(layout)) is not None:
        return _swap(swap, layout, generator, before, after)
    if not VF.equal(generator.get_state(), before):
        return False
    generator.set_state(after)
    return True


def _swap(
    swap: Built, layout: EngineOffsets, generator: torch.Generator, before: torch.Tensor, after: torch.Tensor
) -> bool:
    twins = [torch.Generator(), torch.Generator()]
    for twin, state in zip(twins, (before, after), strict=True):
        twin.set_state(state)
    (lock, engine), expected, new = (layout.addresses(each) for each in (generator, *twins))
    with LOCK:
        return bool(swap.function(lock, engine, expected[1], new[1]))


@functools.lru_cache(maxsize=1)
def _checked(layout: EngineOffsets) -> Built | None:
    """The compiled function, if it passes its test."""
    (swap,) = host_backend().build([("bridge_swap", swap_function())])
    return swap if _works(swap, layout) else None


def _works(swap: Built, layout: EngineOffsets) -> bool:
    """A test on new generators: the function tells similar states apart, and replaces them by each other."""
    states = []
    for used, double, single in ((0, 0, 0), (1, 0, 0), (1, 5, 0), (1, 6, 0), (1, 0, 5), (1, 0, 6), (1, 5, 5)):
        generator = torch.Generator().manual_seed(3)
        VF.rand(used, generator=generator)
        state = generator.get_state()
        # the cached normal numbers: a float64 and its flag, a float32 and its flag
        state.view(torch.int64)[[628, 630, 631]] = VF.tensor([double, double > 0, (single > 0) << 32 | single])
        states.append(state)
    for now, before, after in itertools.product(states, repeat=3):
        generator = torch.Generator()
        generator.set_state(now)
        swapped = _swap(swap, layout, generator, before, after)
        if swapped is not (now is before) or not VF.equal(generator.get_state(), after if swapped else now):
            return False
    return True


class GeneratorStates:
    """The states before consecutive draws on one device: in-kernel draws at an offset, recomputed dropout masks."""

    def __init__(self, draws: Sequence[Draw]):
        self._device = draws[0].device
        advances = [self._advance(draw) for draw in draws]
        self._before = [sum(advances[:place]) for place in range(len(draws))]
        self._advance_of_all = sum(advances)

    def _advance(self, draw: Draw) -> int:
        if draw.is_placed or draw.is_attention_mask:
            return draw.advance
        return gpu_of(self._device).advance(torch.Size(draw.shape).numel())

    def draw(self, generator: torch.Generator | None, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Seed and offset before each draw, from the device's default generator: uint64 on the host.

        ``generator``: if given, only advances this generator.
        """
        if generator is not None:
            generator.set_offset(generator.get_offset() + self._advance_of_all)
            return []
        generator = default_generator(self._device)
        with MOVING:
            seed, offset = generator.initial_seed(), generator.get_offset()
            generator.set_offset(offset + self._advance_of_all)
        states = VF.tensor([(seed, offset + before) for before in self._before], dtype=torch.uint64)
        return list(states.unbind())
