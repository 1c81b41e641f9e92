"""Digests of a module's code: source files, read in the background."""

from __future__ import annotations

import importlib.util
import os
import sys
from uuid import uuid4

import pytest

from bridge.lowering.reuse import begin_reading, code_digest

TEXT = """
from torch import nn

class Scaled(nn.Module):
    def forward(self, x):
        return x * 2
"""


@pytest.fixture
def scaled(tmp_path, monkeypatch):
    """A module whose class is in a file, and the file."""
    path = tmp_path / f"scaled_{uuid4().hex}.py"
    path.write_text(TEXT)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    found = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, found)
    spec.loader.exec_module(found)
    return found.Scaled(), path


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system is not asked")
def test_the_system_is_asked_for_what_the_digest_is_of(scaled, monkeypatch):
    module, path = scaled
    asked_for = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, *_: asked_for.append(os.fstat(file).st_ino))
    opened = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        begin_reading(module)
    assert asked_for.count(os.stat(path).st_ino) == 1 and len(os.listdir("/proc/self/fd")) == opened
    assert code_digest(module) == code_digest(module) is not None


def test_an_edited_file_is_read_again(scaled):
    module, path = scaled
    before = code_digest(module)
    begin_reading(module)
    path.write_text(TEXT.replace("2", "3"))
    os.utime(path, ns=(0, 12345))
    assert code_digest(module) != before


def test_a_file_that_is_gone(scaled):
    module, path = scaled
    path.unlink()
    begin_reading(module)
    assert code_digest(module) is None
