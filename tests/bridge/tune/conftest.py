"""Fixtures: a disk cache for one test, and A/B timing whose seconds follow from the candidates' choices."""

from __future__ import annotations

import pytest

from bridge.base.session import SESSION


@pytest.fixture
def used_cache(tmp_path, monkeypatch):
    """The folder of a cache that this process uses, empty at first; other choices of products end with the test."""
    SESSION.reset("complaints")
    monkeypatch.setenv("BRIDGE_CACHE", "1")
    monkeypatch.setenv("BRIDGE_CACHE_DIR", str(tmp_path / "used"))
    SESSION.reset("choices")
    yield tmp_path / "used"
    SESSION.reset("complaints", "choices")


@pytest.fixture
def as_another_process():
    """Clears this process's compiled code: later hits come from the disk."""

    def forget():
        SESSION.reset("lowerings", "programs", "choices")

    return forget


class FakeRace:
    """Stands in for A/B timing: seconds of choices by ``seconds_of``, without running anything."""

    def __init__(self, seconds_of):
        self.seconds_of, self.count = seconds_of, 0

    def __call__(self, one, other):
        self.count += 1
        pair = tuple(self.seconds_of(step.entry.forward.backend.choices) for step in (one, other))
        return [pair] * 7


@pytest.fixture
def fake_race():
    return FakeRace
