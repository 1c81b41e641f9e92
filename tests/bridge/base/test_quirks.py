"""The table of quirks: each row's handler and test exist, and the command prints it."""

import ast
import importlib
import pathlib
import subprocess
import sys

import pytest
from torch.torch_version import TorchVersion

from bridge.base.quirks import Quirk, table
from bridge.capture.refusals import shape_by_numbers
from bridge.quirks import all_quirks

ROOT = pathlib.Path(__file__).parents[3]
ROWS = all_quirks()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.operators[0])
def test_a_row_leads_to_its_handler_and_its_test(row):
    file, _, name = row.test.partition("::")
    assert (ROOT / file).is_file()
    assert name in (ROOT / file).read_text()
    module, _, function = row.handler.rpartition(".")
    assert hasattr(importlib.import_module(module), function)
    assert row.reason and not row.reason.endswith(".")
    for bound in filter(None, (row.since, row.until)):
        assert TorchVersion(bound) < TorchVersion("3")


def test_no_operator_is_handled_twice_for_one_reason():
    keys = [(row.operators, row.reason, row.since, row.until) for row in ROWS]
    assert len(set(keys)) == len(keys)


def test_versions_in_words():
    row = Quirk(("torch.f",), "does", "tests", "here.f", until="1.0")
    assert row.versions == "before 1.0" and not row.applies
    assert Quirk(("torch.f",), "does", "tests", "here.f", since="1.0").applies
    assert "(not this one)" in table([row])


def test_a_librarys_row_is_no_versions():
    row = Quirk(("Cache",), "does", "tests", "here.f", library="transformers")
    assert row.versions == "transformers" and row.applies


def test_experts_are_told_what_helps():
    told = shape_by_numbers("model.py:3: rows = torch.where(expert_mask[0])")
    assert "set_experts_implementation" in told.hint


def test_no_version_of_torch_is_asked_for_outside_of_the_table():
    """Of Python's versions, its bytecode is read; torch's are in reports and keys."""
    asked = [
        f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
        for package in ("bridge", "autodiff", "partition")
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare) and "__version__" in ast.unparse(node)
    ]
    assert asked == []


@pytest.mark.slow
def test_the_command_prints_every_row():
    found = subprocess.run(
        [sys.executable, "-m", "bridge.quirks"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.count("\n") == len(ROWS) + 2
