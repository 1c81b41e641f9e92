"""Fixtures of several files of this folder."""

from __future__ import annotations

import pytest

from bridge.capture.loops import attempt, uncomputed


@pytest.fixture
def few_operators(monkeypatch):
    """Short loops are recorded, too, and small calls of a kind computed once."""
    monkeypatch.setattr(attempt, "LEAST_OPERATORS", 1)
    monkeypatch.setattr("bridge.capture.loops.rolled.LEAST_ROWS", 1)
    monkeypatch.setattr(uncomputed, "LEAST_ELEMENTS", 1)
