"""Concatenations and paddings as sections of a kernel: values, and which sections each kernel joins."""

from __future__ import annotations

import pytest
import torch
from tvm import relax
from tvm.relax import Tuple
from tvm.relax import op as R

from bridge.compile import CallLibrary, Launch
from tests.bridge.compile_helpers import assert_same, program, run
from tests.sampling import sampled


def concat(emit, parts, axis):
    return emit(R.concat(Tuple(list(parts)), axis=axis))


def part(emit, x, axis, begin, end):
    return emit(R.strided_slice(x, [axis], [begin], [end]))


def params(tensors):
    return [(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in tensors]


def steps(tensors, body):
    return [s for s in program(params(tensors), body).steps if isinstance(s, Launch | CallLibrary)]


@pytest.mark.parametrize(
    "dtype",
    sampled(["float32", "float64", "float16", "bfloat16", "int64", "bool"], ["float32", "bfloat16", "int64", "bool"]),
)
@pytest.mark.parametrize(
    ("axis", "shapes"),
    [
        (1, [(9, 32), (9, 32)]),
        (1, [(9, 48), (9, 16), (9, 32)]),  # six sections of 16
        (2, [(3, 4, 20), (3, 4, 40)]),  # tails of four
        (1, [(8, 2, 11), (8, 4, 11)]),  # an axis in the middle
        (1, [(9, 3), (9, 4)]),  # too short: a library step
        (0, [(2, 40), (3, 40)]),  # few rows
        (1, [(9, 32), (9, 0), (9, 32)]),
    ],
)
def test_values(dtype, axis, shapes):
    torch.manual_seed(0)
    tensors = [(8 * torch.randn(shape)).to(getattr(torch, dtype)) for shape in shapes]
    (y,) = run(tensors, lambda emit, *p: [concat(emit, p, axis)])
    assert torch.equal(y, torch.cat(tensors, axis))


def test_sections_are_computed_where_they_are_read():
    """Rotary embedding: halves swapped and negated, two products, a sum: one kernel, and its backward another."""
    x = torch.randn(2, 8, 4, 32)
    cos, sin = torch.randn(8, 1, 32), torch.randn(8, 1, 32)

    def body(emit, p, c, s):
        turned = emit(R.permute_dims(p, [0, 2, 1, 3]))
        c, s = (emit(R.permute_dims(t, [1, 0, 2])) for t in (c, s))
        halves = part(emit, turned, 3, 0, 16), part(emit, turned, 3, 16, 32)
        rotated = concat(emit, [emit(R.negative(halves[1])), halves[0]], 3)
        return [emit(R.add(emit(R.multiply(turned, c)), emit(R.multiply(rotated, s))))]

    def backward(emit, g, c, s):
        scaled = emit(R.multiply(g, s))
        back = concat(emit, [part(emit, scaled, 3, 16, 32), emit(R.negative(part(emit, scaled, 3, 0, 16)))], 3)
        return [emit(R.add(back, emit(R.multiply(g, c))))]

    assert len(steps([x, cos, sin], body)) == 1
    (y,) = run([x, cos, sin], body)
    turned, c, s = x.transpose(1, 2), cos.transpose(0, 1), sin.transpose(0, 1)
    rotated = torch.cat([-turned[..., 16:], turned[..., :16]], -1)
    assert_same(y, turned * c + rotated * s, rtol=1e-6, atol=1e-6)
    g = torch.randn(2, 4, 8, 32)
    inputs = [g, c.contiguous(), s.contiguous()]
    assert len(steps(inputs, backward)) == 1
    (dx,) = run(inputs, backward)
    gs = g * s
    assert_same(dx, torch.cat([gs[..., 16:], -gs[..., :16]], -1) + g * c, rtol=1e-6, atol=1e-6)


def test_rows_and_columns_of_a_concatenation_are_reduced_in_its_kernel():
    torch.manual_seed(0)
    tensors = [torch.randn(640, 64, dtype=torch.float64) for _ in range(3)]

    def body(emit, *p):
        joined = concat(emit, [p[0], emit(R.add(p[1], relax.const(1.0, "float64"))), p[2]], 1)
        return [joined, emit(R.nn.softmax(joined, -1)), emit(R.sum(joined, [0])), emit(R.max(joined, [1]))]

    assert len(steps(tensors, body)) == 1
    joined = torch.cat([tensors[0], tensors[1] + 1, tensors[2]], 1)
    wanted = [joined, joined.softmax(1), joined.sum(0), joined.amax(1)]
    for our, their in zip(run(tensors, body), wanted, strict=True):
        assert_same(our, their, rtol=1e-12, atol=1e-12)


def test_concatenations_of_concatenations():
    torch.manual_seed(0)
    a, b, c = torch.randn(16, 32), torch.randn(16, 32), torch.randn(16, 64)

    def body(emit, p, q, r):
        inner = concat(emit, [p, emit(R.negative(q))], 1)
        return [emit(R.multiply(concat(emit, [inner, r], 1), concat(emit, [r, inner], 1)))]

    inner = torch.cat([a, -b], 1)
    assert_same(run([a, b, c], body)[0], torch.cat([inner, c], 1) * torch.cat([c, inner], 1))


def test_a_permuted_concatenation_keeps_its_sections():
    a, b = torch.randn(12, 32), torch.randn(12, 32)
    (y,) = run(
        [a, b], lambda emit, p, q: [emit(R.exp(emit(R.reshape(emit(R.permute_dims(concat(emit, [p, q], 1))), (768,)))))]
    )
    assert_same(y, torch.cat([a, b], 1).T.reshape(768).exp(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [0.0, -3.5, float("-inf")])
@pytest.mark.parametrize("widths", [(0, 32), (32, 0), (16, 48)])
def test_paddings(value, widths):
    x = torch.randn(10, 32)
    x[0, 0], x[1, 1] = float("nan"), float("inf")
    (y,) = run([x], lambda emit, p: [emit(R.nn.pad(p, [0, 0, *widths], pad_value=value))])
    assert_same(y, torch.nn.functional.pad(x, widths, value=value), rtol=0, atol=0)


def test_paddings_of_integers_and_of_two_axes():
    x = torch.arange(320).reshape(10, 32)
    (y,) = run([x], lambda emit, p: [emit(R.nn.pad(p, [0, 0, 0, 32], pad_value=7))])
    assert torch.equal(y, torch.nn.functional.pad(x, (0, 32), value=7))
    (z,) = run([x.float()], lambda emit, p: [emit(R.nn.pad(p, [1, 2, 3, 4]))])
    assert torch.equal(z, torch.nn.functional.pad(x.float(), (3, 4, 1, 2)))


def test_a_slice_of_arithmetic_is_computed_where_it_is_read():
    x, b = torch.randn(12, 64), torch.randn(64)

    def body(emit, p, q):
        y = emit(R.add(p, q))
        halves = part(emit, y, 1, 0, 32), part(emit, y, 1, 32, 64)
        return [emit(R.multiply(emit(R.tanh(halves[0])), halves[1]))]

    assert len(steps([x, b], body)) == 1
    left, right = (x + b).chunk(2, 1)
    assert_same(run([x, b], body)[0], left.tanh() * right, rtol=1e-5, atol=1e-6)
