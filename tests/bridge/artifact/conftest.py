"""Fixture: a disk cache for one test."""

from __future__ import annotations

import pytest

from bridge.artifact import CacheSettings, Store
from bridge.base.session import SESSION


@pytest.fixture
def store(tmp_path):
    SESSION.reset("complaints")
    yield Store(CacheSettings(enabled=True, folder=tmp_path / "cache", most_bytes=2**24))
    SESSION.reset("complaints")


@pytest.fixture
def used_cache(tmp_path, monkeypatch):
    """The folder of a cache that this process uses, empty at first."""
    SESSION.reset("complaints")
    monkeypatch.setenv("BRIDGE_CACHE", "1")
    monkeypatch.setenv("BRIDGE_CACHE_DIR", str(tmp_path / "used"))
    yield tmp_path / "used"
    SESSION.reset("complaints")
