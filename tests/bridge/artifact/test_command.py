"""``python -m bridge.cache``: lists, verifies, prunes, clears; a pack is all that another machine of the kind needs."""

from __future__ import annotations

import os

import pytest

from bridge import cache
from bridge.artifact import CacheSettings, Store, current_store, key_of, read_artifact, to_parts, write_artifact
from tests.bridge.artifact.count_builds import counted, in_children

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX")


def test_list_verify_prune_clear(used_cache, capsys):
    store = current_store()
    for number in range(4):
        store.put("kind", key_of(number), {"raw": bytes(10_000)}, f"number {number}")
    assert cache.main(["list", "--all"]) == 0
    told = capsys.readouterr().out
    assert "number 3" in told and "4 artifacts" in told and str(used_cache) in told
    assert cache.main(["verify"]) == 0
    path = store.path("kind", key_of(2))
    path.write_bytes(path.read_bytes()[:-1])
    assert cache.main(["verify"]) == 1 and cache.main(["verify", "--remove"]) == 0 and not path.exists()
    assert cache.main(["prune", "--size", "15K"]) == 0
    assert len(list(store.files())) == 1
    (used_cache / "mine").write_text("not the cache's")
    assert cache.main(["clear"]) == 0
    assert [path.name for path in used_cache.iterdir()] == ["mine"]


def test_without_a_cache(monkeypatch, capsys):
    monkeypatch.setenv("BRIDGE_CACHE", "0")
    assert cache.main(["list"]) == 1 and "off" in capsys.readouterr().err


def test_a_pack_is_all_that_another_machine_needs(used_cache, tmp_path, monkeypatch, capsys):
    (first,) = in_children(1)
    current_store().put("program", key_of("another model's"), to_parts({"digest": "-", "kernels": {}}))
    file = tmp_path / "block.pack"
    assert cache.main(["pack", "Block", str(file)]) == 0
    assert cache.main(["pack", "NoSuchModel", str(file)]) == 1 and "count_builds.Block" in capsys.readouterr().err
    monkeypatch.setenv("BRIDGE_CACHE_DIR", str(tmp_path / "other"))
    assert cache.main(["unpack", str(file)]) == 0
    assert current_store().get("program", key_of("another model's")) is None
    (second,) = in_children(1, counted)
    assert second["bits"] == first["bits"] and second["translated"] == second["captured"] == 0
    assert set(second["built"]) <= {"bridge_bernoulli", "bridge_hold"}, "the generator's kernels are no program's"


@pytest.mark.parametrize("change", ["torch", "sources", "processor features"])
def test_a_pack_for_something_else_is_refused(tmp_path, monkeypatch, change, capsys):
    store = Store(CacheSettings(enabled=True, folder=tmp_path / "cache", most_bytes=2**20))
    made_for = {**cache._made_for(), change: "another"}
    file = tmp_path / "file"
    content = write_artifact("kind", key_of(1), {"raw": b"x"})
    for given in (made_for, cache._made_for()):
        parts = {f"kind/{key_of(1)}": content} | to_parts(given)
        file.write_bytes(write_artifact("pack", key_of("x"), parts))
        if given is made_for:
            with pytest.raises(ValueError, match=f"made for {change} 'another'"):
                cache.unpack(file, store)
            assert not list(store.files())
    assert cache.unpack(file, store) == 1 and read_artifact(next(store.files()).read_bytes())[1] == {"raw": b"x"}
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ValueError, match="damaged"):
        cache.unpack(file, store)
