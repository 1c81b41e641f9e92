"""Blocks of a matrix product: the descriptor's fields, a task for each block of the result, the function around."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.tirx import BufferLoad, Expr, ForKind, PrimFunc, SeqStmt, Var

from bridge.compile.codegen.tir import Scope, const, loop, loop_function
from bridge.compile.cpu.gemm_buffers import Buffers, quotient_up, smaller
from bridge.compile.cpu.transpose import transposition
from bridge.compile.loop_ir.product import FIELDS

__all__ = ["Block", "function_of", "product_of_blocks", "with_fields"]


@dataclass(frozen=True)
class Block:
    """One block of the results, of which ``rows`` and ``width`` columns exist.

    Attributes:
        batch: numbers of its product in the two axes of the batch.
        row, column: of the result where it begins.
    """

    batch: tuple[Var, Var]
    row: Var
    column: Var
    rows: Var
    width: Var

    def product(self, g: Buffers, operand: str) -> Expr:
        """Index of an operand's matrix of this block's product."""
        outer, inner = self.batch
        return outer * g.field[f"{operand}_outer"] + inner * g.field[f"{operand}_inner"]


def with_fields(g: Buffers) -> Scope:
    """A scope in which the descriptor's fields are read."""
    scope = Scope()
    g.field = {
        name: scope.name(BufferLoad(g.descriptor, [const(position)]), name) for position, name in enumerate(FIELDS)
    }
    return scope


def product_of_blocks(g: Buffers, task: Callable[[Scope, Block], None]) -> PrimFunc:
    """The kernel whose tasks, side by side, are the blocks of all products."""
    scope = with_fields(g)
    tall = scope.name(quotient_up(g.field["m"], g.field["block_rows"]), "tall")
    wide = scope.name(quotient_up(g.field["n"], g.field["block_columns"]), "wide")
    tasks = g.field["outer"] * g.field["inner"] * tall * wide
    scope.add(loop(tasks, lambda body, index: task(body, _block(g, body, index, tall, wide)), ForKind.PARALLEL))
    return function_of(g, scope)


def _block(g: Buffers, scope: Scope, index: Var, tall: Var, wide: Var) -> Block:
    field = g.field
    block = scope.name(tirx.truncmod(index, tall * wide), "block")
    batch = scope.name(tirx.truncdiv(index, tall * wide), "batch")
    outer = scope.name(tirx.truncdiv(batch, field["inner"]), "outer_index")
    inner = scope.name(tirx.truncmod(batch, field["inner"]), "inner_index")
    row = scope.name(tirx.truncdiv(block, wide) * field["block_rows"], "row")
    column = scope.name(tirx.truncmod(block, wide) * field["block_columns"], "column")
    rows = scope.name(smaller(field["m"] - row, field["block_rows"]), "rows")
    width = scope.name(smaller(field["n"] - column, field["block_columns"]), "width")
    return Block((outer, inner), row, column, rows, width)


def function_of(g: Buffers, scope: Scope, first: int = 0) -> PrimFunc:
    """The kernel of what a scope does, with the parameters from the ``first`` on."""
    params = g.params[first:]
    declared = [tirx.DeclBuffer(buffer, data=param) for buffer, param in zip(g.operands[first:], params, strict=True)]
    text = tvm.ir.StringImm(transposition(g.dtype, g.lanes))
    body = tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", text, SeqStmt([*declared, *scope.stmts]))
    return loop_function(params, body, shared=True)
