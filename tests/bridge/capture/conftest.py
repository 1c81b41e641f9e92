"""Fixtures of several files of this folder."""

from __future__ import annotations

import pytest


@pytest.fixture
def few_operators(monkeypatch):
    """Short loops are also rolled up."""
    monkeypatch.setattr("bridge.capture.loops.rolled.LEAST_ROWS", 1)
