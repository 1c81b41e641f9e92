"""Masks beside other threads: one stream, each number drawn once; forks; interrupts."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from bridge.compile import hold_function, host_backend
from bridge.rng import cpu as mt19937
from bridge.rng import engine
from bridge.rng.cpu import Mask, MaskRun
from bridge.rng.engine import EngineOffsets, is_the_lock
from tests import rng_stress
from tests.threads import together


def flat(count: int, probability: float = rng_stress.KEEP) -> Mask:
    return Mask((count,), (1,), probability)


@contextmanager
def beside(work: Callable[[], object], threads: int = 3) -> Iterator[None]:
    """While active, other threads do this over and over."""
    stop, started = threading.Event(), threading.Barrier(threads + 1)

    def repeat() -> None:
        started.wait()
        while not stop.is_set():
            work()

    others = [threading.Thread(target=repeat, daemon=True) for _ in range(threads)]
    for other in others:
        other.start()
    started.wait()
    try:
        yield
    finally:
        stop.set()
        for other in others:
            other.join()


ELSEWHERE = torch.Generator()
BUSY = {
    "sleeping": lambda: time.sleep(0.001),
    "computing": lambda: sum(range(1000)),
    "drawing elsewhere": lambda: torch.rand(1000, generator=ELSEWHERE),
    "reading the state": lambda: torch.default_generator.get_state(),
}


@pytest.mark.parametrize("kind", BUSY)
def test_what_other_threads_do_makes_no_difference(kernels, kind, monkeypatch):
    monkeypatch.setattr(mt19937, "draw_by_torch", None)
    run, twin = MaskRun(kernels, [flat(1000), flat(77)]), torch.Generator().manual_seed(6)
    torch.manual_seed(6)
    with beside(BUSY[kind]):
        for _ in range(30):
            for drawn in run.draw():
                assert torch.equal(drawn, torch.empty(drawn.numel(), dtype=torch.bool).bernoulli_(0.7, generator=twin))
    assert torch.equal(torch.get_rng_state(), twin.get_state())


def test_threads_share_one_stream(kernels):
    """Masks, large ones on several threads, torch's draws and readers of the state, on one generator."""
    generator = torch.Generator().manual_seed(4)
    before, records = generator.get_state(), [[] for _ in range(6)]
    large = [MaskRun(kernels, [flat(1_300_000), flat(500)]), MaskRun(kernels, [flat(2000)])]

    def draw(number: int) -> None:
        for turn in range(6 if number == 0 else 100):
            if number == 5:
                drawn = [("rand", torch.rand(99, generator=generator))]
            else:
                drawn = [("dropout", mask) for mask in large[number > 0].draw(generator)]
            records[number] += drawn
            if turn % 10 == 0:
                generator.get_state()

    together(*(partial(draw, number) for number in range(len(records))))
    rng_stress.account(records, before, generator.get_state())


@pytest.mark.filterwarnings("ignore:.*eager is quicker")
def test_modules_beside_threads_that_draw():
    counts = rng_stress.Stress(drawers=4).run(seconds=1)
    assert min(counts.values()) > 20


@pytest.mark.parametrize("fault", ["twice", "lost", "lost at the end"])
def test_the_stress_finds(fault):
    generator = torch.Generator().manual_seed(1)
    before = state = generator.get_state()
    records: list[list[rng_stress.Record]] = [[], []]
    for turn in range(20):
        if turn == 7 and fault == "twice":
            generator.set_state(state)
        state = generator.get_state()
        name = ("rand", "randint", "bernoulli_")[turn % 3]
        records[turn % 2].append((name, rng_stress.DRAWS[name](100, generator)))
    if fault == "lost":
        records[0].pop(4)
    if fault == "lost at the end":
        torch.rand(1, generator=generator)
    with pytest.raises(AssertionError, match="nobody drew"):
        rng_stress.account(records, before, generator.get_state())


# The lock


def is_free(kernels: mt19937.Kernels, generator: torch.Generator) -> bool:
    library, (lock, _) = ctypes.CDLL(None), kernels.layout.addresses(generator)
    if library.pthread_mutex_trylock(ctypes.c_void_p(lock)):
        return False
    library.pthread_mutex_unlock(ctypes.c_void_p(lock))
    return True


def test_another_mutex_is_not_the_lock(kernels, monkeypatch):
    (hold,) = host_backend().build([("hold", hold_function())])
    assert is_the_lock(hold.function, kernels.layout)
    room, addresses = ctypes.create_string_buffer(64), EngineOffsets.addresses
    monkeypatch.setattr(EngineOffsets, "addresses", lambda *_: (ctypes.addressof(room), addresses(*_)[1]))
    assert not is_the_lock(hold.function, kernels.layout)
    assert bytes(room) == bytes(64), "it is let go of"


@pytest.mark.parametrize("wrong", ["other numbers", "nothing"])
def test_the_other_thread_has_to_draw_rightly_afterwards(kernels, monkeypatch, wrong):
    (hold,) = host_backend().build([("hold", hold_function())])
    rand, main = torch.rand, threading.get_ident()

    def draw(*shape: int, generator: torch.Generator) -> Tensor:
        drawn = rand(*shape, generator=generator)
        if threading.get_ident() != main:
            return drawn + 1 if wrong == "other numbers" else drawn[:0]
        return drawn

    monkeypatch.setattr(engine, "VF", SimpleNamespace(rand=draw, equal=torch.equal, tensor=torch.tensor))
    assert not is_the_lock(hold.function, kernels.layout)


def test_interrupts_leave_the_lock_free(kernels, request):
    """Interrupts at moments of all kinds: nothing between taking and leaving the lock can be interrupted."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    request.addfinalizer(lambda: signal.signal(signal.SIGALRM, previous))
    generator, run = torch.Generator().manual_seed(1), MaskRun(kernels, [flat(30_000)])
    twin, drawn, interrupts = torch.Generator().manual_seed(1), 0, 0
    for delay in itertools.islice(itertools.cycle(range(5, 300, 7)), 150):
        try:
            signal.setitimer(signal.ITIMER_REAL, delay * 1e-6)
            for _ in range(50):
                run.draw(generator)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupts += 1
        assert is_free(kernels, generator)
    assert interrupts > 20
    while not torch.equal(twin.get_state(), generator.get_state()) and drawn < 150 * 50:
        torch.empty(30_000, dtype=torch.bool).bernoulli_(0.7, generator=twin)
        drawn += 1
    assert torch.equal(twin.get_state(), generator.get_state()), "a whole number of masks"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_finds_the_lock_free(kernels):
    run = MaskRun(kernels, [flat(200_000)])
    with beside(run.draw):
        for _ in range(8):  # another thread draws, and has the lock, at nearly each of them
            child = os.fork()
            if not child:
                signal.alarm(20)
                run.draw()
                torch.rand(3)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
