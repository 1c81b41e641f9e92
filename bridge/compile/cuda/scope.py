"""Thread scope: what the code of one row, or one vector, shares while it is emitted for a thread."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.tirx import Buffer, Expr, IfThenElse, Stmt

from bridge.compile.codegen.emit import compute_type
from bridge.compile.codegen.tir import LaunchArguments, flat_buffer
from bridge.compile.cuda.emitter import CudaEmitter, storage_type
from bridge.compile.schedule.row_plan import KernelBuffers, Read, RowPlan, RowValues

__all__ = ["Kept", "ThreadScope", "kernel_buffers"]


@dataclass(frozen=True)
class Kept:
    """Numbers that a thread keeps for each of its elements of a row.

    Attributes:
        buffer: the thread's own array; or memory of all rows or tasks.
        base: index of the row's first element in memory; ``None``: the thread's own, in the order of its turns.
    """

    buffer: Buffer
    base: Expr | None = None

    def at(self, slot: Expr, position: Expr) -> Expr:
        """Index of the element that the thread meets as its ``slot``-th, at ``position`` of the row."""
        return slot if self.base is None else self.base + position


class ThreadScope(RowValues):
    """Emission state of one row in one thread.

    Attributes:
        leads: whether the thread stores the row's own results.
        valid: whether the row is one at all, and not a repetition for a group without one; ``None``: always.
        cached: elementwise values kept for later passes, by node.
        partial: parts of column reductions, by node.
        ahead: what is the same for all rows and is read in the first pass for a later one, as stored.
    """

    head: CudaEmitter

    def __init__(self, plan: RowPlan, buffers: KernelBuffers, number: LaunchArguments, leads: Expr) -> None:
        super().__init__(plan, buffers, number, CudaEmitter())
        self.leads = leads
        self.valid: Expr | None = None
        self.cached: dict[int, Kept] = {}
        self.partial: dict[int, Kept] = {}
        self.ahead: dict[Read, Kept] = {}

    def store_scalar(self, store: Stmt) -> None:
        alone = self.leads if self.valid is None else tirx.And(self.leads, self.valid)
        self.head.stmts.append(IfThenElse(alone, store, None))

    def if_valid(self, stmt: Stmt) -> Stmt:
        """A statement for rows only, not for repetitions of one."""
        return stmt if self.valid is None else IfThenElse(self.valid, stmt, None)

    def taken(self) -> list[Stmt]:
        """The statements emitted so far, which the head forgets."""
        stmts, self.head.stmts = self.head.stmts, []
        return stmts


def kernel_buffers(plan: RowPlan, suffix: str = "") -> KernelBuffers:
    """The kernel's memory, in the order of its parameters; ``suffix`` of their names."""

    def buffer(dtype: str, name: str) -> Buffer:
        return flat_buffer(storage_type(dtype), name + suffix, plan.index_type)

    nodes = plan.nodes
    cached = enumerate(plan.cached if plan.buffer_row is not None else ())
    return KernelBuffers(
        [buffer(dtype, f"in{index}") for index, dtype in enumerate(plan.inputs)],
        {node: buffer(nodes[node].dtype, f"out{i}") for i, node in enumerate(plan.outputs)},
        {node: buffer(compute_type(nodes[node].dtype), f"partial{i}") for i, node in enumerate(plan.column_reductions)},
        {node: buffer(compute_type(nodes[node].dtype), f"row{i}") for i, node in cached},
    )
