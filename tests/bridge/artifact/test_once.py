"""Processes that need the same artifact at once: one makes it; if it is killed, another one does."""

from __future__ import annotations

import os
import signal
import time

import pytest

from bridge.artifact import key_of, made_once
from bridge.artifact import store as artifact_store

KEY = key_of("made once")

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX")


def child(work):
    number = os.fork()
    if number == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return number


def make_into(store, log, seconds):
    def make():
        with open(log, "a") as file:
            file.write("made\n")
        time.sleep(seconds)
        store.put("kind", KEY, {"raw": b"x"})
        return b"x"

    return lambda: made_once(store, KEY, lambda: getattr(store.get("kind", KEY), "parts", {}).get("raw"), make)


def test_eight_processes_make_it_once(store, tmp_path):
    log = tmp_path / "log"
    children = [child(make_into(store, log, 0.2)) for _ in range(8)]
    assert [os.waitpid(number, 0)[1] for number in children] == [0] * 8
    assert log.read_text() == "made\n"
    assert list((store.folder / "claims").iterdir()) == []


def test_who_is_killed_keeps_nobody(store, tmp_path):
    log = tmp_path / "log"
    stuck = child(make_into(store, log, 60))
    while not log.exists():
        time.sleep(0.005)
    os.kill(stuck, signal.SIGKILL)
    os.waitpid(stuck, 0)
    assert list((store.folder / "claims").iterdir()), "the claim is still there"
    started = time.monotonic()
    assert make_into(store, log, 0)() == b"x"
    assert time.monotonic() - started < 2 and log.read_text() == "made\nmade\n"


def test_a_file_that_nobody_holds_keeps_nobody(store):
    store.put("other", KEY, {})
    claim = store.folder / "claims" / KEY
    claim.parent.mkdir()
    claim.write_text("elsewhere 1 1")
    started = time.monotonic()
    assert made_once(store, KEY, lambda: None, lambda: 1) == 1
    assert time.monotonic() - started < 2


def test_nobody_waits_for_long(store, tmp_path, monkeypatch):
    log = tmp_path / "log"
    stuck = child(make_into(store, log, 60))
    while not log.exists():
        time.sleep(0.005)
    monkeypatch.setattr(artifact_store, "_LONGEST", 0.1)
    started = time.monotonic()
    assert make_into(store, log, 0)() == b"x"
    assert 0.1 < time.monotonic() - started < 20 and log.read_text() == "made\nmade\n"
    os.kill(stuck, signal.SIGKILL)
    os.waitpid(stuck, 0)


def test_no_artifact_without_what_makes_it(store):
    def fail():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        made_once(store, KEY, lambda: None, fail)
    assert made_once(store, KEY, lambda: None, lambda: 2) == 2
