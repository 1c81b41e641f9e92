"""Work per binding does not grow with the function: a LayerNorm-LSTM of 6 to 24 steps, BERT of 1 to 7 layers."""

from __future__ import annotations

import cProfile
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tvm import relax
from tvm.relax import op

from autodiff import Body, clean, differentiate, join_products, mask_dropout, spell_out, unique_names
from autodiff.body import BodyScope
from autodiff.ir import Function
from partition import partition
from tests.autodiff.bert import arguments, relax_layer
from tests.autodiff.evaluate import function

WIDTH = 4


def lstm(steps: int) -> Function:
    """Gates with two normalizations, a normalized cell, the states stacked."""

    def build(scope, x, from_input, from_state, gamma, beta, start):
        emit = scope.emit

        def normalized(value, weight):
            product = emit(op.matmul(value, emit(op.permute_dims(weight))))
            return emit(op.nn.layer_norm(product, gamma, beta, [-1], 1e-5))

        state = cell = start
        states = []
        for step in range(steps):
            now = emit(op.reshape(emit(op.strided_slice(x, [1], [step], [step + 1])), (2, WIDTH)))
            gates = emit(op.add(normalized(now, from_input), normalized(state, from_state)))
            parts = emit(op.split(gates, 4, 1))
            enter, forget, new, leave = (emit(relax.TupleGetItem(parts, index)) for index in range(4))
            kept = emit(op.multiply(emit(op.sigmoid(forget)), cell))
            cell = emit(op.add(kept, emit(op.multiply(emit(op.sigmoid(enter)), emit(op.tanh(new))))))
            state = emit(op.multiply(emit(op.sigmoid(leave)), emit(op.tanh(cell))))
            states.append(state)
        return op.concat([emit(op.expand_dims(state, 1)) for state in states], 1)

    wide = torch.ones(4 * WIDTH)
    return function(
        build, torch.ones(2, steps, WIDTH), *[torch.ones(4 * WIDTH, WIDTH)] * 2, wide, wide, torch.ones(2, WIDTH)
    )


def bert(layers: int) -> Function:
    return relax_layer(arguments(torch.float32), layers)


def work(func: Function, required: range) -> dict[str, tuple[int, int, int]]:
    """Pass → bindings to which rules are applied, edits of bindings, Python calls."""
    found = {}
    body = Body.of(func)
    spell_out(mask_dropout(body))

    def measure(name: str, body: Body, apply: Callable[[], Any]) -> Any:
        before = body.edits
        gc.disable()  # callbacks of a collection would be counted
        profile = cProfile.Profile()
        try:
            result = profile.runcall(apply)
        finally:
            gc.enable()
        counts = {entry.code: entry.callcount for entry in profile.getstats()}
        tried = counts.get(BodyScope.apply.__code__, 0)
        found[name] = tried, body.edits - before, sum(counts.values())
        return result

    measure("clean", body, lambda: unique_names(clean(body, merge_casts=False)))
    primals = len(body.params)
    measure("differentiate", body, lambda: differentiate(body, [0], required))
    measure("clean the joint", body, lambda: clean(body))
    parts = measure("partition", body, lambda: partition(body, num_primals=primals, num_outputs=1))
    backward = Body.of(parts.backward)
    measure("join products", backward, lambda: join_products(backward))
    return found


@pytest.mark.parametrize(
    ("build", "sizes", "required"),
    [(lstm, (6, 12, 24), range(5)), (bert, (1, 3, 7), range(2, 18))],
    ids=["steps", "layers"],
)
def test_another_step_costs_the_same_however_many_there_are(build, sizes, required):
    work(build(2), required)  # work done once per process
    small, middle, large = sizes
    done = [work(build(size), required) for size in sizes]
    for name in done[0]:
        for what, *counts in zip(("rules tried", "edits", "calls"), *(each[name] for each in done), strict=True):
            first = (counts[1] - counts[0]) / (middle - small)
            then = (counts[2] - counts[1]) / (large - middle)
            assert then <= 1.02 * first + 0.1, f"{name}: {first:.1f} {what} a step at first, then {then:.1f}"
    assert done[0]["clean the joint"][0] > 0
