"""Masks vector by vector: a computed mask whose lanes take the numbers of one call of the generator → that call, once.

A thread of eager's kernel that loads four elements or eight decides about four neighbours with one call's four numbers,
and so does attention's, which takes one sequence of them. Our thread takes the same four where its vectors begin at
multiples of four.
"""

from __future__ import annotations

from typing import Protocol

from tvm import tirx
from tvm.tirx import Buffer, BufferLoad, BufferStore, Expr

from bridge.compile.codegen.philox import IN_A_ROW, NUMBERS, is_kept, numbers_of, place
from bridge.compile.codegen.pointwise import MASKS
from bridge.compile.cuda.emitter import CudaEmitter, local_buffer
from bridge.compile.cuda.scope import ThreadScope
from bridge.compile.loop_ir.operations import Access
from bridge.compile.schedule.row_plan import Compute, Index, Read

__all__ = ["drawn_vector", "is_at_multiples"]


class _Step(Protocol):
    scope: ThreadScope
    lanes: int
    lane: Expr
    before: CudaEmitter
    e: CudaEmitter

    def first(self, access: Access) -> Expr: ...


def is_at_multiples(access: Access, count: int) -> bool:
    """Whether it is known that vectors of so many elements begin at multiples of their number."""
    known = [access.offset, *(term.stride for term in access.terms), *access.columns[:-1]]
    return all(isinstance(each, int) and each % count == 0 for each in known)


def drawn_vector(step: _Step, node: Compute) -> Expr | None:
    """Whether this lane's element is kept; ``None``: no mask, or each lane has a call of its own."""
    width = MASKS.get(node.op, 1)
    if (width < NUMBERS and width != IN_A_ROW) or step.lanes % NUMBERS or node.per_row:
        return None
    index, *others = node.operands
    if index.access.columns[-1] != 1 or not is_at_multiples(index.access, NUMBERS):
        return None
    e = step.before

    def read(operand: Read | Index) -> Expr:
        return step.scope.load_scalar(operand)

    seed, offset, threads, least = step.scope.values(others, e, read)
    words: Buffer
    words, allocation = local_buffer(step.lanes, "uint32", "words")
    e.stmts.append(allocation)
    begin, index_type = step.first(index.access), str(step.lane.ty)
    for first in range(0, step.lanes, NUMBERS):
        call, thread, _ = place(e, width, begin + tirx.const(first, index_type), threads)
        for lane, number in enumerate(numbers_of(e, seed, offset, call, thread)):
            e.stmts.append(BufferStore(words, number, [tirx.const(first + lane, index_type)]))
    return step.e.bind(is_kept(width, BufferLoad(words, [step.lane]), step.e.cast(least, "uint32")))
