"""Product policy: what a backend decides about matrix products; layout choice asks it, the backend implements it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from autodiff.extents import Dim
from bridge.compile.loop_ir.operations import Packing

__all__ = ["BY_ROWS", "CHAINED", "GENERATED", "IN_PANELS", "PACKED", "LayoutClass", "ProductPolicy", "ProductShape"]
__all__ += ["is_generated", "is_in_panels"]

GENERATED = "generated"
"""First word of the ways that are generated code; every other way is a kernel of :data:`bridge.library.OUT_KERNELS`."""

PACKED = "packed"
"""The way of a library's product whose second factor is a constant, laid out once for its kernels."""

IN_PANELS = f"{GENERATED} in panels"
"""Generated code that finds ``b`` packed: of products whose ``b`` is the same in every step of a loop, or a constant.
The bits are those of the other generated ways."""

BY_ROWS = f"{IN_PANELS} by rows"
"""The same, each thread with rows of its own, as many as it has of the kernels around the product: in a loop it reads
what it wrote itself. All threads read all panels."""

CHAINED = f"{GENERATED} in a chain"
"""Generated code for both products of a chain (:mod:`bridge.compile.schedule.chain_plan`); the bits are those of the
other generated ways. A policy does not choose it: the chain's steps are measured together."""


def is_in_panels(way: str) -> bool:
    """Whether a way is generated code that finds ``b`` packed."""
    return way.startswith(IN_PANELS)


def is_generated(way: str) -> bool:
    """Whether a way is generated code."""
    return way.startswith(GENERATED)


@dataclass(frozen=True)
class LayoutClass:
    """How an operand lies in memory.

    Attributes:
        unit: the dimension whose neighbours are neighbours in memory: ``"row"`` (along a row), ``"column"``, or
            ``"none"``.
        copied: whether a library's kernel needs a dense copy of it first.
        constant: whether it is a dense matrix, or the transpose of one, that is the same at each call.
        lasting: whether it is the same in every step of a loop, so that it can be packed before.
    """

    unit: str = "row"
    copied: bool = False
    constant: bool = False
    lasting: bool = False

    def __str__(self) -> str:
        words = [*["copied"] * self.copied, *["constant"] * self.constant, *["lasting"] * self.lasting, self.unit]
        return " ".join(words)


@dataclass(frozen=True)
class ProductShape:
    """``batch`` products of ``[m, k]`` and ``[k, n]`` matrices of one element type. Numbers where a way is chosen."""

    element_type: str
    batch: Dim
    m: Dim
    n: Dim
    k: Dim
    a: LayoutClass = LayoutClass()
    b: LayoutClass = LayoutClass()

    @property
    def multiplications(self) -> Dim:
        return self.batch * self.m * self.n * self.k

    def __str__(self) -> str:
        batch = f"{self.batch} x " if self.batch > 1 else ""
        return f"{self.element_type} {batch}{self.m} x {self.k} x {self.n} ({self.a}, {self.b})"


class ProductPolicy(Protocol):
    """A backend's choices for matrix products.

    The way of a product decides its bits. So it depends on the product's shape and on nothing else, for as long as the
    process lives: a value that a backward computes again has the forward's bits.

    Attributes:
        keeps_order: whether a library's copies of batches keep neighbours in memory neighbours, and its results are
            stored in the order that readers want; otherwise they are in the logical order.
        joins: whether small products of gradients had better be joined: see :mod:`bridge.compile.passes.join_products`.
        widened: element types of which a library's product can have a float32 result.
        packs: whether it makes a difference that an operand is the same in every step of a loop.
        chains: whether generated products may be joined with the rows between them.
        turns: whether a product of every step is as good of a transposed weight as of a copy that is made of it first.
    """

    keeps_order: bool
    joins: bool
    widened: frozenset[str]
    packs: bool
    turns: bool
    chains: bool

    def choose(self, product: ProductShape) -> str:
        """The way to compute a product: the name of a library kernel, or :data:`GENERATED` and a blocking."""

    def made(self) -> tuple[tuple, ...]:
        """The choices that this object was asked for and that another process may make otherwise, as plain data."""

    def met(self) -> tuple[tuple[ProductShape, str], ...]:
        """The classes of products that this object was asked for, with their ways; those that :meth:`made` leaves out,
        because every process makes them so, included."""

    def adopt(self, choices: Sequence[Sequence]) -> bool:
        """Makes choices of another process, from :meth:`made`, this one's; whether none of them contradicts its own."""

    def block(self, way: str, product: ProductShape) -> tuple[Dim, Dim]:
        """Rows and columns of the result that one task of a generated way computes; changes no bit.

        Of extents, whose arithmetic must not guard.
        """

    def parts(self, product: ProductShape, is_step: bool = False, is_carried: bool = False) -> int:
        """Of the inner axis, that a product had better be the sum of.

        Args:
            is_step: in a step of a loop; ``is_carried``: the next step adds them up.
        """

    def unit(self, product: ProductShape) -> int:
        """Numbers of which a product's extents along memory had better be multiples; 1: any will do. Of a sample."""

    def seconds_of_chain(self, make: Callable[[], Mapping[str, Callable[[], object]]]) -> Mapping[str, float]:
        """Seconds of functions that compute the same chain, which ``make`` makes."""

    def packing(self, way: str, product: ProductShape) -> Packing | None:
        """How a way's ``b`` is packed before; ``None`` where it is not."""
