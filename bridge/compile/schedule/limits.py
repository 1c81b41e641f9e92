"""Limits: a backend's thresholds of profitability. None changes a bit of any value.

A default is every backend's number, or turns the limit off (0 or 1) for a backend that does not set it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from tvm.tirx import PrimFunc

from bridge.compile.loop_ir.operations import LookupPlan, PoolPlan, ScatterPlan
from bridge.compile.schedule.order import ReductionOrder

__all__ = ["Limits", "Rules"]


@dataclass(frozen=True, kw_only=True)
class KernelLimits:
    """Bounds on the contents of one kernel.

    Attributes:
        nodes: maximum per kernel: bounds compile time and register pressure.
        buffers: maximum that a kernel reads and writes; it may read half as many besides its results.
        terms: of a sum in one kernel; a longer sum takes several kernels of at most as many terms.
        sections: of the concatenations of one kernel: its code is repeated for each.
        summed_sections: the same for a kernel that reduces columns.
        loops: maximum per kernel.
        shared_elements: of a tensor from which on reading it once instead of twice is worth a merge.
        together: maximum number of horizontally fused groups; 1: no horizontal fusion.
    """

    nodes: int = 80
    buffers: int = 48
    terms: int = 16
    sections: int = 16
    summed_sections: int
    loops: int = 8
    shared_elements: int = 4096
    together: int = 1


@dataclass(frozen=True, kw_only=True)
class RowLimits:
    """How a kernel iterates over its space.

    Attributes:
        flat_row: elements of one row of a space without rows of its own.
        short_row: elements; address arithmetic dominates a shorter row.
        tasks: maximum per kernel.
        column_vectors: vectors of columns in one pass over the rows of a column reduction.
        access_bytes: that a thread of a kernel without reductions reads of a tensor at once: up to twice the order's
            lanes for half types; 0: always the order's lanes.
        single_elements: of a kernel without reductions, up to which each thread has one; 0: always vectors.
    """

    flat_row: int = 4096
    short_row: int = 256
    tasks: int
    column_vectors: int
    access_bytes: int = 0
    single_elements: int = 0


@dataclass(frozen=True, kw_only=True)
class ThreadLimits:
    """Amounts of work from which on threads pay.

    Attributes:
        serial_elements: a smaller kernel runs serially.
        parallel_work: scalar operations of a kernel.
        parallel_steps: scalar operations of a kernel in a loop's step, whose threads have just run.
        parallel_columns: elements of a column reduction.
        parallel_second_stage: elements of partial sums.
        transcendental_work: scalar operations that a transcendental function counts for.
    """

    serial_elements: int = 32_768
    parallel_work: int = 1
    parallel_steps: int = 1
    parallel_columns: int = 1
    parallel_second_stage: int = 1
    transcendental_work: int = 12


@dataclass(frozen=True, kw_only=True)
class RecomputeLimits:
    """Thresholds of rematerialization: values computed again instead of being kept.

    Attributes:
        cheap_operations: a value of at most so many is recomputed in a later pass over the row instead of cached.
        cheap_in_known_rows: the same for rows of static length.
        cheap_shared: the same, if it is more, for values made only of tensors that all rows share.
        free_reads: operands smaller than the result by this factor are free to read again.
        small_casts: consumers larger than a tensor by this factor cast it, or count a range, themselves; 0: none.
    """

    cheap_operations: int = 4
    cheap_in_known_rows: int
    cheap_shared: int = 0
    free_reads: int = 4
    small_casts: int = 0


@dataclass(frozen=True, kw_only=True)
class ConcatLimits:
    """Thresholds for concatenations.

    Attributes:
        joined_sections: maximum of a concatenation in generated code; the library computes larger ones.
        joined_rows: minimum of a concatenation in generated code: the library copies fewer rows by columns.
        section_operators: depth of an operand's arithmetic that is recomputed inside its section.
        section_elements: maximum of a concatenation whose point-wise producers are all recomputed.
    """

    joined_sections: int = 8
    joined_rows: int = 8
    section_operators: int = 4
    section_elements: int = 0


@dataclass(frozen=True)
class Limits:
    """A backend's limits, by concern; a name occurs in only one of the groups."""

    kernel: KernelLimits
    rows: RowLimits
    threads: ThreadLimits
    recompute: RecomputeLimits
    concats: ConcatLimits

    @classmethod
    def of(cls, **numbers: int) -> Limits:
        """Limits from numbers by name."""
        if unknown := numbers.keys() - set(cls.names()):
            raise TypeError(f"there is no limit {', '.join(sorted(unknown))}")
        return cls(
            *(kind(**{name: numbers[name] for name in names if name in numbers}) for kind, names in _NAMES.items())
        )

    @staticmethod
    def names() -> tuple[str, ...]:
        """The names of all numbers."""
        return tuple(name for names in _NAMES.values() for name in names)

    @property
    def numbers(self) -> dict[str, int]:
        """All numbers by name."""
        return {name: number for each in fields(self) for name, number in vars(getattr(self, each.name)).items()}

    def having(self, **numbers: int) -> Limits:
        """These limits with other values of ``numbers``."""
        return self.of(**{**self.numbers, **numbers})


_NAMES = {
    kind: tuple(each.name for each in fields(kind))
    for kind in (KernelLimits, RowLimits, ThreadLimits, RecomputeLimits, ConcatLimits)
}


@dataclass(frozen=True)
class Rules:
    """A backend as passes and schedule see it; by default, only the library computes lookups, scatters and pools.

    Attributes:
        order: in which elements are combined.
        limits: the thresholds of profitability.
    """

    order: ReductionOrder
    limits: Limits

    @property
    def adds_float64(self) -> bool:
        """Whether kernels that sum up large tensors are as fast in float64 as in float32."""
        return False

    def pool_gradient(self, plan: PoolPlan) -> PrimFunc | None:
        """The kernel of a pool's gradient; ``None``: keep the library's call."""
        return None

    def lookup(self, plan: LookupPlan) -> PrimFunc | None:
        """The kernel of a row lookup; ``None``: keep the library's call."""
        return None

    def scatter_sum(self, plan: ScatterPlan, length: int) -> PrimFunc | None:
        """The kernel that sums about ``length`` rows by index; ``None``: keep the library's call.

        Unless keys come sorted, its last result is memory for them."""
        return None

    def sorts_before(self, plan: ScatterPlan, length: int) -> bool:
        """Whether to sort the keys before a scatter sum of about ``length`` rows."""
        return False
