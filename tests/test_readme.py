"""What the README promises is backed by tests: every test that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def named_tests() -> list[str]:
    """``test_file::test_name``, or ``test_file`` for all of its tests; a name alone is of the file named before it."""
    section = (ROOT / "README.md").read_text().partition("## What composes with what")[2].partition("\n## ")[0]
    found = []
    for line in section.splitlines():
        file = ""
        for name in re.findall(r"`((?:\w+/)?test_\w+(?:::test_\w+)?)`", line.rpartition(" | ")[2]):
            is_file = "::" in name or (ROOT / "tests" / "bridge" / f"{name}.py").exists()
            file = name.partition("::")[0] if is_file else file
            found.append(name if is_file else f"{file}::{name}")
    return found


@pytest.mark.parametrize("name", named_tests())
def test_a_test_that_the_readme_names_exists(name):
    file, _, function = name.partition("::")
    tree = ast.parse((ROOT / "tests" / "bridge" / f"{file}.py").read_text())
    functions = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert function in functions if function else any(name.startswith("test_") for name in functions)


def test_every_row_names_a_test():
    section = (ROOT / "README.md").read_text().partition("## What composes with what")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and not line.startswith(("| with", "| **"))]
    assert len(rows) > 30
    assert all("test_" in row.rpartition(" | ")[2] for row in rows)
