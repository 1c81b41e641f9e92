"""The CPU backend: a processor → kernels and machine code for it, and its policy for matrix products."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import tvm
from tvm.target import Target
from tvm.tirx import PrimFunc

from bridge.compile.backend import Backend, Built
from bridge.compile.codegen.kernel import Kernel
from bridge.compile.cpu.build import build_library, kernel_source
from bridge.compile.cpu.columns import generate_column_reduction
from bridge.compile.cpu.gemm import gemm_function
from bridge.compile.cpu.gemm_buffers import ROWS, WIDEST_BLOCK, columns
from bridge.compile.cpu.loops import generate
from bridge.compile.loop_ir.graph import Reduction
from bridge.compile.runtime.build import build_kernels
from bridge.compile.schedule.row_plan import RowPlan

__all__ = ["CpuBackend", "CpuProducts", "host_backend"]

#: LLVM unrolls a loop completely if less than this many instructions come out, then the loop around it likewise. With
#: its own limit, 300, a short column sum (6 chunks of rows of 48 vectors) grows to 14,000 instructions, half a second
#: of compilation, and is no faster. At 270 nearly every other kernel's machine code is what it is at 300; at 220 a
#: softmax over 128 columns, which gains from unrolling, is a tenth slower.
_UNROLLED_INSTRUCTIONS = 270

_SMALL = 2**15
"""Multiplications below which a product is torch's: little to gain, and the first of ours costs a compilation."""

_WASTE = 2
"""How many times its own elements a product may compute, padded to whole register tiles, before torch's is better."""

_TALLEST_BLOCK = 96 * ROWS
"""Rows of one task at most: each task packs its part of ``b``, which is worth the more, the more rows read it."""

_GENERATED_CPUS = ("znver4", "znver5")
"""LLVM's names of processors with AVX-512 on which MKL does not use it."""


@functools.cache
def host_cpu() -> str:
    """LLVM's name of this processor."""
    return str(tvm.get_global_func("target.llvm_get_system_cpu")())


@functools.cache
def host_backend() -> CpuBackend:
    """The backend of this machine's processor."""
    options = [f"-unroll-threshold-aggressive:uint={_UNROLLED_INSTRUCTIONS}"]
    return CpuBackend(Target({"kind": "llvm", "mcpu": host_cpu(), "cl-opt": options}))


@dataclass(frozen=True)
class CpuBackend(Backend):
    """Kernels by LLVM on torch's threads, as many as torch says at every call: :mod:`bridge.compile.cpu.threads`.

    Attributes:
        target: of kind ``llvm``; no fast-math flag: values must not depend on what a kernel is fused with.
    """

    target: Target

    @property
    def key(self) -> str:
        return f"cpu {self.target}"

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def threads(self) -> int:
        return torch.get_num_threads()

    @property
    def products(self) -> CpuProducts:
        return CpuProducts()

    def kernel(self, plan: RowPlan | Reduction) -> Kernel:
        return generate_column_reduction(plan) if isinstance(plan, Reduction) else generate(plan)

    def build(self, functions: Sequence[tuple[str, PrimFunc]]) -> list[Built]:
        return build_kernels(functions, self.key, self._library)

    def _library(self, functions: Mapping[str, PrimFunc], loops: bool) -> tvm.runtime.Module:
        return build_library(functions, self.target, loops)

    def source(self, function: PrimFunc, name: str, form: str) -> str:
        return kernel_source(function, name, self.target, form)


class CpuProducts:
    """Matrix products on this processor; a :class:`~bridge.compile.schedule.products.ProductPolicy`.

    torch multiplies float32 and float64 with Intel's MKL, which leaves processors of other makers with code for
    narrower vectors: on an AVX-512 EPYC generated code is twice as fast.
    """

    def generated(self, element_type: str, m: int, n: int, k: int) -> bool:
        """Whether a product of ``[m, k]`` and ``[k, n]`` matrices is generated code."""
        if element_type not in ("float32", "float64") or m * n * k < _SMALL or host_cpu() not in _GENERATED_CPUS:
            return False
        width = columns(element_type)
        return -(-n // width) * width * -(-m // 4) * 4 <= _WASTE * m * n

    def block(self, element_type: str, batch: int, m: int, n: int) -> tuple[int, int]:
        """Rows and columns of one task: tall blocks, because each packs its part of ``b``; enough for every thread."""
        panel = columns(element_type)
        parts = -(-m // _TALLEST_BLOCK)
        rows = -(-m // (parts * ROWS)) * ROWS
        wanted = 2 * torch.get_num_threads()
        panels = min(WIDEST_BLOCK, -(-n // panel))
        while panels > 1 and batch * -(-m // rows) * -(-n // (panels * panel)) < wanted:
            panels -= 1
        return rows, panels * panel

    def function(self, element_type: str) -> PrimFunc:
        """The kernel of :mod:`bridge.compile.cpu.gemm`."""
        return gemm_function(element_type)
