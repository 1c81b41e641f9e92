"""Recomputed dropout masks: bits, fusion, layouts, dynamic sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tvm import tirx
from tvm.relax import op

from bridge.compile import DrawnMask, compile_function, host_backend
from bridge.compile.codegen import philox
from bridge.compile.codegen.emit import Emitter
from bridge.compile.codegen.tir import loop_function, sequence
from tests import philox as reference
from tests.bridge.compile_helpers import function
from tests.sampling import sampled, spread


@pytest.mark.parametrize("counter, key, numbers", reference.KNOWN)
def test_known_answers(counter, key, numbers):
    assert tuple(int(each) for each in reference.philox4x32_10(counter, key)) == numbers
    words = tirx.decl_buffer((6,), "uint32", "words")
    made = tirx.decl_buffer((4,), "uint32", "made")
    e = Emitter(1)
    loaded = [e.bind(tirx.BufferLoad(words, [tirx.const(place, "int64")])) for place in range(6)]
    for place, number in enumerate(philox.philox4x32_10(e, tuple(loaded[4:]), tuple(loaded[:4]))):
        e.stmts.append(tirx.BufferStore(made, number, [tirx.const(place, "int64")]))
    (built,) = host_backend().build([("philox", loop_function([words, made], sequence(e.stmts)))])
    given, got = torch.tensor([*counter, *key], dtype=torch.uint32), torch.zeros(4, dtype=torch.uint32)
    built.function(given, got)
    assert tuple(got.tolist()) == numbers


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.15, 0.9, 1e-9, 1 - 1e-9, 2**-25])
def test_the_threshold_is_where_eagers_comparison_changes(rate):
    least = philox.threshold(rate)
    around = np.clip(np.arange(least - 600, least + 600), 0, 2**32 - 1)
    uniform = around.astype(np.uint32).astype(np.float32) * np.float32(2**-32) + np.float32(2**-33)
    assert np.array_equal(uniform < np.float32(1 - rate), around < least)
    assert philox.threshold(0.1) == 0xE6666580
    if np.float32(rate) == 1:  # attention multiplies by infinity then: its kernel's
        return
    least = philox.threshold(rate, philox.IN_A_ROW)
    around = np.clip(np.arange(least - 600, least + 600), 0, 2**32 - 1)
    uniform = around.astype(np.uint32).astype(np.float32) * np.float32(2**-32) + np.float32(2**-33)
    assert np.array_equal(uniform > np.float32(rate), around >= least)


FUNCTIONS = {
    "of elements": lambda e, x, m: op.where(m, x, e(op.negative(x))),
    "behind a softmax": lambda e, x, m: op.multiply(e(op.nn.softmax(x)), e(op.astype(m, "float32"))),
    "before a softmax": lambda e, x, m: op.nn.softmax(e(op.multiply(x, e(op.astype(m, "float32"))))),
    "before a sum over rows": lambda e, x, m: op.sum(e(op.multiply(x, e(op.astype(m, "float32")))), axis=[0, 1]),
    "transposed": lambda e, x, m: op.permute_dims(e(op.multiply(x, e(op.astype(m, "float32")))), [2, 0, 1]),
    "a slice": lambda e, x, m: op.strided_slice(e(op.multiply(x, e(op.astype(m, "float32")))), [2], [1], [3]),
    "joined": lambda e, x, m: op.concat([e(op.multiply(x, e(op.astype(m, "float32")))), x], axis=2),
    "itself": lambda e, x, m: op.logical_not(m),
    "gathered": lambda e, x, m: op.cumsum(e(op.astype(m, "float32")), axis=1),
}
SHAPES = [*reference.SHAPES, ((1, 1, 4), 4)]


def compiled(name, shape, drawn=None):
    made = function([(shape, "float32"), (shape, "bool")], lambda e, *args: [e(FUNCTIONS[name](e, *args))])
    return compile_function(made, name="dropped", drawn=drawn)


@pytest.mark.parametrize("name", sampled(FUNCTIONS, spread(FUNCTIONS)))
def test_a_recomputed_mask_is_the_stored_one(name):
    """In every kernel that reads it, to the bit; over several turns of eager's threads, and far into the generator."""
    for place in (first := list(FUNCTIONS).index(name), first + 1, first + 3):
        shape, width = SHAPES[place % len(SHAPES)]
        count, threads = int(np.prod(shape)), (256, 512)[place % 2]
        seed, offset = ((-1, 2**40 + 8), (12345678901234, 2**34 - 4), (7, 0))[place % 3]
        x, stored = torch.randn(shape), compiled(name, shape)
        mask = torch.from_numpy(reference.mask(count, 0.1, width, threads, seed, offset)).view(shape)
        (wanted,) = stored([x, mask])
        program = compiled(name, shape, {1: DrawnMask(0.1, width, threads)})
        (got,) = program([x, torch.tensor([seed % 2**64, offset], dtype=torch.uint64)])
        assert torch.equal(got, wanted), (shape, width)
        if name not in ("itself", "gathered"):
            assert len(program.steps) == len(stored.steps), "no kernel but those that read the mask"


def test_equal_functions_with_other_masks_are_other_programs():
    shape = (4, 4, 8)
    drawn = [{1: DrawnMask(rate, width, 256)} for rate, width in ((0.1, 4), (0.1, 8), (0.2, 4))]
    programs = [compiled("of elements", shape, each) for each in (None, *drawn)]
    assert len({id(program) for program in programs}) == 4
    assert compiled("of elements", shape, dict(drawn[0])) is programs[1]


def test_a_mask_is_computed_where_it_is_read_first():
    """Products with the masks of a chain live no longer with recomputed masks than with stored ones."""

    def chain(e, x, w, *pairs):
        for given, mask in zip(pairs[::2], pairs[1::2], strict=True):
            dropped = e(op.multiply(given, e(op.astype(mask, "float32"))))
            x = e(op.matmul(e(op.matmul(x, w)), dropped))
        return [x]

    square, count = (64, 64), 6
    made = function([(square, "float32")] * 2 + [(square, "float32"), (square, "bool")] * count, chain)
    drawn = {3 + 2 * place: DrawnMask(0.1, 4, 256) for place in range(count)}
    stored, computed = (compile_function(made, name="chain", drawn=each) for each in (None, drawn))
    assert computed.arena_bytes == stored.arena_bytes
