"""Rounding and conversion: a value in its compute type → the value as its element type stores it."""

from __future__ import annotations

import platform

from tvm import tirx
from tvm.tirx import Expr

from bridge.compile.codegen.emit import Emitter, element_type
from bridge.compile.codegen.pointwise import compute_type, different

__all__ = ["converted", "rounded"]


def rounded(e: Emitter, value: Expr, dtype: str, op: str = "") -> Expr:
    """``value`` rounded to a stored type, in its compute type. What ``op`` only moves is rounded already."""
    if compute_type(dtype) == dtype or op in ("copy", "concat"):
        return value
    value = e.bind(value)
    if dtype == "bfloat16":
        return _rounded_to_bfloat16(e, value)
    return e.cast(e.cast(value, dtype), compute_type(dtype))


def _rounded_to_bfloat16(e: Emitter, value: Expr) -> Expr:
    # By hand: TVM computes bfloat16 in float32 and drops a cast there and back.
    bits = e.bind(e.reinterpret(value, "int32"))
    odd = tirx.bitwise_and(tirx.shift_right(bits, e.const(16, "int32")), e.const(1, "int32"))
    up = e.bind(bits + e.const(0x7FFF, "int32") + odd)
    high = e.reinterpret(tirx.bitwise_and(up, e.const(-0x10000, "int32")), "float32")
    return e.select(different(value, value), e.const(float("nan"), "float32"), high)


def converted(e: Emitter, value: Expr, source: str, target: str) -> Expr:
    """A value of element type ``source`` as ``target``, both in their compute types: ``astype``."""
    if target == "bool":
        return different(value, e.const(0, compute_type(source)))
    if source == "bool":
        kind = compute_type(target)
        return e.select(value, e.const(1, kind), e.const(0, kind))
    if "float" in source and "int" in target:
        return _truncated(e, value, target)
    return rounded(e, e.cast(value, compute_type(target)), target)


def _truncated(e: Emitter, value: Expr, target: str) -> Expr:
    """A floating point number as an integer; what fits no integer becomes what it becomes in eager.

    C and LLVM leave nan and numbers out of range undefined, so LLVM may make anything of them. On x86 torch's code gets
    the smallest integer of 32 or 64 bits, and narrower types are the low bits of that; ARM's instruction saturates.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return e.cast(value, target)
    wide = "int64" if target in ("int64", "uint8") else "int32"
    smallest, source = -(2 ** (int(wide[3:]) - 1)), element_type(value)
    value = e.bind(e.llvm("llvm.trunc", value))
    fits = tirx.And(value >= e.const(smallest, source), value < e.const(-smallest, source))  # both are powers of two
    return e.cast(e.bind(e.select(fits, e.cast(value, wide), e.const(smallest, wide))), target)
