"""Private names of torch stand in one file, and a name that a version lacks is reported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import bridge
from bridge.base import torch_internals
from bridge.base.torch_internals import MissingInternalError, aten

ROOM = Path(bridge.__file__).parent


def private_names(source: str) -> Iterator[str]:
    """Names of torch with a component that begins with one underscore, operators (``torch.ops``) excepted."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)] if ast.unparse(node).startswith(PREFIXES) else []
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[:2] != ["torch", "ops"] and any(part[0] == "_" and part[:2] != "__" for part in parts if part):
                yield name


PREFIXES = ("torch.", "nn.Module.", "pytree.")  # the last one is a module of torch under a name of ours
FILES = [path for path in sorted(ROOM.rglob("*.py")) if path.name != "torch_internals.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOM)))
def test_no_private_name_of_torch_elsewhere(path):
    assert list(private_names(path.read_text())) == []


def test_the_lint_sees_private_names():
    source = "from torch._subclasses import FakeTensor\nimport torch._dynamo\nx = torch._C.f\nfrom torch import _ops"
    source += "\npytree._get_node_type"
    found = {"torch._subclasses.FakeTensor", "torch._dynamo", "torch._C.f", "torch._ops", "pytree._get_node_type"}
    assert found <= set(private_names(source))


def test_an_operator_that_this_torch_lacks_is_no_other_and_says_its_name_when_called():
    absent = aten.operator_of_another_year.default
    assert absent is aten.operator_of_another_year.default
    assert absent not in {torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor}
    assert torch_internals.PROBES["torch.ops.aten.operator_of_another_year"] is False
    with pytest.raises(MissingInternalError, match=r"no torch\.ops\.aten\.operator_of_another_year\.default"):
        absent(torch.ones(1))


def test_an_operator_that_is_there_is_torchs_own():
    assert aten.add is torch.ops.aten.add


def test_a_missing_name_is_an_error_that_says_so_or_takes_its_fallback():
    with pytest.raises(MissingInternalError, match=r"has no torch\._C\.no_such_thing; .* was run with torch 2\."):
        torch_internals.find("torch._C.no_such_thing")
    assert torch_internals.find("torch._C.no_such_thing", None) is None
