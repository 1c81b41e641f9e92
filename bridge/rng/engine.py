"""A CPU generator's memory: where its mutex and its engine lie in the C++ object, looked up and tried out.

torch's draws lock the mutex and then advance the engine. Python has no way to the mutex, so compiled code goes there by
its address (:mod:`bridge.compile.cpu.mt19937`). That is torch's, the C++ library's and the interpreter's private
business, so nothing is trusted: the engine is searched for by the words that ``get_state`` gives, in memory that is
read through the kernel, which does not fail where there is none; the mutex has to be a free one, and to stop another
thread's ``torch.rand`` while it is held.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bridge.compile import DOUBLE, FLOAT, STATE_WORDS, WORDS

__all__ = ["Layout", "find_layout", "is_the_lock"]

_STATE_BYTES = 5056
_HANDLE = 16
"""Where a Python object, behind its head, has the address of the C++ object."""
_LOCK = 16
"""Where that has its mutex: behind the table of virtual functions and the reference counts."""
_LOCK_BYTES = 40
_FARTHEST = 512
"""Where an engine may begin at most."""


@dataclass(frozen=True)
class Layout:
    """Offsets, in bytes: of the C++ object's address in the Python object, of mutex and engine in the C++ object."""

    handle: int
    lock: int
    engine: int

    def addresses(self, generator: torch.Generator) -> tuple[int, int]:
        """Of a CPU generator's mutex and engine, for as long as the generator lives."""
        start = ctypes.c_uint64.from_address(id(generator) + self.handle).value
        return start + self.lock, start + self.engine


def find_layout() -> Layout | None:
    """The layout of this torch's generators, or ``None`` if something is not as expected."""
    if sys.platform != "linux" or sys.byteorder != "little" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    if torch.Generator.__basicsize__ < _HANDLE + 8:
        return None
    found = set()
    for used in (0, 1, 623, 1000):  # outputs of a fresh block, of one in the middle, of one that is used up
        generator = torch.Generator().manual_seed(1 + used)
        torch.rand(used, generator=generator)
        state = generator.get_state()
        if state.numel() != _STATE_BYTES:
            return None
        has_double, has_float = used == 1, used == 623
        words = state.view(torch.int64)
        words[[628, 630, 631]] = torch.tensor([0x123456789ABCDEF, has_double, has_float << 32 | 0x3F812345])
        generator.set_state(state)
        start = ctypes.c_uint64.from_address(id(generator) + _HANDLE).value
        memory = _read(start, _FARTHEST + 4 * STATE_WORDS)
        found.add(_engine_at(memory, generator.get_state()))
        if memory[_LOCK : _LOCK + _LOCK_BYTES] != bytes(_LOCK_BYTES):
            return None
    engine = found.pop()
    if found or engine is None or engine < _LOCK + _LOCK_BYTES:
        return None
    return Layout(_HANDLE, _LOCK, engine)


def _engine_at(memory: bytes, state: torch.Tensor) -> int | None:
    """Where the engine that ``get_state`` speaks of is in the memory, if anywhere."""
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
    """Memory as far as it is mapped: a pipe's writer is told where it is not."""
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


def is_the_lock(hold: Callable[[int, int], int], layout: Layout) -> bool:
    """Whether another thread's ``torch.rand`` waits while the mutex is held, and goes on rightly afterwards.

    Args:
        hold: :func:`bridge.compile.hold_function`, compiled.
    """
    ours, twin = (torch.Generator().manual_seed(5) for _ in range(2))
    stage = ctypes.c_int64(0)
    drawn: list[torch.Tensor] = []

    def draw() -> None:
        while stage.value == 0:
            os.sched_yield()
        drawn.append(torch.rand(3, generator=ours))
        stage.value = 2

    other = threading.Thread(target=draw, daemon=True)
    lock, _ = layout.addresses(ours)
    try:
        other.start()
        waited = hold(lock, ctypes.addressof(stage))
    finally:
        stage.value = stage.value or 2  # whatever happened, the other thread ends
    other.join()
    wanted = [torch.rand(3, generator=twin), twin.get_state()]
    return bool(waited and drawn) and all(map(torch.equal, [*drawn, ours.get_state()], wanted))
