"""Gathers of rows and scatter-adds by the GPU's kernels, run without one; which calls become them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from bridge import lower
from bridge.compile import CallLibrary, CompileOptions, Launch, compile_function
from bridge.compile.cuda.elements import lookup
from bridge.compile.cuda.scatter import scatter, sorts
from bridge.compile.loop_ir.operations import Argument, LookupPlan, ScatterPlan
from bridge.library.indexing import sorted_keys
from tests.cuda_plans import FOR_LITTLE, array
from tests.opencl import OpenClKernels

#: rows, rows of the table, columns, the row that stays zero
SIZES = {
    "one row": (1, 3, 1, None),
    "segments of all lengths": (300, 7, 12, None),
    "mostly alone": (257, 3000, 5, None),
    "longer than a tile": (2500, 40, 8, 3),
    "one segment": (700, 1, 33, None),
    "columns of several blocks": (90, 20, 136, 0),
}


def rows_and_indices(length, table, columns, dtype, index_dtype, wraps):
    """Rows whose sums are exact in any order, also in float16; the lower an index, the more rows have it."""
    generator = torch.Generator().manual_seed(length)
    rows = torch.randint(-1, 2, (length, columns), generator=generator).to(dtype)
    indices = (torch.rand(length, generator=generator) ** 4 * table).to(index_dtype)
    return rows, torch.where(torch.arange(length) % 3 == 0, indices - table, indices) if wraps else indices


def names_of(*dtypes):
    return [str(each).removeprefix("torch.") for each in dtypes]


@pytest.mark.parametrize("columns", [1, 6, 64])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.int64), (torch.bfloat16, torch.int32)], ids=str)
def test_rows(dtypes, columns, monkeypatch):
    """A static and a launch's number of rows, several vectors for each thread and one, indices from either end."""
    dtype, index_dtype = dtypes
    names, table = names_of(*dtypes), torch.randn(30, columns).to(dtype)
    plans = [LookupPlan(*names, length, 30, columns, wraps) for length in (700, Argument(0)) for wraps in (False, True)]
    made = [lookup(plan) for plan in plans]
    monkeypatch.setattr("bridge.compile.cuda.elements._ENOUGH", 0)
    code = OpenClKernels([*made, *map(lookup, plans)])
    for number, plan in enumerate((*plans, *plans)):
        for length in [700] if isinstance(plan.length, int) else (700, 1, 0):
            indices = torch.randint(-30 if plan.wraps else 0, 30, (length,)).to(index_dtype)
            out = torch.full((length, columns), 3, dtype=dtype)
            scalars = () if isinstance(plan.length, int) else (length,)
            code(number, [array(each) for each in (table, indices, out)], scalars)
            assert torch.equal(out, table[indices.long()])


def wanted(rows, indices, table, skipped):
    sums = torch.zeros(table, rows.shape[1], dtype=torch.promote_types(rows.dtype, torch.float32))
    sums.index_add_(0, indices.long() % table, rows.to(sums.dtype))
    if skipped is not None:
        sums[skipped] = 0
    return sums.to(rows.dtype)


@pytest.mark.parametrize(
    ("dtype", "index_dtype", "wraps"),
    [
        (torch.float32, torch.int64, False),
        (torch.bfloat16, torch.int64, True),
        (torch.float16, torch.int32, False),
        (torch.float64, torch.int32, True),
    ],
    ids=str,
)
def test_sums(dtype, index_dtype, wraps):
    names = names_of(dtype, index_dtype)
    plans = [
        ScatterPlan(*names, length, table, columns, skipped, wraps)
        for length, table, columns, skipped in SIZES.values()
    ]
    plans += [replace(plan, is_sorted=True) for plan in ([] if wraps else plans[1:4])]
    plans += [replace(plan, length=Argument(0)) for plan in (plans[1], plans[-1])]
    code = OpenClKernels([scatter(plan, 99) for plan in plans])

    def assert_sums(number, plan, length, scalars=()):
        rows, indices = rows_and_indices(length, plan.table, plan.columns, dtype, index_dtype, wraps)
        table = torch.full((plan.table, plan.columns), 3, dtype=dtype)
        if plan.is_sorted:
            tensors = rows, sorted_keys(indices, plan.table, plan.key_dtype), table
        else:
            tensors = rows, indices, table, torch.empty(length + 1, dtype=getattr(torch, plan.key_dtype))
        code(number, list(map(array, tensors)), scalars)
        assert torch.equal(table, wanted(rows, indices, plan.table, plan.skipped)), plan

    for number, plan in enumerate(plans):
        if isinstance(plan.length, int):
            assert_sums(number, plan, plan.length)
            continue
        for length in (1, 77, 0, 1030):
            assert_sums(number, plan, length, (length,))


def test_the_same_bits_whatever_else_is_in_the_batch():
    """A segment's sum follows from the places of its rows in it, not from where it lies in the order."""
    rows, table = torch.randn(64, 16), 40
    sums = []
    for first in (0, 20):
        indices = torch.arange(64) % 3 + first
        plan = ScatterPlan("float32", "int64", 64, table, 16)
        out, keys = torch.zeros(table, 16), torch.zeros(65, dtype=torch.int32)
        OpenClKernels([scatter(plan, 64)])(0, [array(each) for each in (rows, indices, out, keys)], ())
        sums.append(out[first : first + 3])
    assert torch.equal(*sums)


def test_the_order_is_the_same_whoever_sorts():
    rows, indices, table = torch.randn(900, 24), torch.randint(0, 9, (900,)), torch.zeros(2, 9, 24)
    plan = ScatterPlan("float32", "int64", 900, 9, 24)
    code = OpenClKernels([scatter(plan, 900), scatter(replace(plan, is_sorted=True), 900)])
    code(0, [array(each) for each in (rows, indices, table[0], torch.empty(901, dtype=torch.int32))])
    code(1, [array(each) for each in (rows, sorted_keys(indices, 9, "int32"), table[1])])
    assert torch.equal(*table)


def test_long_lists_are_sorted_before():
    plan = ScatterPlan("float32", "int64", Argument(0), 1000, 16)
    assert sorts(plan, 2**20) and not sorts(plan, 2**14)
    wrapped = replace(plan, wraps=True)
    assert not sorts(wrapped, 2**20) and scatter(wrapped, 2**20) is None and scatter(wrapped, 2**13) is not None


@pytest.mark.parametrize(
    ("length", "table", "key_dtype"), [(2**14, 30_000, "int32"), (2**14, 300_000, "int64"), (Argument(0), 9, "int64")]
)
def test_the_type_of_keys(length, table, key_dtype):
    assert ScatterPlan("float32", "int64", length, table, 4).key_dtype == key_dtype


class Words(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.words, self.places = nn.Embedding(50, 8, **options), nn.Embedding(16, 8)
        self.register_buffer("numbers", torch.arange(16).expand(1, -1))

    def forward(self, words):
        return self.words(words).sin() + self.places(self.numbers[:, : words.shape[1]]).cos()


class Looked(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(20, 8))

    def forward(self, indices):
        return self.table.sin()[indices]


class LookedTwice(Looked):
    def forward(self, indices):
        return self.table.sin()[indices, indices % 8]


def steps_of(module, *sample, forward=False, **options):
    lowered = lower(module, *sample, **options)
    func = lowered.forward if forward else lowered.expected_backward
    return compile_function(func, name="steps", options=CompileOptions.current(FOR_LITTLE)).steps


@pytest.mark.parametrize(
    ("module", "named", "kind"),
    [
        (Words(padding_idx=0), "embedding", Launch),
        (Words(scale_grad_by_freq=True), "embedding", (CallLibrary, Launch)),
        (Looked(), "index", Launch),
        (LookedTwice(), "index", CallLibrary),
    ],
    ids=["embeddings", "scaled by frequency", "rows", "elements"],
)
def test_what_is_a_kernel(module, named, kind):
    steps = [step for step in steps_of(module, torch.randint(0, 16, (2, 5))) if f"{named}_backward" in step.name]
    kinds = {type(step) for step in steps}
    assert kinds == (set(kind) if isinstance(kind, tuple) else {kind})


@pytest.mark.parametrize(
    ("module", "kinds"),
    [(Words(), [CallLibrary, Launch]), (Looked(), [Launch]), (LookedTwice(), [CallLibrary])],
    ids=["embeddings", "rows", "elements"],
)
def test_what_is_looked_up_by_a_kernel(module, kinds):
    """Indices that are dense; a slice of positions is not."""
    steps = steps_of(module, torch.randint(0, 16, (2, 5)), forward=True)
    found = [type(step) for step in steps if step.name in ("embedding", "index") or "library" in step.name]
    assert sorted(found, key=str) == sorted(kinds, key=str)


def test_a_length_that_varies():
    """The launch has the length; a copy of positions, a slice of a buffer, has its own."""
    lengths = {"words": {1: torch.export.Dim("length", max=16)}}
    steps = steps_of(Words(), torch.randint(0, 16, (2, 5)), dynamic_shapes=lengths)
    launches = [step for step in steps if "embedding_backward" in step.name]
    assert len(launches) == 2
    assert all(isinstance(step, Launch) and len(step.scalars) == 1 for step in launches)


def test_many_are_sorted_by_the_library(monkeypatch):
    monkeypatch.setattr("bridge.compile.cuda.scatter._MOST_ROWS", 9)
    steps = steps_of(Words(), torch.randint(0, 16, (2, 5)))
    assert sum(step.name == "sorted_keys" for step in steps) == 1
    assert {type(step) for step in steps if "_backward" in step.name} == {Launch}


class Turned(nn.Module):
    """Its gradient is a transposed view."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 8)

    def forward(self, words):
        return self.words(words).transpose(1, 2)


@pytest.mark.parametrize("most", [9, 2**14])
def test_rows_that_lie_in_another_order_are_copied(most, monkeypatch):
    monkeypatch.setattr("bridge.compile.cuda.scatter._MOST_ROWS", most)
    names = [step.name for step in steps_of(Turned(), torch.randint(0, 16, (2, 5)))]
    assert [("copy" in name, "embedding_backward" in name) for name in names if name != "sorted_keys"] == [
        (True, False),
        (False, True),
    ]


class Folded(nn.Module):
    """Its gradient lies along more axes than a kernel has loops."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 2)

    def forward(self, words):
        return self.words(words).permute(*reversed(range(10)))


@pytest.mark.parametrize("most", [9, 2**14])
def test_rows_that_no_loops_walk_are_copied_by_the_library(most, monkeypatch):
    monkeypatch.setattr("bridge.compile.cuda.scatter._MOST_ROWS", most)
    steps = steps_of(Folded(), torch.randint(0, 16, [2] * 9))
    kinds = [type(step) for step in steps if step.name == "copy" or "embedding_backward" in step.name]
    assert kinds == [CallLibrary, Launch]
