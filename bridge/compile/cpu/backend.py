"""The CPU backend: a processor → kernels and machine code for it, and its policy for matrix products.

The CPU's limits and its order of reductions: numbers measured on machines with AVX-512.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import tvm
from tvm import relax
from tvm.ir import IRModule
from tvm.target import Target
from tvm.tirx import PrimFunc

from bridge.base.log import channel
from bridge.base.torch_internals import VF
from bridge.compile.backend import Backend, Built
from bridge.compile.cpu.build import CpuLibraries, fingerprint, kernel_source
from bridge.compile.cpu.gemm import chain_function, gemm_function, packed_gemm_function, packing_function
from bridge.compile.cpu.gemm_tile import register_tile
from bridge.compile.cpu.loops import generate, generate_columns, scheduled
from bridge.compile.cpu.products import CpuProducts, Multiply, generated_types
from bridge.compile.cpu.threads import in_a_plain_thread, step_driver
from bridge.compile.loop_ir.operations import Packing, PackPlan, ProductPlan
from bridge.compile.runtime.build import build_kernels, settle
from bridge.compile.runtime.executor import Executor, bind_all
from bridge.compile.runtime.kernel_store import kept_kernels
from bridge.compile.runtime.loop_frame import RunLoop
from bridge.compile.runtime.program import Program
from bridge.compile.schedule.chain_plan import CallShape, ChainPlan, ColumnPlan, ProductShape
from bridge.compile.schedule.choices import LIMITS as OF_LIMITS
from bridge.compile.schedule.choices import ORDER as OF_ORDER
from bridge.compile.schedule.choices import Alternative
from bridge.compile.schedule.limits import Limits
from bridge.compile.schedule.order import ReductionOrder
from bridge.compile.schedule.row_plan import RowPlan
from bridge.library import FORMS, FUNCTIONS, TensorAt, invoke
from bridge.trials import seconds_of

__all__ = ["ALTERNATIVES", "LANES", "LIMITS", "ORDER", "CpuBackend", "host_backend"]

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
)

LIMITS = Limits.of(
    nodes=80,
    buffers=48,
    terms=16,
    sections=16,
    summed_sections=16,
    serial_elements=32_768,
    shared_elements=4096,
    loops=8,
    flat_row=4096,
    short_row=256,
    cheap_operations=4,
    cheap_in_known_rows=4,
    cheap_shared=0,
    parallel_work=250_000,  # ten microseconds in vectors, where a launch costs two or three
    parallel_steps=100_000,  # a step's threads are still awake
    parallel_columns=150_000,
    parallel_second_stage=32_768,
    parallel_legalized=16_384,
    transcendental_work=12,
    tasks=64,
    column_vectors=4,
    joined_sections=8,
    joined_rows=8,
    section_operators=4,
    section_elements=0,
    placed_sections=8,
    parts_apart=8,
    free_reads=4,
    access_bytes=0,
    single_elements=0,
    together=1,
    small_casts=0,
    read_again=0,
    added_rows=0,
    streams=1,
)

ALTERNATIVES = (
    Alternative(OF_LIMITS, "cheap_in_known_rows", (0, 2, 8, 16)),
    Alternative(OF_LIMITS, "tasks", (16, 32, 128, 256)),
    Alternative(OF_ORDER, "lanes", (32, 8)),
    Alternative(OF_ORDER, "interleaved", ((8, 4, 2, 1), (2, 1), (1,))),
    Alternative(OF_LIMITS, "column_vectors", (1, 2, 8)),
    Alternative(OF_LIMITS, "nodes", (16, 32, 160)),
    Alternative(OF_LIMITS, "buffers", (12, 24, 96)),
    Alternative(OF_ORDER, "most_chunks", (8, 16, 64)),
    Alternative(OF_ORDER, "chunk_elements", (4096, 65_536)),
    Alternative(OF_LIMITS, "flat_row", (1024, 2048, 16_384)),
    Alternative(OF_LIMITS, "short_row", (64, 128, 512, 1024)),
    Alternative(OF_LIMITS, "parallel_work", (60_000, 1_000_000)),
    Alternative(OF_LIMITS, "parallel_steps", (30_000, 250_000)),
    Alternative(OF_LIMITS, "parallel_columns", (40_000, 600_000)),
    Alternative(OF_LIMITS, "shared_elements", (512, 65_536)),
    Alternative(OF_LIMITS, "serial_elements", (8192, 131_072)),
    Alternative(OF_LIMITS, "terms", (8, 32)),
    Alternative(OF_LIMITS, "joined_sections", (1, 16)),
    Alternative(OF_LIMITS, "section_operators", (1, 12)),
    Alternative(OF_LIMITS, "placed_sections", (0,)),
)
"""The tunables' candidates. A vector of 32 lanes is two registers of AVX-512; 8 lanes are one of AVX2."""


#: LLVM unrolls a loop completely if the result has fewer instructions than this, then the loop around it likewise. With
#: its default, 300, a short column sum (6 chunks of rows of 48 vectors) grows to 14,000 instructions, half a second of
#: compilation, and is no faster. At 270 nearly all other kernels keep their machine code; at 220 a softmax over 128
#: columns, which gains from unrolling, is a tenth slower.
_UNROLLED_INSTRUCTIONS = 270


@functools.cache
def host_cpu() -> str:
    """LLVM's name of this processor."""
    return str(tvm.get_global_func("target.llvm_get_system_cpu")())


@functools.cache
def host_backend() -> CpuBackend:
    """The backend of this machine's processor."""
    options = [f"-unroll-threshold-aggressive:uint={_UNROLLED_INSTRUCTIONS}"]
    return CpuBackend(target=Target({"kind": "llvm", "mcpu": host_cpu(), "cl-opt": options}))


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
        chosen = [f" {each}" for each in (self.choices.products, self.choices.calls) if each]
        return f"cpu {self.target} {self.order} {self.limits}{''.join(chosen)}"

    @property
    def _code_key(self) -> str:
        """The dependencies of kernels besides their functions; backends with other limits share kernels."""
        return f"cpu {self.target} {self.order}"

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        return ALTERNATIVES

    def machine(self) -> tuple:
        return fingerprint()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def threads(self) -> int:
        return torch.get_num_threads()

    def settings(self) -> tuple[str, ...]:
        """Empty: its library calls look up their settings when they run."""
        return ()

    def products(self, threads: int, deterministic: bool) -> CpuProducts:
        built = self._multiply, self._multiply_packed
        return CpuProducts(self.target, *built, threads, deterministic, chosen=self.choices.products)

    @property
    def measures_products(self) -> bool:
        return not torch.are_deterministic_algorithms_enabled()

    def seconds_of_ways(self, product: ProductShape) -> Mapping[str, float]:
        return self.products(self.threads(), torch.are_deterministic_algorithms_enabled()).seconds_of_all(product)

    def seconds_of_forms(self, call: CallShape) -> Mapping[str, float]:
        return {} if torch.are_deterministic_algorithms_enabled() else _seconds_of_forms(call)

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

    def kernel(self, plan: RowPlan | ColumnPlan | ProductPlan | PackPlan | ChainPlan) -> PrimFunc:
        match plan:
            case ChainPlan():
                tile = register_tile(self.target)
                assert tile is not None, self.target
                return chain_function(plan, tile)
            case PackPlan():
                return self._packed(plan.element_type)[0][1]
            case ProductPlan(packing=Packing()):
                return self._packed(plan.element_type)[1][1]
            case ProductPlan():
                return self._product(plan.element_type)[1]
            case ColumnPlan():
                return generate_columns(plan)
        return generate(plan)

    def legalized(self, function: PrimFunc) -> PrimFunc:
        return scheduled(function, self.limits.threads.parallel_legalized)

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


_ROUNDING = 1e-3
"""Relative to the largest number, the maximum difference between two orders of a sum; wrong results differ by more."""


def _seconds_of_forms(call: CallShape) -> Mapping[str, float]:
    """Times the function (first) and its variants: name → seconds; leaves out variants that fail or differ."""
    settle()
    return in_a_plain_thread(lambda: seconds_of(_runs(call)))


def _runs(call: CallShape) -> dict[str, Callable[[], list[torch.Tensor]]]:
    tensors = list(map(_tensor, call.operands))
    arguments = [TensorAt(int(each[1:])) if isinstance(each, str) else each for each in call.arguments]
    names = [name for name in (call.name, *FORMS[call.name]) if name in FUNCTIONS]
    runs = {name: partial(invoke, FUNCTIONS[name], arguments, tensors) for name in names}
    wanted = runs[call.name]()
    return {name: run for name, run in runs.items() if name == call.name or _is_same(name, run, wanted)}


def _tensor(operand: tuple[str, tuple[int, ...], tuple[int, ...]]) -> torch.Tensor:
    """Random numbers in the operand's memory layout."""
    name, extents, strides = operand
    tensor = VF.empty_strided(extents, strides, dtype=getattr(torch, name))
    generator = torch.Generator().manual_seed(0)
    return tensor.copy_(VF.randn(extents, generator=generator))


def _is_same(name: str, run: Callable[[], list[torch.Tensor]], wanted: list[torch.Tensor]) -> bool:
    try:
        found = run()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        _LOG.debug("%s is no form of a call: %s", name, error)
        return False
    pairs = list(zip(found, wanted, strict=True))
    alike = all(mine.shape == its.shape and mine.dtype == its.dtype for mine, its in pairs)
    return alike and all((mine - its).abs().max() <= _ROUNDING * its.abs().max() for mine, its in pairs)
