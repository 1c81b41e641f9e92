"""Emitter: TIR statements in order, expressions of a fixed number of lanes.

Scalars and vectors follow the same rules: an :class:`Emitter` has a number of lanes, and its ``const`` gives constants
of that width. ``bind`` binds a value with several uses to a variable, so the generated text grows with the number of
operations and not with the number of paths through them.
"""

from __future__ import annotations

import math
import platform

from tvm import tirx
from tvm.ir.expr import TensorLoad
from tvm.tirx import AllocBuffer, Bind, Broadcast, Buffer, BufferLoad, BufferStore, Expr, Ramp, Stmt, Var

from autodiff.ir import compute_type

__all__ = ["Emitter", "different", "element_type", "stack_buffer"]


def element_type(expr: Expr) -> str:
    """The element type of an expression, without its lanes."""
    return str(expr.ty).split("x")[0].removeprefix("T.")


def different(a: Expr, b: Expr) -> Expr:
    """``a != b``, true if either is nan: TVM's own node compiles to a comparison that is false for nan."""
    return tirx.Not(tirx.EQ(a, b))


def stack_buffer(size: int, dtype: str, name: str) -> tuple[Buffer, Stmt]:
    """A buffer on the stack, and its allocation.

    Scope ``global`` and the annotation keep TVM from calling its allocator; LLVM puts small buffers into registers.
    """
    buffer = tirx.decl_buffer((size,), dtype, name, scope="global")
    return buffer, AllocBuffer(buffer, annotations={"disable_lower_builtin": tirx.const(1, "bool")})


class Emitter:
    """Collects statements; its vector expressions have ``lanes`` lanes."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.stmts: list[Stmt] = []
        self._names = 0

    def type(self, dtype: str) -> str:
        """The TIR type of ``lanes`` elements."""
        return dtype if self.lanes == 1 else f"{dtype}x{self.lanes}"

    def const(self, number: float, dtype: str) -> Expr:
        """A number, broadcast to every lane."""
        return self.broadcast(_scalar(number, dtype))

    def broadcast(self, scalar: Expr) -> Expr:
        """A scalar expression, broadcast to every lane."""
        return scalar if self.lanes == 1 else Broadcast(scalar, self.lanes)

    def bind(self, value: Expr, hint: str = "v") -> Expr:
        """A variable that holds ``value``.

        The value goes through a one-element local buffer (which LLVM turns into a register), because a load ends a
        chain: TVM's analyzers and code generator expand bound variables, and a chain would grow exponentially.

        A floating point product is fenced: TVM lets LLVM contract ``a * b + c`` into one rounding on every target, and
        LLVM does so only if the product has no other use, which depends on the other operators of the kernel.
        """
        if isinstance(value, Var):
            return value
        if isinstance(value, tirx.Mul) and "float" in element_type(value):
            value = self.llvm("llvm.arithmetic.fence", value)
        self._names += 1
        if element_type(value) == "bool":
            return value  # one comparison, not worth a buffer of eight-bit lanes
        if not isinstance(value, TensorLoad):
            cell, allocation = stack_buffer(1, str(value.ty), f"{hint}{self._names}_cell")
            self.stmts += [allocation, BufferStore(cell, value, [tirx.const(0, "int32")])]
            value = BufferLoad(cell, [tirx.const(0, "int32")])
        var = Var(f"{hint}{self._names}", str(value.ty))
        self.stmts.append(Bind(var, value))
        return var

    def name_index(self, value: Expr, hint: str) -> Expr:
        """A variable for an index; analyzers see through it."""
        self._names += 1
        var = Var(f"{hint}{self._names}", str(value.ty))
        self.stmts.append(Bind(var, value))
        return var

    def cast(self, value: Expr, dtype: str) -> Expr:
        return value if element_type(value) == dtype else tirx.Cast(self.type(dtype), value)

    def reinterpret(self, value: Expr, dtype: str) -> Expr:
        return tirx.reinterpret(self.type(dtype), value)

    def loaded(self, stored: Expr, dtype: str) -> Expr:
        """Casts a value from its stored type ``dtype`` to its compute type."""
        return self.cast(stored, compute_type(dtype))

    def stored(self, value: Expr, dtype: str) -> Expr:
        """Casts (rounds) a value from its compute type to its stored type ``dtype``."""
        return self.cast(value, dtype)

    def rounded(self, value: Expr, dtype: str) -> Expr:
        """Rounds a value to a half type; the result is in its compute type."""
        value = self.bind(value)
        if dtype != "bfloat16":
            return self.loaded(self.stored(value, dtype), dtype)
        # By hand: TVM computes bfloat16 in float32 and drops a cast there and back.
        bits = self.bind(self.reinterpret(value, "int32"))
        odd = tirx.bitwise_and(tirx.shift_right(bits, self.const(16, "int32")), self.const(1, "int32"))
        up = self.bind(bits + self.const(0x7FFF, "int32") + odd)
        high = self.reinterpret(tirx.bitwise_and(up, self.const(-0x10000, "int32")), "float32")
        return self.select(tirx.Not(tirx.EQ(value, value)), self.const(math.nan, "float32"), high)

    def select(self, condition: Expr, then: Expr, otherwise: Expr) -> Expr:
        return tirx.Select(condition, then, otherwise)

    def larger(self, a: Expr, b: Expr) -> Expr:
        """The larger floating point number; nan if either is nan."""
        return self.select(tirx.Or(a > b, different(a, a)), a, b)

    def smaller(self, a: Expr, b: Expr) -> Expr:
        """The smaller floating point number; nan if either is nan."""
        return self.select(tirx.Or(a < b, different(a, a)), a, b)

    def reciprocal(self, x: Expr) -> Expr:
        """``1 / x`` for ``x >= 1`` or nan."""
        return self.const(1.0, element_type(x)) / x

    is_quick = False
    """Whether :meth:`quick` is implemented."""

    def quick(self, name: str, x: Expr) -> Expr:
        """``"exp2"`` or ``"reciprocal"`` of float32 by one instruction, within two ulp; denormal results are zero."""
        raise NotImplementedError(f"no quick {name} on this target")

    def wide_product(self, a: Expr, b: Expr) -> Expr:
        """All 64 bits of the product of two uint32."""
        return tirx.Mul(self.cast(a, "uint64"), self.cast(b, "uint64"))

    def llvm(self, name: str, *args: Expr) -> Expr:
        """An LLVM intrinsic that supports vectors, as in ``"llvm.sqrt"``.

        The equivalent ``tirx`` operators would need a lowering pass that substitutes bound variables: see
        :func:`bridge.compile.codegen.tir.lower_loops`.
        """
        return tirx.call_llvm_pure_intrin(str(args[0].ty), name, *args)

    def math(self, name: str, x: Expr) -> Expr:
        """An exact function of floating point numbers: sqrt, floor, ceil, trunc, roundeven."""
        return self.llvm(f"llvm.{name}", x)

    def truncated(self, value: Expr, target: str) -> Expr:
        """Converts a floating point number to an integer type with eager's result for nan and numbers out of range.

        C and LLVM leave these cases undefined. On x86 torch's code gets the smallest integer of 32 or 64 bits, and
        narrower types are its low bits; ARM's instruction saturates.
        """
        if platform.machine() not in ("x86_64", "AMD64"):
            return self.cast(value, target)
        wide = "int64" if target in ("int64", "uint8") else "int32"
        smallest, source = -(2 ** (int(wide[3:]) - 1)), element_type(value)
        value = self.bind(self.math("trunc", value))
        fits = tirx.And(value >= self.const(smallest, source), value < self.const(-smallest, source))  # powers of two
        return self.cast(self.bind(self.select(fits, self.cast(value, wide), self.const(smallest, wide))), target)

    def has_library(self, dtype: str) -> bool:
        """Whether transcendental functions of a type call the C library instead of vectorized polynomials."""
        return dtype != "float32"

    def libm(self, name: str, *args: Expr) -> Expr:
        """A C library function of float32 or float64, lane by lane: it has no vector form."""
        dtype = element_type(args[0])
        symbol = name + "f" if dtype == "float32" else name
        return self.lanewise(lambda *lanes: tirx.call_pure_extern(dtype, symbol, *lanes), *args)

    def fma(self, a: Expr, b: Expr, c: Expr) -> Expr:
        """``a * b + c`` with one rounding."""
        return self.llvm("llvm.fma", a, b, c)

    def polynomial(self, x: Expr, coefficients: list[float]) -> Expr:
        """``coefficients[0] + coefficients[1]*x + …`` by Horner's rule in fused multiply-adds."""
        dtype = element_type(x)
        result = self.const(coefficients[-1], dtype)
        for coefficient in reversed(coefficients[:-1]):
            result = self.fma(result, x, self.const(coefficient, dtype))
        return self.bind(result)

    def lanewise(self, function, *args: Expr) -> Expr:
        """Applies a scalar function lane by lane."""
        if self.lanes == 1:
            return function(*args)
        args = [self.bind(arg) for arg in args]
        lanes = [
            self.bind(function(*(tirx.Shuffle([arg], [lane]) for arg in args)), "lane") for lane in range(self.lanes)
        ]
        return tirx.Shuffle(lanes, list(range(self.lanes)))

    def index(self, base: Expr, stride: Expr | int) -> Expr:
        """The indices ``base, base + stride, …``."""
        return base if self.lanes == 1 else Ramp(base, stride, self.lanes)


def _scalar(number: float, dtype: str) -> Expr:
    if dtype == "bool":
        return tirx.const(bool(number), "bool")
    if "float" not in dtype and isinstance(number, float) and math.isfinite(number):
        number = int(number)
    return tirx.const(number, dtype)
