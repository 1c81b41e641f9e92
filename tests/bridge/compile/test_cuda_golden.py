"""Loop IR → CUDA C, word for word. ``python -m tests.bridge.compile.test_cuda_golden`` writes the files anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.compile.cuda.build import cuda_source
from bridge.compile.loop_ir.graph import Graph
from tests.bridge.compile.planned_graphs import Builder
from tests.cuda_plans import BACKEND, planned

FOLDER = Path(__file__).parent / "golden"


def flat() -> Graph:
    """Vectors of a space without rows, and a rest."""
    b = Builder()
    x, y = b.param(7, 33), b.param(7, 33)
    return b.graph(b.op("add", b.op("multiply", x, 2.0), y))


def half_rows() -> Graph:
    """bfloat16, an operand that all rows read."""
    b = Builder("bfloat16")
    return b.graph(b.op("add", b.param(9, 300), b.param(300)))


def row_maximum() -> Graph:
    """Rows of two threads each, 64 in a block."""
    b = Builder()
    x = b.param(50, 8)
    return b.graph(b.op("subtract", x, b.reduce("max", x, 50, 8, 1, 50, 1)))


def column_sum() -> Graph:
    """Few rows: a thread for each column; many: eight."""
    b = Builder()
    return b.graph(b.reduce("sum", b.param(3, 20, 5), 3, 20, 5, 3, 5))


GRAPHS = {make.__name__: make for make in (flat, half_rows, row_maximum, column_sum)}


def kernels(name: str) -> str:
    functions = {f"k{i}": BACKEND.kernel(each.plan) for i, each in enumerate(planned(GRAPHS[name]()))}
    return cuda_source(functions, "sm_90").split("// ---- kernels\n")[1].strip() + "\n"


@pytest.mark.parametrize("name", GRAPHS)
def test_cuda_c(name):
    assert kernels(name) == (FOLDER / f"{name}.cu").read_text()


if __name__ == "__main__":
    for name in GRAPHS:
        (FOLDER / f"{name}.cu").write_text(kernels(name))
