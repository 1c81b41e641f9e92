"""Builds of Python without a global interpreter lock are refused by name."""

from __future__ import annotations

import sys
import sysconfig

import pytest


def test_a_free_threaded_build_is_refused_on_import(monkeypatch):
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: 1 if name == "Py_GIL_DISABLED" else None)
    for name in [name for name in sys.modules if name == "bridge" or name.startswith("bridge.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match="free-threaded"):
        import bridge  # noqa: F401
