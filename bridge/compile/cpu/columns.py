"""Column reduction kernels: a reduction over few rows → one PrimFunc whose columns run in parallel.

The order of the additions is that of :mod:`bridge.compile.schedule.reduction` with one chunk: row after row.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx import BufferLoad, BufferStore, Expr, For, ForKind, SeqStmt, Stmt, Var

from autodiff.ir import itemsize
from bridge.compile.codegen.emit import LANES, Emitter, stack_buffer
from bridge.compile.codegen.kernel import Kernel
from bridge.compile.codegen.pointwise import compute_type
from bridge.compile.codegen.tir import loop_function
from bridge.compile.loop_ir.graph import Reduction
from bridge.compile.loop_ir.views import View
from bridge.compile.schedule.reduction import combine, identity
from bridge.compile.schedule.space import make_space

__all__ = ["generate_column_reduction"]

_PARALLEL_WORK = 150_000
_COPIES = 4  # vectors of columns that one pass over the rows takes along


def generate_column_reduction(node: Reduction) -> Kernel:
    """``out[b, k] = op over r of operand[b, r, k]``, the rows in order."""
    outer, reduced, inner = node.outer, node.reduced, node.inner
    view = node.operand.view
    cut = View((outer, reduced, inner), (0, 1, 0))
    space = make_space(view.numel, inner, [(view, 1), (cut, 1)], reduces=False)
    if space is None:
        raise AssertionError("a column reduction without common loop extents was formed")
    source, target = node.operand.value, node.out
    buffers = [
        tirx.decl_buffer(value.shape, value.dtype, name, data_alignment=itemsize(value.dtype))
        for value, name in ((source, "in0"), (target, "out0"))
    ]
    flats = [
        tirx.decl_buffer((value.numel,), value.dtype, name, data=buffer.data, data_alignment=itemsize(value.dtype))
        for value, name, buffer in zip((source, target), ("in0_flat", "out0_flat"), buffers, strict=True)
    ]
    row_strides, column_strides = space.strides(view)
    parallel = view.numel >= _PARALLEL_WORK
    dtype = compute_type(target.dtype)
    index_type = "int64" if max(source.numel, target.numel) >= 2**31 else "int32"

    def const(number: int) -> Expr:
        return tirx.const(number, index_type)

    def coordinates(position: Expr, extents: tuple[int, ...], strides: tuple[int, ...]) -> Expr:
        index, below = const(0), 1
        for extent, stride in reversed(list(zip(extents, strides, strict=True))):
            if stride:
                index = index + tirx.truncmod(tirx.truncdiv(position, const(below)), const(extent)) * const(stride)
            below *= extent
        return index

    def section(lanes: int, copies: int, begin: int, count: int) -> Stmt:
        task, row = Var("task", index_type), Var("row", index_type)
        batch, block = tirx.truncdiv(task, const(count)), tirx.truncmod(task, const(count))
        accumulator, allocation = stack_buffer(lanes * copies, dtype, "acc")
        start, body, finish = Emitter(lanes), Emitter(lanes), Emitter(lanes)
        base = body.name_index(
            coordinates(batch * const(reduced) + row, space.rows, row_strides) + const(view.offset), "base"
        )
        for copy in range(copies):
            slot = [start.index(const(copy * lanes), 1)]
            column = const(begin) + (block * const(copies) + const(copy)) * const(lanes)
            start.stmts.append(BufferStore(accumulator, start.const(identity(node.op, dtype), dtype), slot))
            if len(space.columns) == 1:
                load = BufferLoad(flats[0], [body.index(base + column * const(column_strides[0]), column_strides[0])])
            else:
                lane = [
                    BufferLoad(flats[0], [base + coordinates(column + const(k), space.columns, column_strides)])
                    for k in range(lanes)
                ]
                load = tirx.Shuffle(lane, list(range(lanes))) if lanes > 1 else lane[0]
            value = body.bind(body.cast(load, dtype))
            old = body.bind(BufferLoad(accumulator, slot))
            body.stmts.append(BufferStore(accumulator, combine(body, node.op, old, value), slot))
            result = finish.cast(BufferLoad(accumulator, slot), target.dtype)
            finish.stmts.append(BufferStore(flats[1], result, [finish.index(batch * const(inner) + column, 1)]))
        rows = For(row, const(0), const(reduced), ForKind.SERIAL, SeqStmt(body.stmts))
        kind = ForKind.PARALLEL if parallel and outer * count > 1 else ForKind.SERIAL
        stmts = [allocation, *start.stmts, rows, *finish.stmts]
        return For(task, const(0), const(outer * count), kind, SeqStmt(stmts))

    wide = LANES * _COPIES
    sections = [
        (LANES, _COPIES, 0, inner // wide),
        (LANES, 1, inner - inner % wide, inner % wide // LANES),
        (1, 1, inner - inner % LANES, inner % LANES),
    ]
    stmts: list[Stmt] = [tirx.DeclBuffer(flat, data=buffer.data) for flat, buffer in zip(flats, buffers, strict=True)]
    stmts += [section(*parts) for parts in sections if parts[-1]]
    return Kernel(loop_function(buffers, SeqStmt(stmts)), (source,), (target,), (), (node.op,))
