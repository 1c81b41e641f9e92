"""Kernels run on torch's threads, as many as torch uses at the time of the call."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tvm.relax import op as R

from bridge.compile import compile_function
from bridge.compile.cpu.threads import end_team, in_a_plain_thread, launcher
from tests.bridge.compile_helpers import assert_same, function


class Environment(ctypes.Structure):
    _fields_ = [("sync", ctypes.c_void_p), ("tasks", ctypes.c_int)]


LAMBDA = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(Environment), ctypes.c_void_p)
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, LAMBDA, ctypes.c_void_p, ctypes.c_int)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def launch(status: int = 0, address: int | None = None) -> tuple[int, list[tuple[int, int]]]:
    """The status of a launch and the ``(task, tasks)`` that ran; the last task returns ``status``."""
    ran: list[tuple[int, int]] = []

    def task(index, environment, data):
        assert data == 42
        ran.append((index, environment.contents.tasks))
        return status if index == environment.contents.tasks - 1 else 0

    address = launcher() if address is None else address
    assert address is not None, "this torch has no OpenMP"
    return LAUNCH(address)(LAMBDA(task), 42, 0), sorted(ran)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_as_many_tasks_as_torch_has_threads(count):
    torch.set_num_threads(count)
    assert launch() == (0, [(index, count) for index in range(count)])


@pytest.mark.skipif(hasattr(ctypes.CDLL(None), "__kmpc_fork_call"), reason="another OpenMP run time than GNU's")
def test_a_team_ends_and_the_next_region_has_another():
    def team() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    torch.set_num_threads(5)
    assert launch()[0] == 0
    before = team()
    end_team()
    assert team() == before - 4
    end_team()  # of none
    assert launch() == (0, [(index, 5) for index in range(5)])
    assert team() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX")
@pytest.mark.parametrize("count", [1, 2])
def test_a_forked_process_measures(count):
    """A forked child's OpenMP believes in threads that it does not have."""
    torch.set_num_threads(2)
    assert launch()[0] == 0
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a wait for those threads never ends
        torch.set_num_threads(count)
        os._exit(in_a_plain_thread(lambda: 7))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_failing_task_is_reported():
    torch.set_num_threads(2)
    assert launch(-7) == (-7, [(0, 2), (1, 2)])


def large(emit, p):
    return [emit(R.nn.softmax(emit(R.tanh(p)), -1)), emit(R.sum(p, [0]))]


def test_results_do_not_depend_on_the_number_of_threads():
    x = torch.randn(512, 700)
    program = compile_function(function([((512, 700), "float32")], large), name="large")
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(program([x]))
    assert_same(results[0][0], torch.softmax(torch.tanh(x), -1), rtol=1e-5, atol=1e-7)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_python_threads_launch_at_once():
    x = torch.randn(512, 700)
    program = compile_function(function([((512, 700), "float32")], large), name="large")
    wanted = program([x])
    failures = []

    def work():
        for _ in range(20):
            failures.extend(not torch.equal(a, b) for a, b in zip(program([x]), wanted, strict=True))

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not any(failures)


def test_a_new_python_thread_uses_as_many():
    torch.set_num_threads(1)
    program = compile_function(function([((512, 700), "float32")], large), name="large")
    x, ran, address = torch.randn(512, 700), [], launcher()

    def work():
        program([x])
        ran.append(launch(address=address))

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert ran == [(0, [(0, 1)])]
