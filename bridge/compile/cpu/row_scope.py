"""Row scope of the CPU: what the code of one row shares while it is emitted; row buffers on the stack or per task."""

from __future__ import annotations

from tvm.tirx import Buffer, Expr, Stmt

from bridge.compile.codegen.arguments import LaunchArguments
from bridge.compile.codegen.emit import Emitter, stack_buffer
from bridge.compile.codegen.pointwise import compute_type
from bridge.compile.schedule.row_plan import RowPlan
from bridge.compile.schedule.row_scope import KernelBuffers, RowValues

__all__ = ["RowScope"]


class RowScope(RowValues):
    """Emission state of one row.

    Attributes:
        task: index of the task that walks the row.
        parts: index, in the partial results of column reductions, of what the row is added to.
        tail: whether the row is the elements behind the vectors of a flat space.
        row_buffers: elementwise values cached for later passes, by node.
        allocations: statements that make the buffers of a row.
    """

    def __init__(
        self, plan: RowPlan, buffers: KernelBuffers, number: LaunchArguments, task: Expr, *, tail: bool = False
    ) -> None:
        super().__init__(plan, buffers, number, Emitter(1))
        self.task = task
        self.parts: Expr = task * number(plan.length)
        self.tail = tail
        self.allocations: list[Stmt] = []
        self.row_buffers = dict(buffers.cached)
        for node in plan.cached:
            if node not in self.row_buffers:
                self.row_buffers[node] = self.allocate(plan.length, compute_type(plan.nodes[node].dtype), "cached")

    def allocate(self, size: int, dtype: str, name: str) -> Buffer:
        """A buffer on the stack."""
        buffer, allocation = stack_buffer(size, dtype, f"{name}{len(self.allocations)}")
        self.allocations.append(allocation)
        return buffer

    def in_row_buffer(self, position: Expr) -> Expr:
        """Index in a row buffer of the element at ``position`` of the row."""
        row = self.plan.buffer_row
        return position if row is None else self.task * self.number(row) + position
