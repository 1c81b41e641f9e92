"""Product policy of the CPU: a product's class → the algorithm that was measured to be fastest on this machine.

A class contains all products whose extents round to the same steps, a quarter of an octave wide; a smaller product
represents large ones, with the longest extent halved. Each class is timed once, some milliseconds, under a lock, and
its choice stays: every program of the process computes equal products with the same bits, as does every later process
that finds the seconds in the disk cache. Between processes without a common cache, the choice may differ if two
algorithms are about as fast, and with it the rounding of sums. With torch's deterministic algorithms, nothing is timed:
products are torch's, as in eager.

Algorithms of a matrix product on the CPU: by name, and as functions over memory of their own for timing. All give the
product up to rounding; they differ in the order of additions. Library algorithms are the kernels of
:mod:`bridge.library.operators`, called as a program calls them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial

import torch
from tvm.target import Target

from autodiff.extents import Dim, maximum, minimum
from bridge.base.torch_internals import VF, bfloat16_in_onednn, linear_pointwise
from bridge.compile.cpu.build import fingerprint
from bridge.compile.cpu.gemm import strip_rows
from bridge.compile.cpu.gemm_tile import RegisterTile, register_tile
from bridge.compile.cpu.threads import in_a_plain_thread
from bridge.compile.loop_ir.operations import Geometry, Packing, ProductPlan
from bridge.compile.loop_ir.views import View
from bridge.compile.runtime.build import settle
from bridge.compile.schedule.products import (
    BY_ROWS,
    GENERATED,
    IN_PANELS,
    LayoutClass,
    ProductPolicy,
    ProductShape,
    is_generated,
    is_in_panels,
)
from bridge.library import OUT_KERNELS
from bridge.trials import KERNELS, TRIALS, Question, seconds_of

__all__ = ["CpuProducts", "Measure", "Multiply", "ProductTrial", "generated_types", "library_ways"]
__all__ += ["measured", "shape_class"]

Multiply = Callable[..., None]
"""``(address of a, of b, of c, of the descriptor)``: a built kernel of :mod:`bridge.compile.cpu.gemm`."""

_SKINNY = 64
"""Rows or columns of a result up to which the transposed product is tried: its result must be copied."""


def library_ways(product: ProductShape) -> list[str]:
    """Names of the library kernels for a product; torch's own first."""
    if product.batch > 1:
        return ["bmm"]
    ways = ["mm"]
    # The others need dense rows of a and dense columns of b, as activations and weights have.
    if (product.a.unit, product.b.unit) != ("row", "column"):
        return ways
    if min(product.m, product.n) <= _SKINNY:
        ways.append("mm_swapped")
    has_type = product.element_type == "float32" or (product.element_type == "bfloat16" and bfloat16_in_onednn())
    if linear_pointwise is not None and has_type:
        ways.append("linear")
    return ways


@dataclass(frozen=True)
class ProductTrial:
    """Memory of one product, ``c = a @ b``, on which every algorithm can run.

    Attributes:
        a, b, c: ``[batch, rows, columns]``; ``c`` is dense, the others have any strides.
        copied: which of ``a`` and ``b`` a library's kernel gets as a dense copy, made at each call.
    """

    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    copied: tuple[bool, bool] = (False, False)

    @classmethod
    def of(cls, product: ProductShape) -> ProductTrial:
        """Memory of a product's shape and layouts, filled with ones: no algorithm's speed depends on the numbers."""
        dtype = getattr(torch, product.element_type)
        a = _operand(product.batch, product.m, product.k, product.a, dtype)
        b = _operand(product.batch, product.k, product.n, product.b, dtype)
        c = VF.zeros(product.batch, product.m, product.n, dtype=dtype)
        return cls(a, b, c, (product.a.copied, product.b.copied))

    @property
    def shape(self) -> ProductShape:
        """The product's shape; an operand that a library takes in its memory layout is not copied."""
        batch, m, n = self.c.shape
        a, b = (LayoutClass(_unit(x), copied) for x, copied in zip((self.a, self.b), self.copied, strict=True))
        return ProductShape(str(self.c.dtype).removeprefix("torch."), batch, m, n, self.a.shape[2], a, b)

    def library(self, way: str) -> Callable[[], None]:
        """A function that computes ``c`` by a library's kernel, with the necessary copies."""
        kernel, tensors = OUT_KERNELS[way], [self.a, self.b, self.c]
        a, b, c = tensors if way == "bmm" else [tensor[0] for tensor in tensors]
        if not any(self.copied):
            return partial(kernel, [c], [a, b])
        sources = [a, b]
        dense = [VF.empty(x.shape, dtype=x.dtype) if y else x for x, y in zip(sources, self.copied, strict=True)]

        def with_copies() -> None:
            for target, source in zip(dense, sources, strict=True):
                if target is not source:
                    target.copy_(source)
            kernel([c], dense)

        return with_copies

    def plan(self, way: str, block: tuple[int, int], packing: Packing | None = None) -> ProductPlan:
        """The plan of the generated kernel, for tasks of ``block`` rows and columns."""
        geometry = Geometry.of(*(View(tuple(x.shape), x.stride()) for x in (self.a, self.b, self.c)))
        assert geometry is not None
        return ProductPlan(way, self.shape.element_type, geometry, block, packing)

    def generated(self, multiply: Multiply, plan: ProductPlan) -> Callable[[], None]:
        """A function that computes ``c`` by the built kernel."""
        return self._launch(multiply, plan, self.a, self.b, self.c)

    def packed(self, pack: Multiply, multiply: Multiply, plan: ProductPlan) -> Callable[[], None]:
        """:meth:`generated` with panels that are packed now."""
        assert plan.packing is not None
        panels = VF.zeros(plan.packing.elements, dtype=self.b.dtype)
        self._launch(pack, plan, self.b, panels)()
        return self._launch(multiply, plan, self.a, panels, self.c)

    def _launch(self, kernel: Multiply, plan: ProductPlan, *tensors: torch.Tensor) -> Callable[[], None]:
        descriptor = VF.tensor(plan.descriptor(), dtype=torch.int64)
        addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (*tensors, descriptor)]

        def run(_alive: object = (self, tensors, descriptor)) -> None:
            kernel(*addresses)

        return run


def _unit(matrices: torch.Tensor) -> str:
    return "row" if matrices.stride(2) == 1 else "column" if matrices.stride(1) == 1 else "none"


def _operand(batch: int, rows: int, columns: int, layout: LayoutClass, dtype: torch.dtype) -> torch.Tensor:
    """``[batch, rows, columns]`` of ones in the class's layout; a ``copied`` operand is laid out as attention heads."""
    if layout.unit == "none":
        return VF.ones(batch, rows, 2 * columns, dtype=dtype)[:, :, ::2]
    if layout.unit == "column":
        return _operand(batch, columns, rows, LayoutClass("row", layout.copied), dtype).mT
    if layout.copied:
        return VF.ones(rows, batch, columns, dtype=dtype).transpose(0, 1)
    return VF.ones(batch, rows, columns, dtype=dtype)


_SMALL = 2**15
"""Multiplications below which a product is torch's: little to gain, and our first product costs a compilation."""

_WASTE = 2
"""Maximum ratio of computed elements, padded to whole register tiles, to the result's; above, torch's is better."""

_REPRESENTED = 2**26
"""Multiplications per thread of the largest timed product, which represents larger ones."""

_WORTH = 0.95
"""The fastest algorithm replaces a preferred one if it takes at most this part of its time."""

_GENERATED_TYPES = ("float32", "float64")
"""Element types of generated products."""

_TALL, _SHORT = 1344, 112
"""Maximum rows of one task. Each task packs its part of ``b``, which favours tall tasks; short ones are more even."""

_STEPS_AT_A_TIME = 4e-4
"""Seconds of a measurement of a loop's products at a time: a product finds its predecessor's data in the caches."""

_USUAL = (GENERATED, f"{GENERATED} short")
"""Generated algorithms that are timed at a product's first use."""

Measure = Callable[[ProductShape, Sequence[str]], Mapping[str, float]]
"""``(product, algorithms)`` → seconds of each algorithm that can compute it."""


@dataclass(frozen=True)
class CpuProducts(ProductPolicy):
    """Matrix products on this processor.

    Attributes:
        target: of generated code.
        multiply: builds the kernel of an element type, for timing.
        packed: builds the kernels that pack a matrix, and multiply by it.
        threads: that products will run on.
        deterministic: nothing is timed, products are torch's.
        measure: replaces timing, for tests.
    """

    target: Target
    multiply: Callable[[str], Multiply]
    packed: Callable[[str], tuple[Multiply, Multiply]]
    threads: int
    deterministic: bool = False
    measure: Measure | None = None
    _asked: dict[ProductShape, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    packs = True

    def choose(self, product: ProductShape) -> str:
        """The fastest algorithm of the product's class, timed at the class's first use."""
        usual = "mm" if product.batch == 1 else "bmm"
        if self.deterministic or not getattr(torch, product.element_type).is_floating_point:
            return usual
        is_small = product.multiplications < _SMALL
        # A small product in a loop takes less time than Python between two of torch's.
        if is_small and product.b.lasting and IN_PANELS in self.ways(product):
            return IN_PANELS
        if is_small:
            return usual
        product = shape_class(product, self.threads)
        way = self._asked[product] = self._quickest(product)
        return way

    def _quickest(self, product: ProductShape) -> str:
        question = self._question(product)
        # Steps of generated code alone need no Python between them. A timing finds the weight in the cache, a call in
        # memory, where a packed weight is read once, and any other is copied first.
        laid_out = (IN_PANELS, BY_ROWS)
        first = {way: place for place, way in enumerate((question.ways[0], BY_ROWS))}
        preferred = sorted(
            question.ways, key=lambda way: (way not in laid_out, first.get(way, len(first)), not is_generated(way))
        )
        measure = partial(self.measure or partial(measured, self), product, question.ways)
        return TRIALS.choose(question, measure, _WORTH, preferred, kept=self.measure is None)

    def _question(self, product: ProductShape) -> Question:
        machine = (str(self.target), self.threads, *fingerprint()) + (() if self.measure is None else (self.measure,))
        return Question("product", str(product), astuple(product), tuple(self.ways(product)), machine)

    def made(self) -> tuple[tuple, ...]:
        return tuple(self._asked.items())

    def adopt(self, choices: Sequence[Sequence]) -> bool:
        self._asked.update(choices)
        return TRIALS.adopt({self._question(product): way for product, way in choices})

    def ways(self, product: ProductShape) -> list[str]:
        """The algorithms of a product, torch's own first, generated code last."""
        ways = library_ways(product)
        tile = register_tile(self.target)
        if product.element_type not in _GENERATED_TYPES or tile is None:
            return ways
        width, low = tile.columns(product.element_type), tile.heights[0]
        panels = _quotient_up(product.n, width)
        if panels * width * _quotient_up(product.m, low) * low > _WASTE * product.m * product.n:
            return ways
        if product.b.lasting and product.batch == 1:
            has_rows = 1 < self.threads and low * self.threads <= product.m
            return [*ways, IN_PANELS, *[BY_ROWS] * has_rows]
        if product.b.lasting:
            return ways
        if product.b.constant:
            return [*ways, IN_PANELS]
        tasks = _tasks(tile)

        def cuts_otherwise(way: str) -> bool:
            tallest, widest = tasks[way]
            return way == GENERATED or product.m > tallest or (widest < tile.panels and panels > widest)

        return [*ways, *filter(cuts_otherwise, tasks)]

    def runs(self, product: ProductShape, trial: ProductTrial, ways: Sequence[str]) -> dict[str, Callable[[], None]]:
        """A function for each algorithm that computes a product in a trial's memory."""
        found = {way: trial.library(way) for way in ways if not is_generated(way)}
        for way in filter(is_generated, ways):
            plan = trial.plan(way, self.block(way, product), self.packing(way, product))
            if is_in_panels(way):
                found[way] = trial.packed(*self.packed(product.element_type), plan)
            else:
                found[way] = trial.generated(self.multiply(product.element_type), plan)
        return found

    def packing(self, way: str, product: ProductShape) -> Packing | None:
        tile = register_tile(self.target)
        if not is_in_panels(way) or tile is None:
            return None
        columns = tile.columns(product.element_type)
        rows = product.m if way == IN_PANELS else _quotient_up(product.m, self.threads)
        return Packing(strip_rows(tile, rows), _quotient_up(product.n, columns) * columns * product.k)

    def block(self, way: str, product: ProductShape) -> tuple[Dim, Dim]:
        """Rows and columns of one task: tall blocks, because each packs its part of ``b``; enough for every thread.

        Symbolic extents give symbolic results.
        """
        tile = register_tile(self.target)
        assert tile is not None, f"{way} is no way on {self.target}"
        panel, m, n = tile.columns(product.element_type), product.m, product.n
        if way == IN_PANELS:
            height = strip_rows(tile, m)
            parts = maximum(1, _quotient_up(m, tile.strips * height))
            rows = maximum(1, _quotient_up(m, parts * height)) * height
            return rows, _quotient_up(_quotient_up(n, panel), self.threads) * panel
        if way == BY_ROWS:
            each = _quotient_up(m, self.threads)
            parts = _quotient_up(each, tile.strips * strip_rows(tile, each))
            return _quotient_up(each, parts), _quotient_up(n, panel) * panel
        tallest, widest = _tasks(tile)[way]
        parts = maximum(1, _quotient_up(m, tallest))
        rows = maximum(1, _quotient_up(m, parts * tile.rows)) * tile.rows
        # Each row of blocks needs more blocks than this; 0: any number of panels.
        wanted = (2 * self.threads - 1) // maximum(1, product.batch * _quotient_up(m, rows))
        panels = minimum(minimum(widest, _quotient_up(n, panel)), (n - 1) // maximum(1, panel * wanted))
        return rows, maximum(1, panels) * panel


def measured(policy: CpuProducts, product: ProductShape, ways: Sequence[str]) -> dict[str, float]:
    """Seconds of each algorithm on this machine."""
    pace = replace(KERNELS, at_a_time=_STEPS_AT_A_TIME) if product.b.lasting else KERNELS
    settle()  # a concurrent build would take a processor from the timing
    return in_a_plain_thread(lambda: seconds_of(policy.runs(product, ProductTrial.of(product), ways), pace))


@functools.cache
def _tasks(tile: RegisterTile) -> Mapping[str, tuple[int, int]]:
    """Maximum rows and panels of one task, by algorithm."""
    heights = (rows // tile.rows * tile.rows for rows in (_TALL, _SHORT))
    return {way: (rows, tile.panels) for way, rows in zip(_USUAL, heights, strict=True)}


def shape_class(product: ProductShape, threads: int) -> ProductShape:
    """The product that represents a class: extents in steps of a quarter octave, large ones halved."""
    batch, extents = _step(product.batch), [_step(extent) for extent in (product.m, product.n, product.k)]
    while batch > 4 * threads:
        batch = _step(batch // 2)
    while batch * extents[0] * extents[1] * extents[2] > _REPRESENTED * threads:
        longest = extents.index(max(extents))
        extents[longest] = _step(extents[longest] // 2)
    m, n, k = extents
    return replace(product, batch=batch, m=m, n=n, k=k)


def _quotient_up(a: Dim, b: Dim) -> Dim:
    return (a + b - 1) // b


def _step(extent: int) -> int:
    """The next of 1, 2, …, 8, 10, 12, 14, 16, 20, 24, 28, 32, …"""
    unit = 1 << max(extent.bit_length() - 3, 0)
    return -(-extent // unit) * unit


def generated_types(target: Target, tensors: Iterable[torch.Tensor]) -> list[str]:
    """Element types of products of matrices among these tensors that generated code may compute."""
    if register_tile(target) is None:
        return []
    large = {tensor.dtype for tensor in tensors if tensor.ndim > 1 and tensor.numel() >= _SMALL}
    return [name for name in _GENERATED_TYPES if getattr(torch, name) in large]
