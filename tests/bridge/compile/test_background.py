"""Builds in the background: results, exceptions, one at a time, and a fork that waits for them."""

import os
import threading

import pytest

from bridge.compile.runtime.build import Build, others_may_build, settle


def test_a_build_goes_on_beside_its_maker():
    gate = threading.Event()
    build = Build(lambda: gate.wait(60) and "made")
    gate.set()
    assert build.result() == "made" and not build.has_failed and build.seconds > 0


def test_what_goes_wrong_is_raised_where_the_result_is_asked_for():
    def broken():
        raise ValueError("broken")

    build = Build(broken)
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            build.result()
    assert build.has_failed


def test_one_at_a_time():
    inside, most = [], []

    def work():
        inside.append(1)
        most.append(len(inside))
        inside.pop()

    builds = [Build(work) for _ in range(20)]
    settle()
    assert most == [1] * 20 and not any(build.has_failed for build in builds)


def test_another_one_begins_while_one_waits():
    began = threading.Event()

    def work():
        with others_may_build():
            return began.wait(60)

    first, second = Build(work), Build(began.set)
    assert first.result() and second.result() is None


def test_what_needs_no_compiler_is_done_before_its_turn():
    gate, done = threading.Event(), threading.Event()
    waits = Build(lambda: gate.wait(60))
    build = Build(lambda: 4, done.set)
    assert done.wait(60)
    gate.set()
    assert waits.result() and build.result() == 4


def test_without_threads_it_is_done_at_once(monkeypatch):
    def none_left(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    assert Build(lambda: 3).result() == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_waits():
    done = []
    gate = threading.Timer(0.05, lambda: None)
    gate.start()
    Build(lambda: (gate.join(), done.append(1)))
    child = os.fork()
    if child == 0:
        os._exit(0 if done and Build(lambda: 4).result() == 4 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
