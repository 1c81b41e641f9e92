"""The notebooks run from top to bottom, and what is kept of their outputs belongs to the cells as they are."""

import re

import nbformat
import pytest

from notebooks.run import HERE, NAMES, execute, pair, source

MEGABYTE = 10**6


def kept(name):
    return nbformat.read(pair(name), as_version=4)


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_runs(name):
    """A cell that raises fails here: so does every claim, for claims are computed."""
    executed = execute(source(name))
    assert [cell for cell in executed.cells if cell.cell_type == "code" and cell.outputs]


@pytest.mark.parametrize("name", NAMES)
def test_a_pair_has_the_same_cells(name):
    wanted = [(cell.cell_type, cell.source) for cell in source(name).cells]
    assert [(cell.cell_type, cell.source) for cell in kept(name).cells] == wanted, f"python -m notebooks.run {name}"


@pytest.mark.parametrize("name", NAMES)
def test_a_kept_notebook_is_whole(name):
    """Executed in order, without an exception, with a picture, and nothing of the machine that ran it."""
    code = [cell for cell in kept(name).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert [output for output in outputs if "image/svg+xml" in output.get("data", {})]
    assert not re.findall(r"(?:/home/|/root/|/tmp/|/work/|[A-Z]:\\\\)\S*", pair(name).read_text())


def test_the_folder_stays_small():
    sizes = {path.name: path.stat().st_size for path in HERE.iterdir() if path.is_file()}
    assert sum(sizes.values()) < 2 * MEGABYTE, sizes


def test_every_notebook_is_listed():
    assert {path.stem for path in HERE.glob("*.ipynb")} == set(NAMES)
    assert all(name in (HERE / "README.md").read_text() for name in NAMES)
