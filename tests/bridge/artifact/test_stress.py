"""The disk cache fails processes that lower a loop: killed writers, flipped bytes, a full disk.

Longer runs: ``python -m tests.bridge.artifact.stress``.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.bridge.artifact.stress import allowed_on_a_full_disk, artifacts, bits_on, flip, kill_at_random
from tests.bridge.artifact.works import looped

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX")


@pytest.mark.sweep  # test_store.py and test_once.py kill writers and holders of claims
def test_a_process_that_is_killed_leaves_whole_files():
    assert kill_at_random(looped, 2, random.Random(0))["killed"] >= 2


def test_flipped_bytes_cost_a_compilation(tmp_path):
    expected = bits_on(tmp_path, looped)
    for path in artifacts(tmp_path)["lowering"]:
        flip(path, random.Random(0))
    assert bits_on(tmp_path, looped) == expected


def test_a_full_disk_while_a_loop_is_lowered(tmp_path):
    assert bits_on(tmp_path, looped, largest_file=600) in allowed_on_a_full_disk(looped)
    assert "lowering" not in artifacts(tmp_path)
