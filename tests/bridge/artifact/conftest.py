"""A cache of a test's own."""

from __future__ import annotations

import pytest

from bridge.artifact import CacheSettings, Store
from bridge.artifact.settings import forget_complaints


@pytest.fixture
def store(tmp_path):
    forget_complaints()
    yield Store(CacheSettings(enabled=True, folder=tmp_path / "cache", most_bytes=2**24))
    forget_complaints()


@pytest.fixture
def used_cache(tmp_path, monkeypatch):
    """The folder of a cache that this process uses, empty at first."""
    forget_complaints()
    monkeypatch.setenv("BRIDGE_CACHE", "1")
    monkeypatch.setenv("BRIDGE_CACHE_DIR", str(tmp_path / "used"))
    yield tmp_path / "used"
    forget_complaints()
