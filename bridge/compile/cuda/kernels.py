"""Kernels: a plan → one PrimFunc or two, which read the launch's integers on the host and hold one or more launches.

Schedules of functions that TVM legalized, for CUDA: their spatial loops bound to blocks and threads.
"""

from __future__ import annotations

from tvm.ir import IRModule
from tvm.s_tir import dlight
from tvm.target import Target
from tvm.tirx import PrimFunc

from bridge.compile.codegen.tir import LaunchArguments, loop_function, sequence
from bridge.compile.cuda.columns import finish_columns, generate_columns
from bridge.compile.cuda.elements import elements
from bridge.compile.cuda.row import row_launch, rows
from bridge.compile.cuda.step import kernel_buffers
from bridge.compile.schedule.chain_plan import ColumnPlan
from bridge.compile.schedule.row_plan import RowPlan
from bridge.compile.schedule.together import TogetherPlan

__all__ = ["generate", "generate_apart", "scheduled"]


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


def generate_apart(plan: RowPlan, plain: bool = False) -> tuple[PrimFunc, PrimFunc] | None:
    """The kernel of a plan that sums columns as two: inputs, results of rows, scratch memory, the launch's integers;
    parts of the columns' sums, which lie there, the sums, the integers. ``None``: it sums none.

    ``plain``: see :func:`generate`.
    """
    buffers = kernel_buffers(plan)
    parts, sums = ([each[node] for node in plan.finished] for each in (buffers.partial, buffers.outputs))
    if not sums:
        return None
    rest = [buffer for node, buffer in buffers.outputs.items() if node not in plan.finished]
    scratch = (*buffers.partial.values(), *buffers.cached.values())
    number = LaunchArguments(plan.arguments, plan.index_type)
    launch = row_launch(plan, buffers, number, plain)
    first = loop_function([*buffers.inputs, *rest, *scratch, *number.params], sequence([*number.stmts, launch]))
    number = LaunchArguments(plan.arguments, plan.index_type)
    finish = finish_columns(plan, buffers, number)
    return first, loop_function([*parts, *sums, *number.params], sequence([*number.stmts, finish]))


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


def scheduled(func: PrimFunc, target: Target) -> PrimFunc:
    """Every block's spatial loops over threads, reductions serial in each: the order of a serial loop.

    ``NotImplementedError`` for a function that is not made of schedulable blocks (sorts, scans, scatters).
    """
    with target:
        module = dlight.ApplyDefaultSchedule(dlight.gpu.Fallback())(IRModule({"main": func}))
    made = module["main"]
    if not made.attrs.get("tirx.is_scheduled", False):
        raise NotImplementedError("a function that TVM legalizes to a serial one, which is no kernel for a GPU")
    return made
