"""Preamble of CUDA C: the device functions that generated kernels call, without any header of CUDA's.

``tests/opencl.py`` has the plain form of each, in OpenCL C.
"""

from __future__ import annotations

__all__ = ["PREAMBLE"]

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
