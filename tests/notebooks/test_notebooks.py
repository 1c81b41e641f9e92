"""The notebooks run from top to bottom, and their saved outputs belong to the cells as they are."""

import itertools
import re

import nbformat
import pytest

from notebooks.run import HERE, NAMES, execute, pair, source
from tests.sampling import sampled

pytestmark = pytest.mark.slow

ALWAYS = ("training_through_tvm", "your_own_recurrent_cell")
"""The use of the bridge, stage by stage, and loops. The other notebooks show a model and refusals, which
have tests of their own."""


FEWER = {"steps=60": "steps=12", "epochs=12": "epochs=6", "lengths = (2, 4, 8)": "lengths = (2, 8)"}
"""Numbers that a cell takes less time with, and claims the same."""

PRELUDE = """
from benchmarks.saved_bytes import PREPARATIONS
from tests.unclocked import choose_without_clock

choose_without_clock()
for name in [*PREPARATIONS][1:]:
    del PREPARATIONS[name]
"""
"""The kernel's settings, as the tests have them: products are chosen without a clock, calls are timed in a few rounds.
One preparation of torch's partitioner, of three that tests/bridge/show/test_saved_bytes.py has, is beside ours."""


def saved(name):
    return nbformat.read(pair(name), as_version=4)


@pytest.mark.parametrize(
    "names", sampled([(ALWAYS,), (tuple(name for name in NAMES if name not in ALWAYS),)], [ALWAYS]), ids="-".join
)
def test_every_cell_runs(names):
    """A cell that raises fails here, and the message holds it: so does every claim, for claims are computed.

    One kernel runs the notebooks one after the other, each without the names of the one before: it imports torch and
    TVM once. ``torch.compile``, which one cell is timed beside, compiles nothing: Inductor's time is not ours.
    """
    whole = source(names[0])
    first, whole.cells, ends = whole.cells, [nbformat.v4.new_code_cell(PRELUDE)], [1]
    for cells in (first, *(source(name).cells for name in names[1:])):
        whole.cells += [nbformat.v4.new_code_cell("%reset -f"), *cells]
        ends.append(len(whole.cells))
    for index, cell in enumerate(whole.cells):
        cell.id = f"cell-{index}"
        for many, few in FEWER.items():
            cell.source = cell.source.replace(many, few)
    cells = execute(whole, TORCH_COMPILE_DISABLE="1").cells
    for first, last in itertools.pairwise(ends):
        assert [cell for cell in cells[first:last] if cell.cell_type == "code" and cell.outputs]


def test_what_fewer_are_run_of_is_there():
    code = "\n".join(cell.source for name in NAMES for cell in source(name).cells if cell.cell_type == "code")
    assert all(code.count(many) == 1 for many in FEWER)


@pytest.mark.parametrize("name", NAMES)
def test_a_pair_has_the_same_cells(name):
    wanted = [(cell.cell_type, cell.source) for cell in source(name).cells]
    assert [(cell.cell_type, cell.source) for cell in saved(name).cells] == wanted, f"python -m notebooks.run {name}"


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_notebook_is_whole(name):
    """Executed in order, without an exception, with all pictures, and nothing of the machine that ran it."""
    code = [cell for cell in saved(name).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert [output for output in outputs if "image/svg+xml" in output.get("data", {})]
    assert "digraph" not in pair(name).read_text(encoding="utf-8"), "written where graphviz's dot is not installed"
    assert not re.findall(r"(?:/home/|/root/|/tmp/|/work/|[A-Z]:\\\\)\S*", pair(name).read_text())


def test_every_notebook_is_listed():
    assert {path.stem for path in HERE.glob("*.ipynb")} == set(NAMES)
    assert all(name in (HERE / "README.md").read_text() for name in NAMES)
