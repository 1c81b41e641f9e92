"""Interrupts while a module is compiled: deferred to a stage boundary, ``KeyboardInterrupt``, everything as before."""

import os
import signal
import socket
import threading

import numpy as np
import pytest
import torch
from torch import nn

import autodiff
from bridge import add_tvm_dispatch, stats
from bridge.base.session import SESSION
from bridge.base.threads import interrupts_deferred, raise_deferred
from bridge.capture import one_capture_at_a_time
from bridge.dispatch import dispatcher, parts
from tests import interrupts

WAYS = {**interrupts.WAYS, "Dynamo": interrupts.by_dynamo}


class ByNumpy(nn.Module):
    """Cannot be captured."""

    def forward(self, x):
        return x * float(np.median(x.detach().numpy()))


class UsersError(Exception):
    """The error that a user's handler raises."""


@pytest.fixture(autouse=True)
def sigint():
    """Python's handler of SIGINT, in every process: a shell's background jobs ignore the signal."""
    with interrupts.heard():
        yield


@pytest.fixture
def handler():
    """Sets a handler of SIGINT, and checks that it is still set at the end."""
    before = signal.getsignal(signal.SIGINT)
    installed = before

    def install(new):
        nonlocal installed
        installed = new
        signal.signal(signal.SIGINT, new)

    yield install
    left = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert left is installed


@pytest.fixture
def in_the_middle(monkeypatch):
    """Runs a function in the middle of every lowering."""

    def install(function):
        def mask_dropout(*args):
            function()
            return original(*args)

        SESSION.reset("lowerings")
        monkeypatch.setattr(autodiff, "mask_dropout", mask_dropout)

    original = autodiff.mask_dropout
    return install


def test_at_random_moments():
    outcomes, problems = interrupts.series(6, seed=0, seconds=0.5)
    assert not problems
    assert outcomes["interrupted"] == 6


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_is_raised_at_the_next_boundary(way, in_the_middle, handler):
    went_on = []
    in_the_middle(lambda: (interrupts.by_kill(), went_on.append(True)))
    module, x = interrupts.Recorded(11), torch.randn(4, 11)
    with pytest.raises(KeyboardInterrupt):
        way(module, x)
    assert went_on == [True]
    in_the_middle(lambda: None)
    wanted, x = nn.Linear(11, 2).double(), x.double()
    assert torch.allclose(add_tvm_dispatch(wanted, x)(x), wanted.forward(x))


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_measured_last_is_before_the_change(whole, monkeypatch, handler):
    """The last work, after compiling: the measurement of a dispatch's profitability, or of parts' shares."""
    place, name = (dispatcher, "measure_profitability") if whole else (parts, "shares_of")
    measure = getattr(place, name)
    monkeypatch.setattr(place, name, lambda *args: (interrupts.by_kill(), measure(*args))[1])
    module, x = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), *[] if whole else [ByNumpy()]), torch.randn(4, 12)
    before = interrupts.module_state(module)
    with pytest.raises(KeyboardInterrupt):
        add_tvm_dispatch(module, x, whole=whole)
    assert interrupts.module_state(module) == before
    monkeypatch.setattr(place, name, measure)
    add_tvm_dispatch(module, x, whole=whole)
    assert interrupts.module_state(module) != before


def test_a_second_one_breaks_at_once(in_the_middle, handler):
    went_on = []
    in_the_middle(lambda: (interrupts.by_kill(), interrupts.by_kill(), went_on.append(True)))
    with pytest.raises(KeyboardInterrupt):
        add_tvm_dispatch(nn.Linear(3, 2), torch.randn(4, 3))
    assert not went_on


def test_a_handler_of_the_users_raises_what_it_likes(in_the_middle, handler):
    def stop(*_):
        raise UsersError

    handler(stop)
    in_the_middle(interrupts.by_kill)
    module = nn.Linear(3, 2)
    with pytest.raises(UsersError):
        add_tvm_dispatch(module, torch.randn(4, 3))
    assert "_compiled_call_impl" not in vars(module)


def test_a_handler_of_the_users_that_only_takes_note(in_the_middle, handler):
    """Called once for each signal, then everything goes on."""
    noted = []
    handler(lambda number, frame: noted.append((number, frame is not None)))
    for count in (1, 2, 3):
        noted.clear()
        in_the_middle(lambda: [interrupts.by_kill() for _ in range(count)])  # noqa: B023
        module, x = nn.Linear(3, 2), torch.randn(4, 3)
        add_tvm_dispatch(module, x)(x)
        assert stats(module).hits == 1
        assert noted == [(signal.SIGINT, True)] * count


def test_an_ignored_signal_stays_ignored(in_the_middle, handler):
    handler(signal.SIG_IGN)
    found = []
    in_the_middle(lambda: (interrupts.by_kill(), found.append(signal.getsignal(signal.SIGINT))))
    add_tvm_dispatch(nn.Linear(3, 2), torch.randn(4, 3))
    assert found == [signal.SIG_IGN]


def test_other_threads_leave_the_handler_alone(in_the_middle, handler):
    before, found = signal.getsignal(signal.SIGINT), []
    in_the_middle(lambda: found.append(signal.getsignal(signal.SIGINT)))
    thread = threading.Thread(target=add_tvm_dispatch, args=(nn.Linear(3, 2), torch.randn(4, 3)))
    thread.start()
    thread.join()
    assert found == [before]


def test_the_inner_of_two_does_nothing(handler):
    with pytest.raises(KeyboardInterrupt):
        with interrupts_deferred():
            with interrupts_deferred():
                interrupts.by_kill()
            reached = True
            raise_deferred()
    assert reached


def test_what_waits_for_another_threads_capture_is_interrupted(handler):
    entered, leave = threading.Event(), threading.Event()

    def capture():
        with one_capture_at_a_time():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=capture)
    thread.start()
    entered.wait()
    try:
        outcome = interrupts.interrupted(
            lambda: add_tvm_dispatch(nn.Linear(3, 2), torch.randn(4, 3)), 0.3, interrupts.by_raise
        )
        assert outcome == "interrupted"
        assert thread.is_alive()
    finally:
        leave.set()
        thread.join()


def test_a_wakeup_descriptor_is_written_at_once(in_the_middle, handler):
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    ours.setblocking(False)
    before, found = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False), []
    try:
        in_the_middle(lambda: (interrupts.by_kill(), found.append(os.read(ours.fileno(), 1))))
        with pytest.raises(KeyboardInterrupt):
            add_tvm_dispatch(nn.Linear(3, 2), torch.randn(4, 3))
    finally:
        assert signal.set_wakeup_fd(before) == theirs.fileno()
    assert found == [bytes([signal.SIGINT])]
    ours.close()
    theirs.close()


def test_a_dispatched_call_asks_for_no_handler(monkeypatch):
    module, x = nn.Linear(3, 2), torch.randn(4, 3)
    add_tvm_dispatch(module, x)
    monkeypatch.setattr(signal, "getsignal", lambda _: pytest.fail("asked for the handler"))
    module(x).sum().backward()
    assert stats(module).hits == 1
