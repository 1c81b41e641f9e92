"""Thread-bound kernels on a processor: a PrimFunc → OpenCL C by TVM → PoCL → run on numpy arrays.

The device part is the very statements that CUDA C is written from; the host part (extents of launches, which arguments
each takes, from the launch's integers) is read from TVM's host function. Functions of CUDA's preamble have their plain
form here.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Sequence

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.ir import IRModule
from tvm.ir.expr import Call, TensorLoad
from tvm.target import Target
from tvm.tirx import PrimFunc
from tvm.tirx import transform as passes

_TARGET = {"kind": "opencl", "max_num_threads": 1024, "max_threads_per_block": 1024}
_OPTIONS = ["-cl-fp32-correctly-rounded-divide-sqrt", "-cl-opt-disable"]

_PLAIN = r"""
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#pragma OPENCL FP_CONTRACT OFF
typedef long int64_t;
typedef ulong uint64_t;
float bridge_as_float32(int x) { return as_float(x); }
int bridge_as_int32(float x) { return as_int(x); }
double bridge_as_float64(long x) { return as_double(x); }
long bridge_as_int64(double x) { return as_long(x); }
float bridge_from_float16(ushort x) { return vload_half(0, (const half*)&x); }
ushort bridge_to_float16(float x) { ushort y; vstore_half_rte(x, 0, (half*)&y); return y; }
float bridge_from_bfloat16(ushort x) { return as_float((uint)x << 16); }
ushort bridge_to_bfloat16(float x) {
  uint bits = as_uint(x);
  return (ushort)(x != x ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
ushort bridge_bits_bfloat16(float x) { return (ushort)(as_uint(x) >> 16); }
float bridge_round_bfloat16(float x) { return bridge_from_bfloat16(bridge_to_bfloat16(x)); }
float bridge_add_bfloat16(float a, float b) { return bridge_round_bfloat16(a + b); }
float bridge_subtract_bfloat16(float a, float b) { return bridge_round_bfloat16(a - b); }
float bridge_multiply_bfloat16(float a, float b) { return bridge_round_bfloat16(a * b); }
float bridge_reciprocal(float x) { return 1.0f / x; }
float bridge_quick_exp2(float x) { return exp2(x); }
float bridge_quick_reciprocal(float x) { return 1.0f / x; }
ulong bridge_mul_wide(uint a, uint b) { return (ulong)a * b; }
void bridge_refuse_index() {}
float bridge_max(float a, float b) {
  return a != a ? a : b != b ? b : a > b ? a : b > a ? b : as_float(as_int(a) & as_int(b));
}
float bridge_min(float a, float b) {
  return a != a ? a : b != b ? b : a < b ? a : b < a ? b : as_float(as_int(a) | as_int(b));
}
"""
_LIBM = (
    "fma sqrt floor ceil trunc rint fmod pow exp log log1p expm1 tanh erf sin cos tan asin acos atan atan2 sinh cosh"
)
_LIBM += " asinh acosh atanh"
_PLAIN += "".join(f"#define {name}f {name}\n" for name in _LIBM.split())

_NODES = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": lambda a, b: int(a / b) if a * b < 0 else a // b,
    "Mod": lambda a, b: a - b * (a // b),
    "Max": max,
    "Min": min,
    "GT": lambda a, b: a > b,
    "LT": lambda a, b: a < b,
}


@functools.cache
def _device():
    os.environ.setdefault("POCL_WORK_GROUP_SPECIALIZATION", "0")  # one compilation for launches of any extents
    opencl = pytest.importorskip("pyopencl", reason="pyopencl is not installed")
    try:
        devices = [device for each in opencl.get_platforms() for device in each.get_devices()]
    except opencl.LogicError:
        devices = []
    if not devices:
        pytest.skip("no OpenCL device: pocl-binary-distribution is not installed")
    _name_processor(devices[0])
    context = opencl.Context(devices[:1])
    return opencl, context, opencl.CommandQueue(context)


def _name_processor(device) -> None:
    """PoCL 3.0 compiles for no processor that is newer than its LLVM ("unknown target CPU 'generic'"): it gets the name
    of an older one, behind the target's triple in its record of the device."""
    if not device.driver_version.startswith("3.0") or platform.machine() != "x86_64":
        return
    triple, name = (ctypes.c_char_p.from_address(device.int_ptr + place) for place in (632, 640))
    if (triple.value, name.value) == (b"x86_64-unknown-linux-gnu", b"generic"):
        name.value = b"haswell"


class OpenClKernels:
    """PrimFuncs, compiled in one module; called by index with numpy arrays and the launch's integers."""

    def __init__(self, functions: Sequence[PrimFunc]) -> None:
        opencl, context, self.queue = _device()
        named = {
            f"k{index}": function.with_attr("global_symbol", f"k{index}") for index, function in enumerate(functions)
        }
        target = Target(_TARGET, host="llvm")
        module = passes.BindTarget(target)(IRModule(named))
        for each in (passes.VerifyMemory(), passes.AnnotateEntryFunc(), passes.SplitHostDevice()):
            module = each(module)
        parts = {variable.name_hint: function for variable, function in module.functions.items()}
        self.hosts = [parts.pop(name) for name in named]
        code = tvm.get_global_func("target.build.opencl")(IRModule(parts), target)
        self.source = code.inspect_source()
        built = opencl.Program(context, _PLAIN + self.source).build(_OPTIONS) if parts else None
        self.kernels = {name: opencl.Kernel(built, name) for name in parts}

    def __call__(self, index: int, arrays: Sequence[np.ndarray], scalars: Sequence[int] = ()) -> list[tuple[int, ...]]:
        """Runs a function on arrays, in place; extents of the launches that it made."""
        opencl, context, queue = _device()
        host = self.hosts[index]
        flags = opencl.mem_flags.READ_WRITE | opencl.mem_flags.COPY_HOST_PTR
        memory = [opencl.Buffer(context, flags, hostbuf=array) if array.size else None for array in arrays]
        run = _Host(self, host, memory, scalars)
        run.statement(host.body)
        for array, buffer in zip(arrays, memory, strict=True):
            if buffer is not None:
                opencl.enqueue_copy(queue, array, buffer)
        return run.launches


class _Host:
    """The host's statements, interpreted."""

    def __init__(self, owner: OpenClKernels, host: PrimFunc, memory: Sequence, scalars: Sequence[int]) -> None:
        self.owner, self.scalars = owner, scalars
        self.memory = list(zip(host.params, memory, strict=False))  # the last parameter may be the descriptor
        self.values: dict = {}
        self.launches: list[tuple[int, ...]] = []

    def statement(self, stmt) -> None:
        match stmt:
            case tirx.SeqStmt():
                for each in stmt.seq:
                    self.statement(each)
            case tirx.Bind():
                self.values[stmt.var] = self.number(stmt.value)
            case tirx.IfThenElse():
                chosen = stmt.then_case if self.number(stmt.condition) else stmt.else_case
                if chosen is not None:
                    self.statement(chosen)
            case tirx.Evaluate():
                self.launch(stmt.value)
            case tirx.DeclBuffer():
                pass
            case _:
                raise NotImplementedError(f"{type(stmt).__name__} on the host")

    def number(self, expr):
        match expr:
            case tirx.IntImm():
                return int(expr.value)
            case tirx.Var():
                return self.values[expr]
            case tirx.Cast():
                return self.number(expr.value)
            case TensorLoad():
                return self.scalars[self.number(expr.indices[0])]
        return _NODES[type(expr).__name__](self.number(expr.a), self.number(expr.b))

    def launch(self, call) -> None:
        names = list(call.attrs.launch_params)
        kernel, *arguments = call.args
        arguments, extents = arguments[: -len(names)], dict(zip(names, arguments[-len(names) :], strict=True))
        passed = [self.argument(each) for each in arguments]
        local = [self.number(extents.get(f"threadIdx.{axis}", tirx.const(1, "int32"))) for axis in "xyz"]
        blocks = [self.number(extents.get(f"blockIdx.{axis}", tirx.const(1, "int32"))) for axis in "xyz"]
        self.launches.append((*blocks, *local))
        whole = tuple(a * b for a, b in zip(blocks, local, strict=True))
        self.owner.kernels[kernel.value](self.owner.queue, whole, tuple(local), *passed)

    def argument(self, expr):
        if isinstance(expr, Call):  # a buffer's pointer
            return next(memory for param, memory in self.memory if param.same_as(expr.args[0]))
        return {"int32": np.int32, "int64": np.int64}[str(expr.ty).removeprefix("T.")](self.number(expr))
