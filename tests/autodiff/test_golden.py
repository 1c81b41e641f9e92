"""Every pass of autodiff against its golden tests, and a pass without one."""

from __future__ import annotations

import importlib

import pytest

import autodiff
from autodiff.clean import PASSES
from autodiff.ir import bindings, op_name
from autodiff.normalization import SPELLINGS
from tests.autodiff.golden import GOLDEN, assert_same, is_pass

for _name in ("simplification", "structure", "normalizations", "differentiation", "extents", "inference"):
    importlib.import_module(f"tests.autodiff.golden.{_name}")

EXPORTED = [value for name in autodiff.__all__ if is_pass(value := getattr(autodiff, name))]
ALL_PASSES = {apply.__name__: apply for apply in (*EXPORTED, *PASSES)}
#: Passes that return their own result unchanged. The others add parameters, or differentiate once more.
IDEMPOTENT = [name for name, entry in GOLDEN.items() if not entry.options and entry.apply is not autodiff.differentiate]


@pytest.mark.parametrize("name", GOLDEN)
def test_before_becomes_expected(name):
    entry = GOLDEN[name]
    assert_same(entry.apply(entry.before, **entry.options), entry.expected)


@pytest.mark.parametrize("name", IDEMPOTENT)
def test_unchanged_is_the_same_object(name):
    entry = GOLDEN[name]
    assert entry.apply(entry.expected) is entry.expected


@pytest.mark.parametrize("name", ALL_PASSES)
def test_every_pass_has_a_golden_test(name):
    tested = [entry.apply for entry in GOLDEN.values()]
    assert ALL_PASSES[name] in tested, f"add Before and Expected of {name} to tests/autodiff/golden/"


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_normalization_has_a_golden_test(name):
    befores = [entry.before for entry in GOLDEN.values() if entry.apply is autodiff.spell_out]
    assert name in {op_name(value) for before in befores for _, value in bindings(before)}


def test_the_list_of_passes_is_not_empty():
    assert {"zero_zapp", "differentiate", "project_tuples", "clean", "seed_vjp"} <= set(ALL_PASSES)
