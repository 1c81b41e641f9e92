"""Limits: the numbers by which the compiler weighs speed; each backend has its own. None changes a bit of any value."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

from tvm.tirx import PrimFunc

from bridge.compile.loop_ir.operations import LookupPlan, PoolPlan, ScatterPlan
from bridge.compile.schedule.order import ReductionOrder

__all__ = ["Limits", "Rules"]


@dataclass(frozen=True)
class KernelLimits:
    """What one kernel is made of.

    Attributes:
        nodes: of a kernel at most: bounds compile time and register pressure.
        buffers: that a kernel reads and writes at most; a kernel may read half as many beside what it makes.
        terms: of a sum in one kernel; a longer one is kernels of so many terms, whatever its length, and the rest.
        sections: of the concatenations of one kernel: its code is repeated for each.
        summed_sections: the same of a kernel that adds up columns.
        loops: of a kernel at most.
        shared_elements: of a tensor that is worth a merge for reading it once instead of twice.
        together: point-wise groups at most that are one launch; 1: each is launched by itself.
        streams: that a recorded run is launched on: 1, or 2, for what is not on the critical path.
    """

    nodes: int
    buffers: int
    terms: int
    sections: int
    summed_sections: int
    loops: int
    shared_elements: int
    together: int
    streams: int


@dataclass(frozen=True)
class RowLimits:
    """How a kernel walks the elements of its space.

    Attributes:
        flat_row: elements of one row of a space that nothing divides into rows.
        short_row: elements; a shorter row is dominated by its address arithmetic.
        tasks: of a kernel at most.
        column_vectors: that one pass over the rows of a column reduction takes along.
        access_bytes: that a thread of a kernel which combines nothing reads of a tensor at once: of half types up to
            twice the order's lanes; 0: always the order's.
        single_elements: of a kernel that combines nothing, up to which each element is a thread's own: vectors would
            leave threads idle, each of which takes as long as all. 0: none.
        added_rows: of a large column reduction at most that are additions; 0: none.
    """

    flat_row: int
    short_row: int
    tasks: int
    column_vectors: int
    access_bytes: int
    single_elements: int
    added_rows: int


@dataclass(frozen=True)
class ThreadLimits:
    """What is worth a launch of threads.

    Attributes:
        serial_elements: below so many, a kernel is not worth running in parallel.
        parallel_work: scalar operations of a kernel that are worth a launch of threads.
        parallel_steps: that are in a step of a loop, whose threads have just run.
        parallel_columns: elements of a column reduction that are.
        parallel_second_stage: elements of partial sums that are.
        parallel_legalized: iterations of TVM's own kernels that are.
        transcendental_work: scalar operations that a transcendental function counts for.
    """

    serial_elements: int
    parallel_work: int
    parallel_steps: int
    parallel_columns: int
    parallel_second_stage: int
    parallel_legalized: int
    transcendental_work: int


@dataclass(frozen=True)
class RecomputeLimits:
    """What is computed again, or read again, instead of being kept.

    Attributes:
        cheap_operations: a value of so few is recomputed in a later pass over the row instead of cached.
        cheap_in_known_rows: the same for rows whose length is known where code is generated.
        cheap_shared: the same for what is made of nothing but tensors that all rows share, if it is more.
        free_reads: operands smaller than the result by this factor cost nothing to read again.
        small_casts: a tensor smaller by this factor than what is computed with it is cast, or counted, where it is
            read; 0: none.
        read_again: cheap operators at most by which a large value is computed in each kernel that reads it, instead of
            being stored by one; 0: none.
    """

    cheap_operations: int
    cheap_in_known_rows: int
    cheap_shared: int
    free_reads: int
    small_casts: int
    read_again: int


@dataclass(frozen=True)
class ConcatLimits:
    """How concatenations are computed.

    Attributes:
        joined_sections: of a concatenation in generated code; one of more is the library's.
        joined_rows: of such a concatenation at least: the library copies fewer by columns.
        section_operators: under an operand of a concatenation that are computed again inside its section.
        section_elements: a concatenation of so few is computed from what its operands' arithmetic reads, all of it.
        placed_sections: of a concatenation at most that is written by the kernel which computes its operands; 0: none.
        parts_apart: concatenations at most whose parts a loop reads where they lie; 0: none.
    """

    joined_sections: int
    joined_rows: int
    section_operators: int
    section_elements: int
    placed_sections: int
    parts_apart: int


@dataclass(frozen=True)
class Limits:
    """A backend's limits, by concern; a name stands in one of the groups only."""

    kernel: KernelLimits
    rows: RowLimits
    threads: ThreadLimits
    recompute: RecomputeLimits
    concats: ConcatLimits

    @classmethod
    def of(cls, **numbers: int) -> Limits:
        """The limits of these numbers, by their names."""
        if unknown := numbers.keys() - set(cls.names()):
            raise TypeError(f"there is no limit {', '.join(sorted(unknown))}")
        return cls(
            *(kind(**{name: numbers[name] for name in names if name in numbers}) for kind, names in _NAMES.items())
        )

    @staticmethod
    def names() -> tuple[str, ...]:
        """Of all numbers."""
        return tuple(name for names in _NAMES.values() for name in names)

    @property
    def numbers(self) -> dict[str, int]:
        """All numbers, by their names."""
        return {name: number for each in fields(self) for name, number in vars(getattr(self, each.name)).items()}

    def having(self, **numbers: int) -> Limits:
        """The same with other numbers."""
        return self.of(**{**self.numbers, **numbers})


_NAMES = {
    kind: tuple(each.name for each in fields(kind))
    for kind in (KernelLimits, RowLimits, ThreadLimits, RecomputeLimits, ConcatLimits)
}


class Rules(Protocol):
    """What passes and schedule ask of a backend."""

    @property
    def order(self) -> ReductionOrder:
        """In what order elements are combined."""

    @property
    def limits(self) -> Limits:
        """What is worth while."""

    @property
    def adds_float64(self) -> bool:
        """Whether kernels that add up large tensors in float64 take no longer than in float32."""

    def legalized(self, function: PrimFunc) -> PrimFunc:
        """A function that TVM legalized, scheduled for the target; no schedule changes a bit."""

    def pool_gradient(self, plan: PoolPlan) -> PrimFunc | None:
        """The kernel of a pool's gradient; ``None``: the library's call is to be kept."""

    def lookup(self, plan: LookupPlan) -> PrimFunc | None:
        """The kernel of rows at indices; likewise."""

    def scatter_sum(self, plan: ScatterPlan, length: int) -> PrimFunc | None:
        """The kernel of rows, about ``length`` of them, added up where indices say; likewise. Unless keys come sorted,
        it has memory for these as its last result."""

    def sorts_before(self, plan: ScatterPlan, length: int) -> bool:
        """Whether the keys of such a kernel, of about ``length`` rows, had better come sorted."""
