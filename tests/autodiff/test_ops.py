"""The table of operator traits: complete rows, real operators, and no traits for other operators."""

from __future__ import annotations

import doctest

import pytest

from autodiff import ops
from autodiff.ir import Op
from autodiff.ops import having, traits

NAMES = sorted(having())
COSTS = frozenset("random view slice creation cheap transcendental row reduction product".split())


@pytest.mark.parametrize("name", NAMES)
def test_every_row_is_consistent(name):
    held = traits(name)
    assert len(held & COSTS) == 1, "wanted exactly one cost class"
    assert "elementwise" in held or not held & {"broadcasting", "hoisted", "slow"}
    assert "view" in held or "plain" not in held
    assert "elementwise" not in held or held & {"cheap", "transcendental"}
    if name.startswith("relax."):
        assert Op.get(name).name == name  # raises for a name that TVM does not know


def test_an_operator_stands_in_one_line():
    with pytest.raises(ValueError, match=r"relax\.add stands twice"):
        ops._read((("cheap", "add subtract"), ("product", "matmul add")))


def test_what_is_not_in_the_table_has_no_traits():
    assert traits("relax.sort") == frozenset()
    assert traits("library.sort") == frozenset()


def test_the_examples_of_the_docstring():
    failed, tried = doctest.testmod(ops)
    assert tried and not failed
