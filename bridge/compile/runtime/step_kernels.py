"""Step kernels: groups that are launched as one → the kernel that computes them, its tensors and integers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from tvm.tirx import PrimFunc

from autodiff.extents import Dim, Extent, below, same, sample_of
from bridge.compile.backend import Backend
from bridge.compile.codegen.tir import Finish, Kernel
from bridge.compile.loop_ir.graph import Fallback, LibraryCall, Product, Reduction, Value
from bridge.compile.schedule.chain_plan import find_chains, plan_chain, plan_columns
from bridge.compile.schedule.fuse import Group
from bridge.compile.schedule.limits import Rules
from bridge.compile.schedule.plan_rows import Planned, plan_rows
from bridge.compile.schedule.row_plan import RowPlan
from bridge.compile.schedule.together import plan_together

__all__ = ["chained", "guard_indices", "kernel_apart", "kernel_of", "one"]


def chained(
    steps: Sequence[list[Group]], stored: Collection[Value], results: Collection[Value], rules: Rules
) -> list[list[Group]]:
    """The steps, in an order of execution, with those of each chain in the place of its last one."""
    chains = find_chains([step[0] for step in steps if len(step) == 1], stored, results)
    chains = {last: chain for last, chain in chains.items() if plan_chain(chain, stored, rules) is not None}
    early = {group for first, rows, _ in chains.values() for group in (first, rows)}
    return [list(chains.get(step[0], step)) for step in steps if step[0] not in early]


def _is_chain(step: Sequence[Group]) -> bool:
    """Whether groups that are launched as one are a chain."""
    return len(step) > 1 and isinstance(step[0].nodes[0], Product)


def guard_indices(reached: Iterable[Dim]) -> None:
    """Guards that tensors of so many elements are within the reach of a short index, the largest ones only."""
    guarded: list[Extent] = []
    for count in sorted((count for count in reached if isinstance(count, Extent)), key=sample_of, reverse=True):
        if any(below(count - larger, 1) for larger in guarded):
            continue
        guarded.append(count)
        if count >= 2**31:
            raise AssertionError(f"a tensor of {count} elements is read with a short index")


def one(step: Sequence[Group]) -> Group:
    """Groups that are launched together, as one whose nodes are theirs."""
    if len(step) == 1:
        return step[0]
    made = {value: node for group in step for value, node in group.made.items()}
    return Group(step[0].index, [node for group in step for node in group.nodes], 0, made=made, fusable=False)


def kernel_of(
    step: Sequence[Group],
    stored: set[Value],
    backend: Backend,
    generate: Callable,
    apart: Callable,
    reached: dict[Dim, None],
) -> Kernel | LibraryCall | None:
    """How groups are computed; ``None`` if all that one makes has no elements.

    ``generate`` makes kernels of plans, ``apart`` makes two of one, see
    :meth:`~bridge.compile.backend.Backend.apart`: the same of equal plans, which are compiled once.
    ``reached`` collects the numbers of elements of tensors whose indices are short.
    """
    group, node = step[0], step[0].nodes[0]
    if all(same(value.numel, 0) for value in group.made):
        return None
    if isinstance(node, LibraryCall):
        return node
    if isinstance(node, Product) and not _is_chain(step):
        values = tuple(operand.value for operand in node.operands[:2])
        ops = ("matmul",) if node.onto is None else ("matmul", "add")
        return Kernel(generate(node.plan), values, node.outs, (), ops, node.plan.descriptor(node.onto is not None))
    if isinstance(node, Fallback):
        values = tuple(operand.value for operand in node.operands)
        return Kernel(node.kernel, values, node.outs, (), (node.op,), node.scalars)
    if _is_chain(step):
        planned = plan_chain(step, stored, backend)
        assert planned is not None
    elif len(step) > 1:
        planned = plan_together(step, stored, backend)
    elif isinstance(node, Reduction) and not group.fusable:
        planned = plan_columns(node, backend)
    else:
        planned = plan_rows(group, stored, backend)
    if planned.plan.index_type == "int32":
        reached.update(dict.fromkeys(value.numel for value in (*planned.inputs, *planned.outputs)))
    two = apart(planned.plan)
    if two is None:
        func = generate(planned.plan)
        return Kernel(func, planned.inputs, planned.outputs, planned.scratch, planned.ops, planned.scalars)
    return kernel_apart(planned, *two)


def kernel_apart(planned: Planned[RowPlan], func: PrimFunc, finish: PrimFunc) -> Kernel:
    """What of a launch's tensors is of which of the two that it is launched as, see
    :meth:`~bridge.compile.backend.Backend.apart`."""
    plan = planned.plan
    of_node = dict(zip(plan.outputs, planned.outputs, strict=True))
    part_of = dict(zip(plan.column_reductions, planned.scratch, strict=False))
    sums = tuple(of_node[node] for node in plan.finished)
    rest = tuple(value for node, value in of_node.items() if node not in plan.finished)
    last = Finish(finish, tuple(part_of[node] for node in plan.finished), sums)
    return Kernel(func, planned.inputs, rest, planned.scratch, planned.ops, planned.scalars, last)
