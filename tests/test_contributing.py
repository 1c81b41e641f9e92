"""The walk-throughs of ``docs/contributing.md`` work as they are printed: each test fails before its second step."""

import importlib.util
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from autodiff import UndifferentiableOp
from autodiff.gradients import registry
from bridge.aten.registry import CONVERSIONS
from bridge.base.session import SESSION
from bridge.base.torch_internals import aten
from tests.autodiff.golden import GOLDEN, assert_same
from tests.autodiff.gradcheck import check
from tests.autodiff.samples import elementwise

PAGE = Path(__file__).parent.parent / "docs" / "contributing.md"
TEXT = PAGE.read_text(encoding="utf-8")
OPERATOR_TEST, OPERATOR, SAMPLE, RULE, GOLDEN_TEST, PASS, ROW = (
    textwrap.dedent(block) for block in re.findall(r"^ *```python\n(.*?)^ *```$", TEXT, re.DOTALL | re.MULTILINE)
)

pytestmark = pytest.mark.cpu("the page's operators are counted in a CPU's programs")


def imported(monkeypatch, folder, name, *blocks):
    """A module made of blocks; TVMScript wants a file."""
    path = folder / f"{name}.py"
    path.write_text("\n\n".join(blocks), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_an_operator(tmp_path, monkeypatch):
    written = imported(monkeypatch, tmp_path, "written_test", OPERATOR_TEST)
    with pytest.raises(AssertionError):
        written.test_left_shift(1)
    monkeypatch.setitem(CONVERSIONS, aten.bitwise_left_shift.Tensor_Scalar, None)  # taken out again at the end
    del CONVERSIONS[aten.bitwise_left_shift.Tensor_Scalar]
    SESSION.reset("lowerings", "programs")
    imported(monkeypatch, tmp_path, "written_operator", _names("bridge.aten.pointwise"), OPERATOR)
    for count in (0, 1, 62, 63, 64):
        written.test_left_shift(count)
    SESSION.reset("lowerings", "programs")


def _names(module):
    """Imports of all names that a file of the tree has, as code that is added to it sees them."""
    return f"import {module} as here\nglobals().update({{k: v for k, v in vars(here).items() if k[:2] != '__'}})"


def test_a_gradient_rule(tmp_path, monkeypatch):
    relaxs, reference, x = eval(SAMPLE.partition(":")[2].partition("#")[0].strip(" ,"), vars(elementwise))
    monkeypatch.delitem(registry.RULES, "relax.erf")

    def build(_, given):
        return relaxs(given)

    with pytest.raises(UndifferentiableOp):
        check(build, reference, x)
    imported(monkeypatch, tmp_path, "written_rule", _names("autodiff.gradients.elementwise"), RULE)
    check(build, reference, x)


def test_a_pass(tmp_path, monkeypatch):
    names = [_names("autodiff.zapp"), "from autodiff.body import Body, on_functions, rewrite"]
    golden = [_names("tests.autodiff.golden.simplification"), GOLDEN_TEST]
    try:
        imported(monkeypatch, tmp_path, "written_pass", *names, PASS, *golden)
        entry = GOLDEN["TheSecondOfTwoIsDropped"]
        assert_same(entry.apply(entry.before), entry.expected)
        assert entry.apply(entry.expected) is entry.expected
    finally:
        GOLDEN.pop("TheSecondOfTwoIsDropped", None)


def test_a_row_of_the_table():
    assert ROW.startswith("@pytest.mark.composes(") and compile(ROW, "contributing.md", "exec")
    assert torch.ops.aten.bitwise_left_shift.Tensor_Scalar not in CONVERSIONS
