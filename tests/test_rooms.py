"""Import rules: rooms import one way, no file is long, and the packages below ``bridge`` know nothing of it."""

from __future__ import annotations

import pytest

from tests.rooms import BOUNDS, BRIDGE, COMPILE, MOST_LINES, tree


@pytest.mark.parametrize(("prefix", "order"), [("bridge", BRIDGE), ("bridge.compile", COMPILE)])
def test_no_import_runs_backward(prefix, order):
    assert tree().backward(prefix, order) == []


def test_rooms_are_entered_through_their_faces():
    assert tree().past_a_face() == []


def test_packages_import_one_way():
    below = {"autodiff": ("partition", "bridge"), "partition": ("bridge",)}
    pairs = [(a, b) for a, b in tree().imports if b.split(".")[0] in below.get(a.split(".")[0], ())]
    assert pairs == []


def test_no_modules_import_one_another():
    assert tree().circles() == []


def test_no_file_is_long():
    assert {module: lines for module, lines in tree().lines.items() if lines > MOST_LINES} == {}


@pytest.mark.parametrize("what", BOUNDS)
def test_the_tree_does_not_grow(what):
    assert tree().sizes()[what] <= BOUNDS[what]
