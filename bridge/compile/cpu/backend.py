"""The CPU backend: a processor → kernels and machine code for it, and its policy for matrix products.

The CPU's limits and its order of reductions: numbers measured on machines with AVX-512.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import tvm
from tvm import relax
from tvm.ir import IRModule
from tvm.target import Target
from tvm.tirx import PrimFunc

from bridge.base.log import channel
from bridge.compile.backend import Backend, Built
from bridge.compile.cpu.build import CpuLibraries, kernel_source
from bridge.compile.cpu.gemm import gemm_function, packed_gemm_function, packing_function
from bridge.compile.cpu.gemm_tile import register_tile
from bridge.compile.cpu.loops import ColumnLoops, RowLoops
from bridge.compile.cpu.products import CpuProducts, Multiply, generated_types
from bridge.compile.cpu.threads import step_driver
from bridge.compile.loop_ir.operations import Packing, PackPlan, ProductPlan
from bridge.compile.runtime.build import build_kernels
from bridge.compile.runtime.executor import Executor, bind_all
from bridge.compile.runtime.kernel_store import kept_kernels
from bridge.compile.runtime.loop_frame import RunLoop
from bridge.compile.runtime.program import Program
from bridge.compile.schedule.limits import Limits
from bridge.compile.schedule.order import ReductionOrder
from bridge.compile.schedule.products import ColumnPlan
from bridge.compile.schedule.row_plan import RowPlan

__all__ = ["LANES", "LIMITS", "ORDER", "CpuBackend", "host_backend"]

_LOG = channel("compile")

LANES = 16
"""Vector width of every generated loop, for all element types and processors: 16 float32 fill one AVX-512 register. It
is fixed because the order of a reduction, hence the result, follows from it."""

ORDER = ReductionOrder(
    lanes=LANES,
    interleaved=(4, 2, 1),
    chunk_elements=16_384,  # microseconds of work, so that starting threads pays
    chunk_rows=8,
    most_chunks=32,  # enough for the threads of one socket
    split=8192,
    block_rows=64,  # a block costs as much as a row and a half
    block_turns=64,  # a block costs as much as two turns
)

LIMITS = Limits.of(
    summed_sections=16,
    cheap_in_known_rows=4,
    parallel_work=250_000,  # ten microseconds in vectors, where a launch costs two or three
    parallel_steps=100_000,  # a step's threads are still awake
    parallel_columns=150_000,
    parallel_second_stage=32_768,
    tasks=64,
    column_vectors=4,
)


@functools.cache
def host_cpu() -> str:
    """LLVM's name of this processor."""
    return str(tvm.get_global_func("target.llvm_get_system_cpu")())


@functools.cache
def host_backend() -> CpuBackend:
    """The backend of this machine's processor."""
    return CpuBackend(target=Target({"kind": "llvm", "mcpu": host_cpu()}))


@dataclass(frozen=True)
class CpuBackend(Backend):
    """Kernels by LLVM on torch's threads, in their number at each call: :mod:`bridge.compile.cpu.threads`.

    Attributes:
        target: of kind ``llvm``; no fast-math flag: values must not depend on fusion.
    """

    order: ReductionOrder = ORDER
    limits: Limits = LIMITS
    target: Target = field(kw_only=True)

    @property
    def key(self) -> str:
        return f"cpu {self.target} {self.order} {self.limits}"

    @property
    def _code_key(self) -> str:
        """The dependencies of kernels besides their functions; backends with other limits share kernels."""
        return f"cpu {self.target} {self.order}"

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def threads(self) -> int:
        return torch.get_num_threads()

    def settings(self) -> tuple[str, ...]:
        """Empty: its library calls look up their settings when they run."""
        return ()

    def products(self, threads: int, deterministic: bool) -> CpuProducts:
        return CpuProducts(self.target, self._multiply, self._multiply_packed, threads, deterministic)

    @property
    def measures_products(self) -> bool:
        return not torch.are_deterministic_algorithms_enabled()

    def _multiply(self, element_type: str) -> Multiply:
        (built,) = self.build([self._product(element_type)])
        return built.function

    def _product(self, element_type: str) -> tuple[str, PrimFunc]:
        """Name and function of an element type's matrix products; the target must have a register tile."""
        tile = register_tile(self.target)
        assert tile is not None, self.target
        return f"product_{element_type}", gemm_function(element_type, tile)

    def _packed(self, element_type: str) -> list[tuple[str, PrimFunc]]:
        """Names and functions that pack a matrix, and multiply by a packed one."""
        tile = register_tile(self.target)
        assert tile is not None, self.target
        makers = {"pack": packing_function, "packed_product": packed_gemm_function}
        return [(f"{name}_{element_type}", make(element_type, tile)) for name, make in makers.items()]

    def _multiply_packed(self, element_type: str) -> tuple[Multiply, Multiply]:
        pack, multiply = self.build(self._packed(element_type))
        return pack.function, multiply.function

    def executable(self, module: IRModule) -> relax.VMExecutable:
        """Code for any processor of this architecture."""
        return tvm.compile(module, Target("llvm"))

    def prepare(self, tensors: Sequence[torch.Tensor], in_loops: bool = False) -> None:
        """Starts building the kernels of matrix products if there is more than one thread."""
        if torch.get_num_threads() > 1 and not torch.are_deterministic_algorithms_enabled():
            for name in generated_types(self.target, tensors):
                self.build(self._packed(name) if in_loops else [self._product(name)])

    def kernel(self, plan: RowPlan | ColumnPlan | ProductPlan | PackPlan) -> PrimFunc:
        match plan:
            case PackPlan():
                return self._packed(plan.element_type)[0][1]
            case ProductPlan(packing=Packing()):
                return self._packed(plan.element_type)[1][1]
            case ProductPlan():
                return self._product(plan.element_type)[1]
            case ColumnPlan():
                return ColumnLoops(plan).build()
        return RowLoops(plan).build()

    def build(self, functions: Sequence[tuple[str, PrimFunc]]) -> list[Built]:
        return build_kernels(functions, self._code_key, CpuLibraries(self.target))

    def kept(self, keys: Mapping[str, str]) -> Mapping[str, tuple[Built, Callable[[], PrimFunc]]] | None:
        return kept_kernels(keys, CpuLibraries(self.target))

    def executor(self, program: Program) -> Executor:
        # torch's thread setting reaches a new thread's OpenMP at torch's first use there.
        has_loops = any(isinstance(step, RunLoop) for step in program.steps)  # else LLVM need not build the driver
        actions = bind_all(program, step_driver() if has_loops else None)
        return Executor(program, self.device, prepare=torch.get_num_threads, actions=actions)

    def launches(self, function: PrimFunc, scalars: Sequence[int]) -> tuple[str, ...]:
        return ()

    def source(self, function: PrimFunc, name: str, form: str) -> str:
        return kernel_source(function, name, self.target, form)
