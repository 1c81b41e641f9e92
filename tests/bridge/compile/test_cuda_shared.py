"""Shared memory of kernels for a GPU: all arrays of one together are no more than a kernel may declare."""

from __future__ import annotations

import re

import pytest

from autodiff.extents import ExtentScope
from bridge.compile.cuda.build import cuda_source
from bridge.compile.cuda.limits import SHARED_BYTES
from bridge.compile.cuda.nvrtc import compiled
from tests.bridge.compile.cuda_graphs import column_sums, layer_norm_backward, rows_and_columns
from tests.cuda_plans import BACKEND, FOR_LITTLE, planned
from tests.nvrtc import needs_nvrtc
from tests.sampling import sampled

_ARRAY = re.compile(r"__shared__ alignas\((\d+)\) ([\w ]+?) \w+\[(\d+)\]")
_BYTES = {"double": 8, "int64_t": 8, "float": 4, "int": 4, "half": 2, "signed char": 1, "bool": 1}
WIDTHS = (31, 64, 128, 256, 1000, 1024, 2048)
MIXED = ("float32", "int64", "int32")


def source(graphs, backend):
    plans = {each.plan: None for graph in graphs for each in planned(graph, backend)}
    return cuda_source({f"k{index}": backend.kernel(plan) for index, plan in enumerate(plans)}, "sm_90")


def shared_bytes(text):
    """Shared memory of each kernel in bytes, each array rounded up to its alignment."""
    found = []
    for kernel in text.split("// ---- kernels")[1].split("__global__")[1:]:
        arrays = _ARRAY.findall(kernel)
        assert kernel.count("__shared__") == len(arrays)
        found.append(sum(-(-int(n) * _BYTES[of] // int(at)) * int(at) for at, of, n in arrays))
    return found


@pytest.mark.parametrize("backend", [BACKEND, FOR_LITTLE], ids=["large", "little"])
@pytest.mark.parametrize(
    ("dtype", "others"),
    sampled([("float32", ()), ("float64", ()), ("float64", MIXED)], [("float32", ()), ("float64", MIXED)]),
)
def test_no_kernel_declares_more_than_there_is(backend, dtype, others):
    graphs = [rows_and_columns(rows, width, dtype, others) for width in WIDTHS for rows in (60, 700)]
    graphs += [layer_norm_backward(256, 256, dtype), column_sums(2, 500, 64, dtype=dtype)]
    names = ExtentScope()
    graphs.append(rows_and_columns(names.symbol("rows", 60), names.symbol("columns", 256), dtype, others))
    found = shared_bytes(source(graphs, backend))
    assert len(found) > 10 and 0 < max(found) <= SHARED_BYTES


@needs_nvrtc
@pytest.mark.parametrize(("dtype", "others"), sampled([("float64", ()), ("float64", MIXED)], [("float64", MIXED)]))
def test_nvrtc_takes_the_most_that_kernels_declare(dtype, others):
    """Few rows of many threads, and many rows of few; an array of a block's size for each reduction took 64 KiB."""
    assert compiled(source([rows_and_columns(60, 1024, dtype, others)], FOR_LITTLE), "sm_90")
    assert compiled(source([rows_and_columns(700, 128, dtype, others)], BACKEND), "sm_90")
