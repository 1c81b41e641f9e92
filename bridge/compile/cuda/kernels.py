"""Kernels: a plan → one PrimFunc, which reads the launch's integers on the host and holds one or more launches."""

from __future__ import annotations

from tvm.tirx import PrimFunc

from bridge.compile.codegen.arguments import LaunchArguments
from bridge.compile.codegen.tir import loop_function, sequence
from bridge.compile.cuda.columns import generate_columns
from bridge.compile.cuda.elements import elements
from bridge.compile.cuda.rows import rows
from bridge.compile.cuda.scope import kernel_buffers
from bridge.compile.schedule.column_plan import ColumnPlan
from bridge.compile.schedule.row_plan import RowPlan
from bridge.compile.schedule.together import TogetherPlan

__all__ = ["generate"]


def generate(plan: RowPlan | ColumnPlan | TogetherPlan, plain: bool = False) -> PrimFunc:
    """The kernel of a plan: inputs, results, scratch memory, the launch's integers.

    ``plain``: without what only CUDA has, for the same bits on other devices.
    """
    if isinstance(plan, ColumnPlan):
        return generate_columns(plan)
    if isinstance(plan, TogetherPlan):
        return _generate_together(plan)
    number, buffers = LaunchArguments(plan.arguments, plan.index_type), kernel_buffers(plan)
    reduces = any(node.reduces for node in plan.nodes)
    launches = rows(plan, buffers, number, plain) if reduces else elements([(plan, buffers, number)])
    scratch = (*buffers.partial.values(), *buffers.cached.values())
    tensors = (*buffers.inputs, *buffers.outputs.values(), *scratch)
    return loop_function([*tensors, *number.params], sequence([*number.stmts, *launches]))


def _generate_together(plan: TogetherPlan) -> PrimFunc:
    number = LaunchArguments(plan.arguments, plan.index_type)
    parts, first = [], 0
    for index, each in enumerate(plan.plans):
        parts.append((each, kernel_buffers(each, f"_{index}"), number.part(first, each.arguments)))
        first += each.arguments
    inputs = [buffer for _, buffers, _ in parts for buffer in buffers.inputs]
    outputs = [buffer for _, buffers, _ in parts for buffer in buffers.outputs.values()]
    launches = elements(parts)
    return loop_function([*inputs, *outputs, *number.params], sequence([*number.stmts, *launches]))
