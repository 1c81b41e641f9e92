"""Dynamic entries, by ``dynamic_shapes`` or by misses: eager's results, gradients and draws at every size."""

import gc
import html
import logging
import os
import re
import tracemalloc
import weakref
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

from bridge import add_tvm_dispatch, examine, explain, stats
from bridge.capture import DynamicDim
from bridge.compile.runtime import program as program_module
from bridge.dispatch import entry as bound_module
from bridge.dispatch.automatic_dynamic import MAX_REFUSED, FixedDims
from tests.bridge.compare import Call, assert_same, run
from tests.bridge.dispatch.dynamic_sizes import automatic, dispatched, normal
from tests.sampling import sampled

pytestmark = [
    pytest.mark.usefixtures("lowered_once"),
    pytest.mark.skipif(torch.__version__ < "2.13", reason="products and poolings of older versions fix the sizes"),
]

SIZES = [(2, 2), (3, 5), (7, 4), (13, 2), (2, 31), (5, 17), (11, 3), (4, 4), (6, 9), (3, 64)]
FEW = [*SIZES[:4], SIZES[0]]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Dropout(0.2), nn.Linear(9, 3))


def rows(batch: int, length: int = 0) -> Call:
    return Call((normal(batch, 6, grad=True),))


class Attention(nn.Module):
    """Two sizes, a mask, dropout, a residual; a loss beside the result."""

    def __init__(self):
        super().__init__()
        self.inner, self.out, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x, mask):
        batch, length, width = x.shape
        q, k, v = self.inner(x).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) / 2
        weights = F.dropout(scores.masked_fill(mask[:, None, None, :] == 0, -1e9).softmax(-1), 0.1)
        y = self.norm(self.out((weights @ v).transpose(1, 2).reshape(batch, length, width)) + x)
        return y.square().mean(), y


def masked(batch: int, length: int) -> Call:
    mask = (torch.arange(batch * length).reshape(batch, length) % 5 > 0).long()
    return Call((normal(batch, length, 8, grad=True),), {"mask": mask})


BATCH, LENGTH = Dim("batch", max=64), Dim("length", max=64)
MODELS = {
    "mlp": (mlp, rows, ({0: BATCH},)),
    "attention": (Attention, masked, {"x": {0: BATCH, 1: LENGTH}, "mask": {0: BATCH, 1: LENGTH}}),
}


@pytest.mark.composes(
    "`dynamic_shapes=`", "one entry for all sizes of the dimensions that vary", section='`on_miss="compile"`'
)
@pytest.mark.parametrize("name", sampled(MODELS, ["mlp"]))
def test_ten_sizes_are_one_entry(name):
    make, call, shapes = MODELS[name]
    eager, module = dispatched(make, call(5, 6), shapes)
    for step, size in enumerate(SIZES):
        assert_same(run(module, call(*size), seed=step), run(eager, call(*size), seed=step))
    counted = stats(module)
    assert counted.hits == len(SIZES) and not counted.misses and len(counted.entries) == 1


@pytest.mark.parametrize("name", sampled(MODELS, ["mlp"]))
def test_the_second_size_makes_a_dimension_symbolic(name, caplog):
    make, call, _ = MODELS[name]
    eager, module = automatic(make)
    with caplog.at_level(logging.INFO, "bridge.dispatch"):
        for step, size in enumerate(FEW):
            assert_same(run(module, call(*size), seed=step), run(eager, call(*size), seed=step))
    counted = stats(module)
    assert counted.hits == len(FEW) and not counted.misses
    (varying,) = counted.entries
    assert varying.hits == len(FEW) - 1 and varying.bound is not None
    told = [record.getMessage() for record in caplog.records if "for sizes that vary" in record.getMessage()]
    assert len(told) == 1 and "dimension 0 of args[0], 2 <= " in told[0]


def test_an_entry_that_served_its_sizes_once_leaves_for_one_of_all_sizes():
    """Also its memory. ``explain`` and ``stats`` tell."""
    eager, module = automatic(mlp)
    assert_same(run(module, rows(5), seed=1), run(eager, rows(5), seed=1))
    gone = [weakref.ref(each) for each in (stats(module).entries[0], stats(module).entries[0].programs)]
    for step, batch in enumerate((7, 5, 9, 5)):
        assert_same(run(module, rows(batch), seed=step), run(eager, rows(batch), seed=step))
    gc.collect()
    assert [each() for each in gone] == [None, None]
    (entry,) = stats(module).entries
    assert entry.hits == 4 and stats(module).hits == 5 and len(entry.bound) == 3
    told = "4 hits, 3 sizes, in place of an entry for fixed sizes with 1 hits"
    assert told in repr(stats(module)) and told in str(explain(module))


def test_an_entry_whose_sizes_came_back_stays_for_them():
    """A smaller last batch costs the others nothing."""
    eager, module = automatic(mlp)
    for step, batch in enumerate((5, 5, 3, 5, 5, 3)):
        assert_same(run(module, rows(batch), seed=step), run(eager, rows(batch), seed=step))
    assert [(each.bound is None, each.hits) for each in stats(module).entries] == [(True, 4), (False, 2)]


def test_an_entry_of_another_mode_stays():
    """The one of all sizes serves evaluation, the other training."""
    eager, module = automatic(mlp)
    for is_training, batch in ((True, 5), (False, 7), (True, 5), (False, 9), (True, 4), (False, 5), (True, 8)):
        module.train(is_training), eager.train(is_training)
        assert_same(run(module, rows(batch), seed=batch), run(eager, rows(batch), seed=batch))
    assert stats(module).hits == 7 and not stats(module).misses
    assert [(each.bound is None, each.hits) for each in stats(module).entries] == [(True, 2), (False, 3), (False, 2)]


def test_sizes_share_what_is_bound_of_steps_without_sizes():
    _, module = dispatched(Attention, masked(5, 6), MODELS["attention"][2])
    (entry,) = stats(module).entries
    for program in (entry.forward, entry.backward):
        one, other = ({"batch": batch, "length": 9} for batch in (3, 8))
        alike = [a is b for a, b in zip(program.at(one).steps, program.at(other).steps, strict=True)]
        bound = zip(program.bind(one).actions, program.bind(other).actions, strict=True)
        assert [a is b for (a, _), (b, _) in bound] == alike and len(set(alike)) == 2


def test_explain_and_stats_print_sizes():
    _, module = dispatched(Attention, masked(5, 6), MODELS["attention"][2])
    masked(3, 9)(module)
    assert "float64[batch, length, 8], int64[batch, length]" in repr(stats(module)) and "1 hits" in repr(stats(module))
    report = explain(module)
    for text in (str(report), str(report.full), html.unescape(report._repr_html_())):
        assert "batch: dimension 0 of args[0], 2 <= batch <= 64, 5 in the sample" in text
        assert "bound for batch = 3, length = 9" in text
        assert re.search(r"tensors, [\d.]+ KiB = [\d*]+batch\*length.* bytes", text), text


def test_what_the_range_excludes_runs_eager_and_is_named():
    eager, module = dispatched(mlp, rows(5), ({0: BATCH},))
    for batch in (1, 65, 0):
        assert_same(run(module, rows(batch)), run(eager, rows(batch)))
    words = "shape of args[0]: dimension 0 (batch) is {}, compiled for 2 <= batch <= 64"
    assert list(stats(module).misses) == [words.format(batch) for batch in (1, 65, 0)]


def test_one_gets_an_entry_of_its_own():
    eager, module = automatic(mlp)
    for batch in (5, 7, 1, 9, 1):
        assert_same(run(module, rows(batch)), run(eager, rows(batch)))
    assert [entry.hits for entry in stats(module).entries] == [2, 2]


class Weighted(nn.Module):
    """The sizes and arguments of the attention, in fewer operators."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(8, 1)

    def forward(self, x, mask):
        y = self.score(x).masked_fill(mask[:, :, None] == 0, -1e9).softmax(1) * x
        return y.square().mean(), y


def test_a_third_dimension_joins_those_that_vary():
    eager, module = automatic(Weighted)
    for size in [(3, 5), (4, 5), (2, 5), (2, 6), (7, 8), (3, 5)]:
        assert_same(run(module, masked(*size)), run(eager, masked(*size)))
    assert [entry.hits for entry in stats(module).entries] == [3, 2]
    assert [len(entry.options.dims) for entry in stats(module).entries] == [2, 4]


class Branches(nn.Module):
    """Python asks for the size."""

    def forward(self, x):
        return x * 2 if x.shape[0] > 10 else x + x.shape[0]


def test_each_branch_of_sizes_is_an_entry():
    eager, module = automatic(Branches)
    for batch in (5, 7, 12, 3, 40):
        assert_same(run(module, rows(batch)), run(eager, rows(batch)))
    entries = stats(module).entries
    assert [entry.hits for entry in entries] == [2, 2] and not stats(module).misses
    assert "10 >= x_0" in str(entries[0].bound) and "x_0 >= 11" in str(entries[1].bound)


def test_who_asked_for_a_size_is_named():
    _, module = dispatched(Branches, rows(5), ({0: BATCH},))
    module(*rows(12).args)
    line = r"test_dynamic_entries\.py:\d+: return x \* 2 if x\.shape\[0\] > 10 else x \+ x\.shape\[0\]\)"
    (reason,) = stats(module).misses
    assert re.search(rf"compiled for 10 >= batch, called with batch = 12 \(asked by \S*{line}$", reason), reason
    assert re.search(rf"10 >= batch \(asked by \S*{line}", str(explain(module).full))


def test_a_loop_over_a_size_stays_static():
    class Loop(nn.Module):
        def forward(self, x):
            for row in range(x.shape[0]):
                x = x + row
            return x

    eager, module = automatic(Loop)
    for batch in (3, 4, 3, 4):
        assert_same(run(module, rows(batch)), run(eager, rows(batch)))
    assert [entry.hits for entry in stats(module).entries] == [2, 2]
    assert all(entry.bound is None for entry in stats(module).entries)


def test_what_was_refused_is_not_tried_again():
    a, b, c = (DynamicDim(0, i, f"args[0].shape[{i}]", "Dim.AUTO", f"x_{i}", 2, None, required=False) for i in range(3))
    fixed = FixedDims()
    fixed.note(True, (a, b))
    assert fixed.left(True, (a, b)) == () and fixed.left(True, (a,)) == (a,) and fixed.left(False, (a, b)) == (a, b)
    fixed.note(True, (b,))
    assert fixed.left(True, (a, b)) == (a,) and fixed.left(True, (a, b, c)) == (a, c)
    with torch.no_grad():
        assert fixed.left(True, (b,)) == (b,)
    for dims in ((a, c), (c,), (a,)):
        assert fixed.left(True, (c,)) == (() if dims == (a,) else (c,))
        fixed.note(True, dims)
    for dimension in range(3, 3 + MAX_REFUSED):
        fixed.note(True, (DynamicDim(0, dimension, "", "", "", 2, None, required=False),))
    assert fixed.left(True, (DynamicDim(1, 0, "", "", "", 2, None, required=False),)) == ()


class LengthFixed(nn.Module):
    """A bound that is a size, which cannot vary; another size that can."""

    def forward(self, x):
        return x.sin().clamp(max=x.shape[1] / 20)


def test_one_size_varies_beside_one_that_cannot():
    eager, module = automatic(LengthFixed)
    for batch, length in [(3, 5), (3, 6), (4, 6), (9, 6), (2, 7), (8, 7)]:
        call = Call((normal(batch, length, grad=True),))
        assert_same(run(module, call), run(eager, call))
    assert stats(module).hits == 6
    assert [(entry.hits, entry.bound is not None) for entry in stats(module).entries] == [
        (1, False),
        (2, True),
        (2, True),
    ]


def test_without_gradients():
    with torch.no_grad():
        eager, module = dispatched(Attention, masked(5, 6), MODELS["attention"][2])
        for size in FEW:
            call = masked(*size)
            torch.manual_seed(1)
            found = call(module)
            torch.manual_seed(1)
            for ours, theirs in zip(found, call(eager), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
        with torch.inference_mode():
            module(*rows_of(4, 3))
    assert stats(module).hits == len(FEW) + 1


def rows_of(*size: int) -> tuple:
    call = masked(*size)
    return call.args[0].detach().requires_grad_(), call.kwargs["mask"]


def test_many_sizes_leave_memory_flat(monkeypatch):
    monkeypatch.setattr(bound_module, "MAX_BOUND", 32)
    monkeypatch.setattr(program_module, "_MOST_BOUND", 32)
    _, module = dispatched(mlp, rows(5), ({0: Dim("batch")},))
    (entry,) = stats(module).entries

    def traced(batches: range) -> int:
        for batch in batches:
            module(*rows(batch).args).sum().backward()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    traced(range(2, 50))
    held = [traced(range(first, first + 40)) for first in (50, 90, 130)]
    tracemalloc.stop()
    assert 16 < len(entry.bound) <= 32 and stats(module).hits == 168
    assert min(later - earlier for earlier, later in pairwise(held)) < 50_000  # caches of other code grow as well


@pytest.mark.cpu("CUDA is not initialized again in a forked process")
def test_a_forked_child_goes_on():
    eager, module = dispatched(lambda: nn.Sequential(nn.Linear(6, 9), nn.GELU()), rows(5), ({0: BATCH},))
    module(*rows(9).args)
    child = os.fork()
    if child == 0:
        same = [torch.allclose(module(*rows(batch).args), eager(*rows(batch).args)) for batch in (9, 11)]
        os._exit(0 if all(same) and stats(module).hits == 3 else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_backward_from_other_outputs_is_compiled_for_its_sizes():
    eager, module = dispatched(Attention, masked(5, 6), MODELS["attention"][2])
    for size in [(5, 6), (2, 3), (7, 9)]:
        found = []
        for each in (module, eager):
            call = masked(*size)
            torch.manual_seed(1)
            _, y = call(each)
            each.zero_grad()
            y.sin().sum().backward()
            found.append([call.args[0].grad, *(parameter.grad.clone() for parameter in each.parameters())])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert stats(module).hits == 3


def test_added_again_with_the_same_sizes_it_stays():
    _, module = dispatched(mlp, rows(5), ({0: BATCH},))
    (entry,) = stats(module).entries
    for spec in (({0: BATCH},), None):
        add_tvm_dispatch(module, rows(7).args, dynamic_shapes=spec)
        assert stats(module).entries == [entry]
    add_tvm_dispatch(module, rows(7).args, dynamic_shapes=({0: Dim("batch", max=128)},))
    assert stats(module).entries != [entry] and len(stats(module).entries) == 1


def test_examine_takes_sizes_that_vary():
    class Loop(nn.Module):
        def forward(self, x):
            return x + sum(range(x.shape[0]))

    assert examine(mlp(), torch.ones(5, 6), dynamic_shapes=({0: BATCH},)).percentage == 100
    assert not examine(Loop(), torch.ones(5, 6)).unsupported
    (problem,) = examine(Loop(), torch.ones(5, 6), dynamic_shapes=({0: BATCH},)).unsupported
    assert "batch" in str(problem)
