"""Transposition of a square of vectors in registers: LLVM IR, and calls of it from TIR.

In TVM's IR each of its shuffles would go through concatenated vectors, which cost LLVM a second.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx import Buffer, BufferLoad, Expr, Stmt

from autodiff.ir import itemsize
from bridge.compile.codegen.tir import const

__all__ = ["transpose", "transposition"]


def transpose(
    dtype: str, source: tuple[Buffer, Expr], step: Expr, last: Expr, target: tuple[Buffer, Expr], pitch: int
) -> Stmt:
    """Lines of ``source``, ``step`` elements apart, become columns of ``target``, whose rows are ``pitch`` apart.

    Both are a buffer and an index in it. A line is a vector; lines behind ``last`` repeat that one.
    """
    begin, end = (tirx.address_of(BufferLoad(buffer, [at])) for buffer, at in (source, target))
    return tirx.Evaluate(tirx.call_extern("int32", _name(dtype), begin, step, last, end, const(pitch)))


def _name(dtype: str) -> str:
    return f"bridge_transpose_{dtype}"


def transposition(dtype: str, lanes: int) -> str:
    """LLVM IR of the function that :func:`transpose` calls, for a square of ``lanes x lanes`` elements."""
    element = {"float32": "float", "float64": "double"}[dtype]
    vector = f"<{lanes} x {element}>"
    lines = [
        f"define internal i32 @{_name(dtype)}(ptr %from, i64 %step, i64 %last, ptr %to, i64 %pitch) alwaysinline {{"
    ]
    for i in range(lanes):
        lines += [
            f"  %behind{i} = icmp slt i64 %last, {i}",
            f"  %line{i} = select i1 %behind{i}, i64 %last, i64 {i}",
            f"  %shift{i} = mul i64 %line{i}, %step",
            f"  %source{i} = getelementptr {element}, ptr %from, i64 %shift{i}",
            f"  %v{i} = load {vector}, ptr %source{i}, align {itemsize(dtype)}",
        ]
    current = [f"%v{i}" for i in range(lanes)]
    distance = lanes // 2
    while distance:  # exchange the off-diagonal quarters of ever smaller squares
        low = [k + lanes - distance if k & distance else k for k in range(lanes)]
        high = [k + lanes if k & distance else k + distance for k in range(lanes)]
        following = list(current)
        for i in range(lanes):
            if i & distance:
                continue
            pair = f"{vector} {current[i]}, {vector} {current[i | distance]}"
            for row, picks in ((i, low), (i | distance, high)):
                mask = ", ".join(f"i32 {pick}" for pick in picks)
                following[row] = f"%d{distance}_{row}"
                lines.append(f"  {following[row]} = shufflevector {pair}, <{lanes} x i32> <{mask}>")
        current = following
        distance //= 2
    for i, value in enumerate(current):
        lines += [
            f"  %row{i} = mul i64 %pitch, {i}",
            f"  %target{i} = getelementptr {element}, ptr %to, i64 %row{i}",
            f"  store {vector} {value}, ptr %target{i}, align {itemsize(dtype)}",
        ]
    return "\n".join([*lines, "  ret i32 0", "}", ""])
