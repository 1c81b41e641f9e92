"""torch.compile with sizes that vary: one entry for all sizes of a graph that Dynamo made symbolic."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from bridge.dynamo.backend import graphs
from bridge.dynamo.graph import sizes_of
from tests.bridge.dynamo_helpers import CLOSE, made_since, outcome, total, x


@pytest.fixture(autouse=True)
def reset():
    torch.compiler.reset()


def run(function, *calls, dynamic=None, **options):
    """Compiled and plain function agree at every call; the graphs."""
    known = graphs()
    compiled = torch.compile(function, backend="tvm_dispatch", dynamic=dynamic, **options)
    for seed, args in enumerate(calls):
        for actual, expected in zip(*(outcome(f, args, seed) for f in (compiled, function)), strict=True):
            torch.testing.assert_close(actual, expected, **CLOSE)
    return made_since(known)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3)).double()


@pytest.mark.parametrize(("dynamic", "entries"), [(None, 2), (True, 1)])
def test_ten_sizes(dynamic, entries):
    found = run(mlp(), *[(x(rows, 4),) for rows in (5, 7, 2, 9, 31, 64, 3, 7, 8, 11)], dynamic=dynamic)
    assert total(found) == (10, Counter())
    assert sum(len(graph.stats.entries) for graph in found) == entries


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(13, 6), nn.Linear(6, 13)

    def forward(self, tokens, mask, labels, temperature):
        h = F.dropout(self.embedding(tokens), 0.2, self.training).masked_fill(mask[..., None], 0.0).cumsum(1)
        return F.cross_entropy(self.out(h).flatten(0, 1) * temperature, labels.flatten())


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.sweep)])
def test_a_training_loop_of_many_lengths(dynamic):
    """Dynamo compiles once or twice, each of its graphs has one entry, losses and generator are eager's."""
    torch.manual_seed(0)
    eager, known = Tagger().double(), graphs()
    module = copy.deepcopy(eager)
    counters.clear()
    runs = [(eager, eager), (module, torch.compile(module, backend="tvm_dispatch", dynamic=dynamic))]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each, _ in runs]
    for step, length in enumerate((7, 5, 9, 3, 20, 7)):
        tokens = torch.arange(3 * length).view(3, length) % 13
        seen = []
        for (_, function), optimizer in zip(runs, optimizers, strict=True):
            torch.manual_seed(step)
            loss = function(tokens, tokens > 11, tokens * 5 % 13, 1 + step / 8)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append((loss.detach(), torch.get_rng_state()))
        torch.testing.assert_close(seen[0], seen[1], **CLOSE)
    assert counters["stats"]["unique_graphs"] == (1 if dynamic else 2)
    found = made_since(known)
    assert total(found) == (6, Counter()) and all(len(graph.stats.entries) == 1 for graph in found)


def test_a_size_as_a_number_and_two_tensors_of_one_size():
    def function(a, b):
        return (a * a.shape[0] + b).reshape(-1).sin() * b.shape[1]

    found = run(function, *[(x(rows, 4), x(rows, 4, grad=False)) for rows in (3, 5, 7, 2)], dynamic=True)
    assert total(found) == (4, Counter()) and sum(len(graph.stats.entries) for graph in found) == 1


def test_one_is_a_graph_of_its_own():
    found = run(lambda a: a.exp() * 2, *[(x(rows, 4),) for rows in (3, 5, 1, 7, 1)])
    assert total(found) == (5, Counter())


def test_modes_are_entries_of_their_own():
    known, module = graphs(), mlp().eval()
    compiled = torch.compile(module, backend="tvm_dispatch", dynamic=True)
    for rows in (3, 5, 7):
        data = x(rows, 4)
        torch.testing.assert_close(compiled(data), module(data), **CLOSE)
        with torch.no_grad():
            torch.testing.assert_close(compiled(data), module(data), **CLOSE)
    assert total(made_since(known)) == (6, Counter())


def test_other_strides_are_not_taken_for_the_same():
    def function(a):
        return a * 2

    calls = [(x(rows, 4, grad=False),) for rows in (3, 5)] + [(x(4, rows, grad=False).t(),) for rows in (6, 7)]
    found = run(function, *calls, dynamic=True)
    assert total(found) == (4, Counter())


def test_what_is_written_in_place_has_one_entry_too():
    def function(a):
        a.add_(1)
        return a * 2

    found = run(function, *[(x(rows, 4, grad=False),) for rows in (3, 5, 7)], dynamic=True)
    assert total(found) == (3, Counter()) and sum(len(graph.stats.entries) for graph in found) == 1


def test_sizes_are_found_in_a_graph():
    seen = []

    def backend(graph_module, inputs):
        seen.append(sizes_of(graph_module.graph))
        return graph_module

    torch.compile(lambda a, b: F.pad(a, (0, 1)) * a.shape[0] + b.sum(), backend=backend, dynamic=True)(
        torch.ones(3, 4), torch.ones(5)
    )
    (sizes,) = seen
    assert [(dimension, name.isidentifier()) for _, dimension, name in sizes.dims] == [(0, True), (1, True), (0, True)]
    places = {place for place in sizes.numbers.values()}
    assert places <= {(position, dimension) for position, dimension, _ in sizes.dims} and len(places) >= 2


def test_a_number_that_changes_is_an_input_beside_sizes():
    known = graphs()
    compiled = torch.compile(lambda a, scale: (a * scale).sin(), backend="tvm_dispatch", dynamic=True)
    for step, rows in enumerate((3, 5, 7, 9, 5)):
        data, scale = x(rows, 4), 0.5 + step
        torch.testing.assert_close(compiled(data, scale), (data * scale).sin(), **CLOSE)
    found = made_since(known)
    assert total(found) == (5, Counter()) and all(len(graph.stats.entries) == 1 for graph in found)
