"""Emitter of CUDA C: scalar expressions of one thread, and the nest of blocks and threads that runs them.

Functions of the preamble hide C's differences. Half types and bool are integers in memory, so no CUDA header is needed.

Preamble: the device functions that generated kernels call. ``tests/opencl.py`` has the plain form of each, in OpenCL C.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

from tvm import tirx
from tvm.ir import Range
from tvm.ir.expr import Call, TensorLoad
from tvm.tirx import (
    AllocBuffer,
    AttrStmt,
    Buffer,
    BufferLoad,
    BufferStore,
    Evaluate,
    Expr,
    IfThenElse,
    IterVar,
    Ramp,
    Stmt,
    Var,
)

from bridge.compile.codegen.emit import Emitter, element_type
from bridge.compile.codegen.tir import sequence

__all__ = ["PREAMBLE", "CudaEmitter", "SharedMemory", "launch", "local_buffer", "portions", "storage_type"]
__all__ += ["synchronize", "vector_at"]


class SharedMemory:
    """Shared memory of a block: buffers of its size, or of another, for exclusive use between two barriers."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._buffers: dict[tuple[str, int, int], Buffer] = {}

    def __call__(self, dtype: str, index: int = 0, size: int | None = None) -> Buffer:
        """The buffer of a type, index and size, created on first use."""
        key = dtype, index, self._size if size is None else size
        if key not in self._buffers:
            name = f"shared{len(self._buffers)}"
            self._buffers[key] = tirx.decl_buffer((key[2],), dtype, name, scope="shared")
        return self._buffers[key]

    @property
    def allocations(self) -> list[Stmt]:
        """The buffers' allocations, for the beginning of the kernel."""
        return [AllocBuffer(buffer) for buffer in self._buffers.values()]


def launch(
    blocks: Expr, threads: int, groups: int, body: Callable[[Var, Var, Var], Stmt], shared: SharedMemory | None = None
) -> Stmt:
    """``body(block, group, thread)`` for all of them, with shared memory; no launch if there are no blocks.

    Threads of a group are adjacent: a warp contains whole groups, or a group whole warps.
    """
    index_type = str(blocks.ty)
    extents = {
        "blockIdx.x": blocks,
        "threadIdx.y": _const(groups, index_type),
        "threadIdx.x": _const(threads, index_type),
    }
    variables = [Var(name, index_type) for name in ("block", "group", "thread")]
    nest = body(*variables)
    if shared is not None:
        nest = sequence([*shared.allocations, nest])
    for (tag, extent), variable in reversed(list(zip(extents.items(), variables, strict=True))):
        axis = IterVar(Range(_const(0, index_type), extent), variable, IterVar.ThreadIndex, tag)
        nest = AttrStmt(axis, "thread_extent", extent, nest)
    return IfThenElse(tirx.GT(blocks, _const(0, index_type)), nest, None)


def portions(count: Expr, size: int) -> Expr:
    """``count / size`` rounded up, without overflow."""
    of, one = _const(size, str(count.ty)), _const(1, str(count.ty))
    return tirx.truncdiv(count, of) + tirx.min(tirx.truncmod(count, of), one)


def synchronize() -> Stmt:
    """A barrier of the block's threads."""
    return Evaluate(tirx.call_intrin("void", "tirx.tvm_storage_sync", "shared"))


def _const(number: int, index_type: str) -> Expr:
    return tirx.const(number, index_type)


_STORAGE = {"bool": "uint8", "float16": "uint16", "bfloat16": "uint16"}
_WRITTEN = {"float32": (("{:.6e}",), "<f", "<i"), "float64": (("{:.15g}", "{:.15f}"), "<d", "<q")}
_ZERO = tirx.const(0, "int32")
_ARITHMETIC = {
    tirx.Add: "bridge_add_bfloat16",
    tirx.Sub: "bridge_subtract_bfloat16",
    tirx.Mul: "bridge_multiply_bfloat16",
}
_OF_BFLOAT16 = frozenset(("bridge_round_bfloat16", "bridge_from_bfloat16", *_ARITHMETIC.values()))
"""Functions whose float results are bfloat16 numbers."""
_CHOOSING = frozenset(("bridge_max", "bridge_min"))
"""Functions that return one of their arguments."""


def storage_type(dtype: str) -> str:
    """The storage type of ``dtype`` in a kernel's memory."""
    return _STORAGE.get(dtype, dtype)


def local_buffer(size: int, dtype: str, name: str) -> tuple[Buffer, Stmt]:
    """A thread's own array and its declaration; in registers if all indices are constants."""
    buffer = tirx.decl_buffer((size,), dtype, name, scope="local")
    return buffer, AllocBuffer(buffer)


def vector_at(index: Expr, width: int) -> Expr:
    """Indices of one access; TVM must see that the first index is a multiple of ``width``."""
    return Ramp(index, 1, width) if width > 1 else index


class CudaEmitter(Emitter):
    """Scalars of one thread.

    Products need no fence: NVRTC is told not to contract.
    """

    def __init__(self) -> None:
        super().__init__(1)
        self._bfloat16: set[Buffer] = set()
        """Locals that hold bfloat16 numbers."""

    def const(self, number: float, dtype: str) -> Expr:
        """A number. TVM's C writers keep 7 digits of a float, and 15 digits and 15 decimal places of a double, where
        1e-16 is 0: other numbers are made from their bits."""
        if dtype not in _WRITTEN or not math.isfinite(number):
            return super().const(number, dtype)
        written, code, bits = _WRITTEN[dtype]
        exact = struct.pack(code, number)
        if all(struct.pack(code, float(form.format(number))) == exact for form in written):
            return super().const(number, dtype)
        (integer,) = struct.unpack(bits, exact)
        return self.reinterpret(tirx.const(integer, f"int{8 * len(exact)}"), dtype)

    def bind(self, value: Expr, hint: str = "v") -> Expr:
        """A local that holds ``value``; an array of one element, for the same reason as in :class:`Emitter`."""
        if isinstance(value, Var) or (isinstance(value, TensorLoad) and value.source.scope() == "local"):
            return value
        if element_type(value) == "bool":
            return value
        self._names += 1
        cell, allocation = local_buffer(1, str(value.ty), f"{hint}{self._names}")
        self.stmts += [allocation, BufferStore(cell, value, [_ZERO])]
        if self._is_bfloat16(value):
            self._bfloat16.add(cell)
        return BufferLoad(cell, [_ZERO])

    def _is_bfloat16(self, value: Expr) -> bool:
        """Whether a float is known to be a bfloat16 number."""
        match value:
            case TensorLoad():
                return value.source in self._bfloat16
            case tirx.FloatImm():
                return element_type(value) == "float32" and struct.pack("<f", float(value.value))[:2] == bytes(2)
            case tirx.Select():
                return self._is_bfloat16(value.true_value) and self._is_bfloat16(value.false_value)
            case Call():
                name = getattr(value.args[0], "value", None)
                return name in _OF_BFLOAT16 or (name in _CHOOSING and all(map(self._is_bfloat16, value.args[1:])))
        return False

    def reinterpret(self, value: Expr, dtype: str) -> Expr:
        return tirx.call_pure_extern(dtype, f"bridge_as_{dtype}", value)

    def loaded(self, stored: Expr, dtype: str) -> Expr:
        if dtype == "bool":
            return tirx.Not(tirx.EQ(stored, tirx.const(0, "uint8")))
        if dtype in ("float16", "bfloat16"):
            return tirx.call_pure_extern("float32", f"bridge_from_{dtype}", stored)
        return stored

    def stored(self, value: Expr, dtype: str) -> Expr:
        if dtype == "bool":
            return tirx.Select(value, tirx.const(1, "uint8"), tirx.const(0, "uint8"))
        if dtype in ("float16", "bfloat16"):
            name = "bridge_bits_bfloat16" if dtype == "bfloat16" and self._is_bfloat16(value) else f"bridge_to_{dtype}"
            return tirx.call_pure_extern("uint16", name, value)
        return self.cast(value, dtype)

    def rounded(self, value: Expr, dtype: str) -> Expr:
        """Rounds; a sum, difference or product of two bfloat16 numbers by the instruction that computes it.

        The bits equal the rounded float32 result: float32 has more than twice the digits, and two more.
        """
        if dtype != "bfloat16":
            return self.loaded(self.stored(value, dtype), dtype)
        if self._is_bfloat16(value):
            return value
        name = _ARITHMETIC.get(type(value))
        if name is not None and self._is_bfloat16(value.a) and self._is_bfloat16(value.b):
            return tirx.call_pure_extern("float32", name, value.a, value.b)
        return tirx.call_pure_extern("float32", "bridge_round_bfloat16", value)

    def larger(self, a: Expr, b: Expr) -> Expr:
        return super().larger(a, b) if element_type(a) == "float64" else self._extreme("bridge_max", a, b)

    def smaller(self, a: Expr, b: Expr) -> Expr:
        return super().smaller(a, b) if element_type(a) == "float64" else self._extreme("bridge_min", a, b)

    def _extreme(self, name: str, a: Expr, b: Expr) -> Expr:
        """One instruction, with the same bits in either order."""
        return tirx.call_pure_extern(element_type(a), name, a, b)

    def reciprocal(self, x: Expr) -> Expr:
        """Correctly rounded except for denormal results, by Newton's method."""
        if element_type(x) != "float32":
            return super().reciprocal(x)
        return tirx.call_pure_extern("float32", "bridge_reciprocal", x)

    is_quick = True

    def quick(self, name: str, x: Expr) -> Expr:
        return tirx.call_pure_extern("float32", f"bridge_quick_{name}", x)

    def wide_product(self, a: Expr, b: Expr) -> Expr:
        """By name: in a 64-bit product, the compiler would add the upper halves, which are zero."""
        return tirx.call_pure_extern("uint64", "bridge_mul_wide", a, b)

    def has_library(self, dtype: str) -> bool:
        """Always: eager's kernels call the same functions, which are half as long as polynomials without tables."""
        return True

    def math(self, name: str, x: Expr) -> Expr:
        return self.libm({"roundeven": "rint"}.get(name, name), x)

    def fma(self, a: Expr, b: Expr, c: Expr) -> Expr:
        return self.libm("fma", a, b, c)

    def truncated(self, value: Expr, target: str) -> Expr:
        """C's conversion, as in eager's kernels, which convert to uint8 through int64."""
        return self.cast(self.cast(value, "int64"), target) if target == "uint8" else self.cast(value, target)


PREAMBLE = r"""
#define BRIDGE static __device__ __forceinline__

BRIDGE float bridge_as_float32(int x) { return __int_as_float(x); }
BRIDGE int bridge_as_int32(float x) { return __float_as_int(x); }
BRIDGE double bridge_as_float64(long long x) { return __longlong_as_double(x); }
BRIDGE long long bridge_as_int64(double x) { return __double_as_longlong(x); }

BRIDGE float bridge_from_float16(unsigned short x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
BRIDGE unsigned short bridge_to_float16(float x) {
#if __CUDA_ARCH__ >= 800
  unsigned int y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(0.0f), "f"(x));
  return (unsigned short)y;
#else
  unsigned short y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
#endif
}
// halves of a register, by name: the compiler sees that one instruction takes a half apart, or puts two together
BRIDGE float bridge_from_bfloat16(unsigned short x) {
  unsigned int y;
  asm("{ .reg .b16 zero; mov.b16 zero, 0; mov.b32 %0, {zero, %1}; }" : "=r"(y) : "h"(x));
  return __int_as_float((int)y);
}
BRIDGE unsigned short bridge_to_bfloat16(float x) {
#if __CUDA_ARCH__ >= 800
  unsigned int y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(0.0f), "f"(x));
  return (unsigned short)y;
#else
  unsigned int bits = (unsigned int)__float_as_int(x);
  unsigned int up = bits + 0x7fffu + ((bits >> 16) & 1u);
  return (unsigned short)(x != x ? 0x7fffu : up >> 16);
#endif
}
// of a number that is rounded to bfloat16
BRIDGE unsigned short bridge_bits_bfloat16(float x) {
  unsigned short y;
  asm("{ .reg .b16 low; mov.b32 {low, %0}, %1; }" : "=h"(y) : "r"(__float_as_int(x)));
  return y;
}
// rounded to bfloat16: its bits are the upper ones of a float's
BRIDGE float bridge_round_bfloat16(float x) {
#if __CUDA_ARCH__ >= 800
  unsigned int y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(x), "f"(0.0f));
  return __int_as_float((int)y);
#else
  return bridge_from_bfloat16(bridge_to_bfloat16(x));
#endif
}
// of two numbers of bfloat16, rounded to it. The lower halves are zero, and stay it: both halves are computed alike
BRIDGE float bridge_add_bfloat16(float a, float b) {
#if __CUDA_ARCH__ >= 900
  unsigned int y;
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(__float_as_int(a)), "r"(__float_as_int(b)));
  return __int_as_float((int)y);
#else
  return bridge_round_bfloat16(a + b);
#endif
}
BRIDGE float bridge_subtract_bfloat16(float a, float b) {
#if __CUDA_ARCH__ >= 900
  unsigned int y;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(__float_as_int(a)), "r"(__float_as_int(b)));
  return __int_as_float((int)y);
#else
  return bridge_round_bfloat16(a - b);
#endif
}
BRIDGE float bridge_multiply_bfloat16(float a, float b) {
#if __CUDA_ARCH__ >= 900
  unsigned int y;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(__float_as_int(a)), "r"(__float_as_int(b)));
  return __int_as_float((int)y);
#else
  return bridge_round_bfloat16(a * b);
#endif
}
// 1 / x of x >= 1, or nan: without the branch that a quotient takes for numbers which this has not
BRIDGE float bridge_reciprocal(float x) {
  float y;
  asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return x < __int_as_float(0x7f800000) ? __fmaf_rn(y, __fmaf_rn(-x, y, 1.0f), y) : y;
}
BRIDGE float bridge_quick_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
BRIDGE float bridge_quick_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
BRIDGE unsigned long long bridge_mul_wide(unsigned int a, unsigned int b) {
  unsigned long long y;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(y) : "r"(a), "r"(b));
  return y;
}
// nan if either is nan; of zeros the largest is +0, the smallest -0
BRIDGE float bridge_max(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return a != a ? a : b != b ? b : a > b ? a : b > a ? b : __int_as_float(__float_as_int(a) & __float_as_int(b));
#endif
}
BRIDGE float bridge_min(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return a != a ? a : b != b ? b : a < b ? a : b < a ? b : __int_as_float(__float_as_int(a) | __float_as_int(b));
#endif
}
// ends all work of the process on the GPU, as assertions in torch's kernels do
BRIDGE void bridge_refuse_index() { __assertfail("an index is in range", "a compiled lookup", 0, "bridge", 1); }
template <class T> BRIDGE T bridge_shuffle_xor(T x, int lanes) { return (T)__shfl_xor_sync(0xffffffffu, x, lanes); }
"""
