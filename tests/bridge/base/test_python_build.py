"""Builds of Python without a global interpreter lock are refused by name."""

from __future__ import annotations

import sys

import pytest


def test_a_free_threaded_build_is_refused_on_import(monkeypatch):
    monkeypatch.setattr(sys, "version", "3.13.5 experimental free-threading build (main, Jun 11 2025) [GCC 13]")
    for name in [name for name in sys.modules if name == "bridge" or name.startswith("bridge.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match="free-threaded"):
        import bridge  # noqa: F401
