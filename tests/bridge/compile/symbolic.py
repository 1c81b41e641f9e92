"""Functions with symbolic extents and their programs, beside the programs that are compiled for given sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from autodiff.extents import ExtentScope
from bridge.compile import CompileOptions, Program, backend_for, compile_function
from tests.autodiff.instantiate import instantiate
from tests.bridge.compile_helpers import function

SAMPLE = 48


class Symbolic:
    """A function, its program, and both for given sizes.

    Args:
        params: shapes; a name stands for a symbol.
        body: ``(emit, *params, **symbols) -> results``.
        samples: of the symbols.
        deterministic: ways of products are not measured.
    """

    def __init__(
        self,
        params: Sequence[Sequence[int | str]],
        body: Callable,
        dtype: str = "float32",
        samples: Sequence[tuple[str, int]] = (("n", SAMPLE),),
        deterministic: bool = True,
    ) -> None:
        self.scope = ExtentScope()
        self.symbols = {name: self.scope.symbol(name, sample) for name, sample in samples}
        extents = [[self.symbols.get(extent, extent) for extent in shape] for shape in params]
        self.function = function([(shape, dtype) for shape in extents], lambda emit, *p: body(emit, *p, **self.symbols))
        self.options = replace(CompileOptions.current(backend_for(None)), deterministic=deterministic)
        self.program = compile_function(self.function, name="symbolic", options=self.options)
        self.shapes = params
        self.dtype = getattr(torch, dtype)

    def inputs(self, sizes: Mapping[str, int]) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        shapes = [[sizes.get(extent, extent) for extent in shape] for shape in self.shapes]
        return [torch.randn(shape, generator=generator, dtype=self.dtype) for shape in shapes]

    def static(self, sizes: Mapping[str, int]) -> Program:
        return compile_function(instantiate(self.function, sizes), name="static", options=self.options)

    def both(self, **sizes: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The results of the bound program, and of the one compiled for the sizes."""
        inputs = self.inputs(sizes)
        return self.program.bind(sizes)(list(inputs)), self.static(sizes)(list(inputs))

    def assert_same_bits(self, **sizes: int) -> None:
        ours, theirs = self.both(**sizes)
        for index, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            assert our.shape == their.shape and our.dtype == their.dtype
            assert torch.equal(our, their), (index, sizes)

    @property
    def guards(self) -> list[str]:
        return list(map(str, self.scope.guards))
