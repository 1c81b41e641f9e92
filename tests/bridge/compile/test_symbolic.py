"""One program for all sizes: bound to a size, it computes what the program compiled for that size does."""

from __future__ import annotations

import pytest
import torch
from tvm import relax
from tvm.relax import op as R

from autodiff.extents import ExtentScope
from autodiff.instantiate import instantiate
from bridge.compile import Program, compile_function
from tests.bridge.compile_helpers import function

SAMPLE = 48
SIZES = [2, 3, 17, SAMPLE, 700]


class Symbolic:
    """A function of rows ``n`` (sample 48), its program, and both for given sizes."""

    def __init__(self, params, body, dtype="float32", samples=(("n", SAMPLE),)):
        self.scope = ExtentScope()
        self.symbols = {name: self.scope.symbol(name, sample) for name, sample in samples}
        extents = [[self.symbols.get(extent, extent) for extent in shape] for shape in params]
        self.function = function([(shape, dtype) for shape in extents], lambda emit, *p: body(emit, *p, **self.symbols))
        self.program = compile_function(self.function, name="symbolic")
        self.shapes = params
        self.dtype = getattr(torch, dtype)

    def inputs(self, sizes) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        shapes = [[sizes.get(extent, extent) for extent in shape] for shape in self.shapes]
        return [torch.randn(shape, generator=generator, dtype=self.dtype) for shape in shapes]

    def static(self, sizes) -> Program:
        return compile_function(instantiate(self.function, sizes), name="static")

    def both(self, **sizes) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The results of the bound program, and of the one compiled for the sizes."""
        inputs = self.inputs(sizes)
        return self.program.bind(sizes)(list(inputs)), self.static(sizes)(list(inputs))

    def assert_same_bits(self, **sizes) -> None:
        ours, theirs = self.both(**sizes)
        for index, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            assert our.shape == their.shape and our.dtype == their.dtype
            assert torch.equal(our, their), (index, sizes)

    @property
    def guards(self) -> list[str]:
        return list(map(str, self.scope.guards))


def normalized(emit, x, weight, bias, dtype="float32"):
    centred = emit(R.subtract(x, emit(R.mean(x, -1, keepdims=True))))
    variance = emit(R.mean(emit(R.multiply(centred, centred)), -1, keepdims=True))
    scaled = emit(R.multiply(centred, emit(R.rsqrt(emit(R.add(variance, relax.const(1e-5, dtype)))))))
    return emit(R.add(emit(R.multiply(scaled, weight)), bias))


def pointwise(emit, x, bias, n):
    return [emit(R.nn.gelu(emit(R.add(x, bias)))), emit(R.negative(x))]


def flat(emit, x, y, n):
    return [emit(R.exp(emit(R.multiply(x, y))))]


def rows(emit, x, weight, bias, n):
    y = normalized(emit, emit(R.nn.gelu(emit(R.add(x, bias)))), weight, bias)
    return [y, emit(R.nn.softmax(y, -1)), emit(R.max(x, -1))]


def columns(emit, x, weight, n):
    y = emit(R.multiply(x, weight))
    return [emit(R.sum(y, 0)), emit(R.max(y, 0)), emit(R.sum(emit(R.exp(y)), 0, keepdims=True)), y]


def heads(emit, x, bias, n):
    y = emit(R.reshape(emit(R.add(x, bias)), (n, 5, 4, 8)))
    turned = emit(R.permute_dims(y, [0, 2, 1, 3]))
    return [turned, emit(R.reshape(turned, (n * 20, 8))), emit(R.sum(turned, [0, 2]))]


def slices(emit, x, n):
    first, second = (emit(R.strided_slice(x, [1], [begin], [begin + 32])) for begin in (0, 32))
    turned = emit(R.concat([emit(R.negative(second)), first], 1))
    shifted = emit(R.strided_slice(x, [0], [1], [n]))
    return [emit(R.add(emit(R.exp(first)), second)), turned, emit(R.exp(shifted)), emit(R.sum(turned, 1))]


def joined(emit, x, y, n):
    return [emit(R.concat([x, emit(R.exp(y))], 0)), emit(R.stack([x, y], 0))]


def broadcasts(emit, x, y, n):
    wide = emit(R.broadcast_to(emit(R.reshape(y, (n, 1, 16))), (n, 3, 16)))
    return [emit(R.add(x, wide)), wide, emit(R.zeros((n, 3), "float32")), emit(R.sum(emit(R.multiply(x, wide)), 1))]


CASES = {
    "pointwise": ([("n", 64), (64,)], pointwise),
    "flat": ([("n", 33), ("n", 33)], flat),
    "rows": ([("n", 5, 64), (64,), (64,)], rows),
    "columns": ([("n", 80), (80,)], columns),
    "heads": ([("n", 5, 32), (32,)], heads),
    "slices": ([("n", 64)], slices),
    "joined": ([("n", 40), ("n", 40)], joined),
    "broadcasts": ([("n", 3, 16), ("n", 16)], broadcasts),
}


@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_the_program_of_that_size(name):
    made = Symbolic(*CASES[name])
    for size in SIZES:
        made.assert_same_bits(n=size)
    assert all(guard.startswith("2147483647 >= ") for guard in made.guards), made.guards
    assert len(made.guards) <= 1
