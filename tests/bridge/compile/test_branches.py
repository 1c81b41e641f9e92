"""Branches of a recording: whatever runs first of what may run side by side, results are the chain's to the bit."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from tvm.relax import op as R

from bridge.compile.graphs import branches as scheduling
from bridge.compile.graphs.branches import Place, apart, branches, conflicts
from bridge.compile.runtime.bind import bind
from bridge.compile.runtime.instructions import View
from tests.bridge.compile_helpers import program

WIDTH = 24
SHAPES = [((6, WIDTH), "float32"), ((WIDTH, WIDTH), "float32"), ((WIDTH, WIDTH), "float32"), ((6, WIDTH), "float32")]


def two_layers(emit, x, w, v, g):
    """Forward of two products with a norm between them, and its backward: weights' gradients are on no one's way."""
    h = emit(R.matmul(x, w))
    y = emit(R.nn.softmax(h, -1))
    z = emit(R.matmul(y, v))
    gv = emit(R.matmul(emit(R.permute_dims(y)), g))
    gy = emit(R.matmul(g, emit(R.permute_dims(v))))
    product = emit(R.multiply(gy, y))
    gh = emit(R.subtract(product, emit(R.multiply(y, emit(R.sum(product, [-1], keepdims=True))))))
    gw = emit(R.matmul(emit(R.permute_dims(x)), gh))
    gx = emit(R.matmul(gh, emit(R.permute_dims(w))))
    return [z, gv, gw, emit(R.add(gx, emit(R.exp(x)))), emit(R.sum(gh, [0]))]


@pytest.fixture(scope="module")
def compiled():
    return program(SHAPES, two_layers)


def run_in_order(made, order, inputs):
    """The results of the steps in some order, in memory in which nothing is left of a run before."""
    layout = apart(made.layout)
    registers = [None] * layout.size
    layout.fill(registers, torch.full((layout.arena_bytes,), 0x7F, dtype=torch.uint8))
    for slot, tensor in made.constants:
        registers[slot] = tensor
    for view in layout.views:
        bind(view, {}, {})(registers)
    registers[: len(inputs)] = inputs
    for each in layout.fresh:
        registers[each.slot] = torch.full(each.shape, float("nan"), dtype=each.torch_dtype)
    functions = {name: built.function for name, built in made.code.items()}
    actions = [bind(step, functions, {}) for step in made.steps]
    with torch.no_grad():
        for index in order:
            actions[index](registers)
    return [registers[slot] for slot in layout.results]


def orders(made, places, seeds):
    """Orders in which streams may run what they were given: each its own in turn, behind what it waits for."""
    for seed in seeds:
        choose, done, queues = random.Random(seed), set(), {}
        for index, place in enumerate(places):
            queues.setdefault(-1 if isinstance(made.steps[index], View) else place.branch, []).append(index)
        order = queues.pop(-1, [])  # made when the recording is
        while any(queues.values()):
            heads = {branch: queue[0] for branch, queue in queues.items() if queue}
            ready = [branch for branch, index in heads.items() if done.issuperset(places[index].waits)]
            branch = choose.choice(ready)
            done.add(heads[branch])
            order.append(queues[branch].pop(0))
        yield order


def inputs_of(made):
    torch.manual_seed(0)
    return [torch.randn(each.shape, dtype=each.torch_dtype) for each in made.layout.params]


def test_any_order_of_branches_has_the_chains_bits(compiled):
    places, given = branches(compiled, 3), inputs_of(compiled)
    assert {place.branch for place in places} > {0}
    wanted = compiled(list(given))
    tried = set()
    for order in orders(compiled, places, range(30)):
        tried.add(tuple(order))
        for ours, theirs in zip(run_in_order(compiled, order, given), wanted, strict=True):
            assert torch.equal(ours, theirs)
    assert len(tried) > 3


def test_without_what_they_wait_for_some_order_is_wrong(compiled):
    places, given = branches(compiled, 3), inputs_of(compiled)
    wanted = compiled(list(given))
    loose = tuple(replace(place, waits=()) for place in places)
    made = [run_in_order(compiled, order, given) for order in orders(compiled, loose, range(30))]
    assert not all(torch.equal(a, b) for results in made for a, b in zip(results, wanted, strict=True))


def test_steps_that_fill_the_device_stay_a_chain(compiled, monkeypatch):
    monkeypatch.setattr(scheduling, "_BYTES", 1.0)
    assert branches(compiled, 3) is None


def test_all_branches_come_together_at_a_join(compiled):
    steps = [index for index, step in enumerate(compiled.steps) if not isinstance(step, View)]
    places = branches(compiled, 3, joins={steps[2]})
    assert places is None or all(not place.waits or min(place.waits) > steps[2] for place in places[steps[2] + 1 :])
    everywhere = branches(compiled, 3, joins=set(steps))
    assert everywhere is None or everywhere == (Place(0, ()),) * len(compiled.steps)


def test_too_large_intermediates_stay_where_they_are(compiled):
    layout = apart(compiled.layout)
    spans = sorted((each.offset, each.offset + each.nbytes) for each in layout.arena)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert apart(compiled.layout, layout.arena_bytes) == layout and apart(compiled.layout, 64) is None


def test_who_writes_an_input_comes_after_all_that_read_one(compiled):
    """Inputs may be views of each other."""
    launches = [index for index, step in enumerate(compiled.steps) if not isinstance(step, View)]
    changed = list(compiled.steps)
    changed[launches[-1]] = replace(changed[launches[-1]], writes=(0,))
    before = conflicts(replace(compiled, steps=tuple(changed)))
    readers = [index for index in launches[:-1] if any(slot < len(SHAPES) for slot in compiled.steps[index].reads)]
    assert readers and before[launches[-1]].issuperset(readers)
