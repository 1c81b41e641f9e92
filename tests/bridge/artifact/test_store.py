"""The store: get returns the value that was put, whole or not at all, whatever happens to files, disk and processes."""

from __future__ import annotations

import logging
import os
import random
import signal
import time

import pytest

from bridge.artifact import CacheSettings, Store, cache_settings, current_store, key_of, read_artifact, write_artifact
from bridge.artifact.store import prune
from bridge.base.session import SESSION

PARTS = {"text": b'{"a": 1}', "empty": b"", "raw": bytes(range(256)) * 40}
KEY = key_of("a test")
KILLS = 30
MOST_KILLS = 900
"""Until one of them was writing."""


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_is_put_is_got_by_another_store_too(store):
    assert store.get("kind", KEY) is None
    store.put("kind", KEY, PARTS, note="told")
    for other in (store, Store(store.settings)):
        found = other.get("kind", KEY)
        assert (found.parts, found.note) == (PARTS, "told")
    assert store.get("another", KEY) is None and store.get("kind", key_of("another")) is None
    assert [path.name for path in store.files()] == [KEY]


def test_a_store_that_is_off_does_nothing(tmp_path):
    off = Store(CacheSettings(enabled=False, folder=tmp_path / "cache", most_bytes=2**20))
    off.put("kind", KEY, PARTS)
    assert off.get("kind", KEY) is None and not (tmp_path / "cache").exists()


@pytest.mark.parametrize("at", [0, 15, 16, 40, 48, 60, 300, -1])
@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_damage_is_absence_with_one_warning(store, caplog, at, damage):
    store.put("kind", KEY, PARTS)
    path = store.path("kind", KEY)
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[at] ^= 1
    path.write_bytes(content[:at] if damage == "cut" else content)
    assert store.get("kind", KEY) is None and store.get("kind", KEY) is None
    assert len(warnings_of(caplog)) == 1 and str(path) in warnings_of(caplog)[0]
    store.put("kind", KEY, PARTS)
    assert store.get("kind", KEY).parts == PARTS


def test_files_of_another_origin_are_absent(store, caplog):
    path = store.path("kind", KEY)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"#!/bin/sh\n" * 100)
    assert store.get("kind", KEY) is None
    for kind, key in (("other", KEY), ("kind", key_of("other"))):  # a whole one, in the place of another
        path.write_bytes(write_artifact(kind, key, PARTS))
        assert store.get("kind", KEY) is None
    path.unlink()
    path.mkdir()
    assert store.get("kind", KEY) is None
    assert len(warnings_of(caplog)) == 2


def test_a_full_disk_costs_one_warning(store, caplog, monkeypatch):
    def full(self, content):
        with open(self, "wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.write_bytes", full)
        store.put("kind", KEY, PARTS)
        store.put("kind", key_of("other"), PARTS)
    assert len(warnings_of(caplog)) == 1 and "No space left" in warnings_of(caplog)[0]
    assert store.get("kind", KEY) is None
    assert [path for path in store.folder.rglob("*") if path.is_file()] == []


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="POSIX")
def test_a_directory_that_everybody_writes_to_is_refused(store, caplog):
    store.folder.mkdir()
    store.folder.chmod(0o777)
    store.put("kind", KEY, PARTS)
    assert store.get("kind", KEY) is None and list(store.folder.iterdir()) == []
    assert "writable for everybody" in warnings_of(caplog)[0]


def test_a_directory_that_cannot_be_made_costs_one_warning(tmp_path, caplog):
    SESSION.reset("complaints")
    (tmp_path / "file").write_text("")
    store = Store(CacheSettings(enabled=True, folder=tmp_path / "file" / "cache", most_bytes=2**20))
    store.put("kind", KEY, PARTS)
    assert store.get("kind", KEY) is None and len(warnings_of(caplog)) == 1


def test_the_least_recently_used_go_first(tmp_path):
    store = Store(CacheSettings(enabled=True, folder=tmp_path / "cache", most_bytes=40_000))
    keys = [key_of(number) for number in range(7)]
    now = time.time_ns()
    for age, key in enumerate(keys):
        store.put("kind", key, {"raw": bytes(5_000)})
        if store.path("kind", key).exists():
            os.utime(store.path("kind", key), ns=(now, now + age * 10**9))
    assert store.get("kind", keys[0]) is not None  # the latest used from now on
    os.utime(store.path("kind", keys[0]), ns=(now, now + 60 * 10**9))
    prune(store.folder, 20_000)
    left = [key for key in keys if store.path("kind", key).exists()]
    assert left == [keys[0], *keys[-2:]]
    store.put("kind", KEY, {"raw": bytes(50_000)})
    assert store.get("kind", KEY) is None, "larger than everything"


def test_what_killed_processes_left_goes_after_a_while(store):
    store.put("kind", KEY, PARTS)
    for name, age in (("new", 0), ("old", 7200)):
        path = store.folder / "unfinished" / name
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age,) * 2)
    prune(store.folder, 2**20)
    assert [path.name for path in (store.folder / "unfinished").iterdir()] == ["new"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX")
def test_writers_that_are_killed_leave_whole_files_or_none(store):
    """Whole processes, and as many as wanted: ``python -m tests.bridge.artifact.stress``."""
    contents = {key_of(number): {"raw": random.Random(number).randbytes(200_000)} for number in range(4)}
    rng, turn, caught = random.Random(0), 0, False
    ready, tell = os.pipe()
    while turn < KILLS or (not caught and turn < MOST_KILLS):
        child = os.fork()
        if child == 0:
            try:
                os.write(tell, b"!")
                while True:
                    for key in sorted(contents, key=lambda key: (key + key)[turn % 64 :]):
                        store.put("kind", key, contents[key])
            finally:
                os._exit(1)
        os.read(ready, 1)
        time.sleep(rng.uniform(0, 0.003))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        for key, parts in contents.items() if turn % 10 == 9 else ():
            found = store.get("kind", key)
            assert found is None or found.parts == parts
        turn, caught = turn + 1, any(store.folder.glob("unfinished/*"))
    os.close(ready), os.close(tell)
    assert caught, "some are killed while they write"
    whole = [path for path in store.files() if path.parent.parent.name == "kind"]
    assert whole
    for path in whole:
        read_artifact(path.read_bytes(), "kind", path.name)


def test_settings(tmp_path, monkeypatch, caplog):
    given = {"XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    usual = cache_settings(given)
    assert usual.enabled and usual.folder.name == "tvm_dispatch" and usual.most_bytes == 2 * 2**30
    assert not cache_settings({**given, "BRIDGE_CACHE": "0"}).enabled
    assert cache_settings({**given, "BRIDGE_CACHE_DIR": str(tmp_path / "x")}).folder == tmp_path / "x"
    sizes = {"500M": 500 * 2**20, "1.5g": 3 * 2**29, "1000": 1000, "2 GiB": 2**31, "7kB": 7 * 2**10}
    assert {text: cache_settings({**given, "BRIDGE_CACHE_SIZE": text}).most_bytes for text in sizes} == sizes
    with pytest.raises(ValueError, match="BRIDGE_CACHE_SIZE"):
        cache_settings({"BRIDGE_CACHE_SIZE": "much"})
    SESSION.reset("complaints")
    monkeypatch.setenv("BRIDGE_CACHE_SIZE", "much")
    assert current_store().settings.most_bytes == 2 * 2**30 and "much" in warnings_of(caplog)[0]


def test_keys_tell_values_apart_by_type_and_nesting():
    values = [1, 1.0, True, "1", b"1", None, (1,), ((1,),), (1, 1), ("1", "1"), ("11",), 0.0, -0.0, "None", (), ""]
    assert len({key_of(value) for value in values}) == len(values)
    assert key_of([1, (2,)]) == key_of((1, [2]))
    with pytest.raises(TypeError):
        key_of(object())


def test_a_relative_folder_is_one_wherever_the_process_goes(monkeypatch, tmp_path):
    monkeypatch.setenv("BRIDGE_CACHE_DIR", "here")
    first = cache_settings().folder
    monkeypatch.chdir(tmp_path)
    assert cache_settings().folder == first and first.is_absolute() and first.parent != tmp_path


def test_a_user_without_a_home_has_no_cache(monkeypatch, caplog):
    """A number without a name, as in many a container."""
    for name in ("HOME", "XDG_CACHE_HOME", "BRIDGE_CACHE_DIR", "BRIDGE_CACHE_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BRIDGE_CACHE", "1")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # where neither HOME nor the users say it
    SESSION.reset("complaints")
    store = current_store()
    store.put("kind", "0" * 64, {"part": b"1"})
    assert not store.is_usable and store.get("kind", "0" * 64) is None and "BRIDGE_CACHE_DIR" in caplog.text
    SESSION.reset("complaints")
