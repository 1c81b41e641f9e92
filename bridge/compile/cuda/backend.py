"""The CUDA backend: a GPU → kernels and machine code for it; matrix products are torch's.

Kernels: a plan → a PrimFunc, which reads the launch's integers on the host and contains one or more launches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from tvm import relax
from tvm.ir import IRModule
from tvm.tirx import PrimFunc

from bridge.base.torch_cuda import SETTINGS, products_are_tf32
from bridge.compile.backend import Backend, Built
from bridge.compile.codegen.tir import LaunchArguments, loop_function, sequence
from bridge.compile.cuda.build import (
    CudaLibraries,
    build_executable,
    clear_unused,
    hold,
    kernel_source,
    launch_shapes,
)
from bridge.compile.cuda.columns import ColumnLaunches
from bridge.compile.cuda.elements import PoolLaunch, elements, lookup
from bridge.compile.cuda.emitter import storage_type
from bridge.compile.cuda.executor import CudaExecutor
from bridge.compile.cuda.limits import FLOAT64_ARCHITECTURES, LIMITS, ORDER
from bridge.compile.cuda.nvrtc import version, warm_up
from bridge.compile.cuda.products import CudaProducts
from bridge.compile.cuda.recorder import CudaRecorder
from bridge.compile.cuda.row import rows
from bridge.compile.cuda.scatter import scatter, sorts
from bridge.compile.loop_ir.operations import LookupPlan, PoolPlan, ProductPlan, ScatterPlan
from bridge.compile.runtime.allocations import with_allocations
from bridge.compile.runtime.build import build_kernels, in_background
from bridge.compile.runtime.kernel_store import kept_kernels
from bridge.compile.runtime.program import Program
from bridge.compile.schedule.horizontal_fusion import HorizontalFusionPlan
from bridge.compile.schedule.limits import Limits
from bridge.compile.schedule.order import ReductionOrder
from bridge.compile.schedule.products import ColumnPlan
from bridge.compile.schedule.row_plan import KernelBuffers, RowPlan

__all__ = ["CudaBackend", "architecture", "generate"]


_LARGE = 4 << 20
"""Bytes of an intermediate that a launched program allocates at each run: for as many bytes, a kernel takes the device
longer than the allocation takes the host."""


def generate(plan: RowPlan | ColumnPlan | HorizontalFusionPlan, plain: bool = False) -> PrimFunc:
    """The kernel of a plan; parameters: inputs, results, scratch memory, the launch's integers.

    ``plain``: without CUDA's own features, for the same bits on other devices.
    """
    if isinstance(plan, ColumnPlan):
        return ColumnLaunches(plan).build()
    if isinstance(plan, HorizontalFusionPlan):
        return _generate_fused(plan)
    number, buffers = LaunchArguments(plan.arguments, plan.index_type), KernelBuffers.of(plan, storage_type)
    reduces = any(node.reduces for node in plan.nodes)
    launches = rows(plan, buffers, number, plain) if reduces else elements([(plan, buffers, number)])
    tensors = (*buffers.inputs, *buffers.outputs.values(), *buffers.scratch)
    return loop_function([*tensors, *number.params], sequence([*number.stmts, *launches]))


def _generate_fused(plan: HorizontalFusionPlan) -> PrimFunc:
    number = LaunchArguments(plan.arguments, plan.index_type)
    parts, first = [], 0
    for index, each in enumerate(plan.plans):
        parts.append((each, KernelBuffers.of(each, storage_type, f"_{index}"), number.part(first, each.arguments)))
        first += each.arguments
    inputs = [buffer for _, buffers, _ in parts for buffer in buffers.inputs]
    outputs = [buffer for _, buffers, _ in parts for buffer in buffers.outputs.values()]
    launches = elements(parts)
    return loop_function([*inputs, *outputs, *number.params], sequence([*number.stmts, *launches]))


def architecture(index: int) -> str:
    """A GPU's architecture as NVRTC's name, as in ``"sm_90"``."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


@cache
def _begin_to_load(arch: str) -> None:
    in_background(partial(warm_up, arch))


@dataclass(frozen=True)
class CudaBackend(Backend):
    """Kernels by NVRTC on torch's current stream.

    Attributes:
        index: of the device.
        arch: its architecture, as in ``"sm_90"``; any machine can compile kernels for it.
    """

    order: ReductionOrder = ORDER
    limits: Limits = LIMITS
    index: int = 0
    arch: str = field(kw_only=True)

    @property
    def key(self) -> str:
        return f"cuda:{self.index} {self._code_key}"

    @property
    def _code_key(self) -> str:
        """The dependencies of kernels besides their functions; devices of one architecture share kernels."""
        return f"{self.arch} nvrtc {version()} {self.order} {self.limits}"

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)

    def threads(self) -> int:
        """One: for the host's part of a launch."""
        return 1

    def settings(self) -> tuple[str, ...]:
        return tuple(f"{name}: {read()}" for name, read in SETTINGS.items())

    def products(self, threads: int, deterministic: bool) -> CudaProducts:
        return CudaProducts(products_are_tf32())

    def executable(self, module: IRModule) -> relax.VMExecutable:
        return build_executable(module, self.arch)

    def prepare(self, tensors: Sequence[torch.Tensor], in_loops: bool = False) -> None:
        """Starts loading NVRTC; kernels are compiled only once there are plans."""
        _begin_to_load(self.arch)

    def kernel(self, plan: RowPlan | ColumnPlan | ProductPlan | HorizontalFusionPlan) -> PrimFunc:
        match plan:
            case RowPlan() | ColumnPlan() | HorizontalFusionPlan():
                return generate(plan)
        raise NotImplementedError(f"products on CUDA are torch's, not generated: {plan}")

    @property
    def adds_float64(self) -> bool:
        return self.arch in FLOAT64_ARCHITECTURES

    def pool_gradient(self, plan: PoolPlan) -> PrimFunc:
        return PoolLaunch(plan).build()

    def lookup(self, plan: LookupPlan) -> PrimFunc:
        return lookup(plan)

    def scatter_sum(self, plan: ScatterPlan, length: int) -> PrimFunc | None:
        return scatter(plan, length)

    def sorts_before(self, plan: ScatterPlan, length: int) -> bool:
        return sorts(plan, length)

    def build(self, functions: Sequence[tuple[str, PrimFunc]]) -> list[Built]:
        kernels = build_kernels(functions, self._code_key, CudaLibraries(self.arch))
        hold(kernels)
        return kernels

    def kept(self, keys: Mapping[str, str]) -> Mapping[str, tuple[Built, Callable[[], PrimFunc]]] | None:
        clear_unused()
        kernels = kept_kernels(keys, CudaLibraries(self.arch))
        if kernels is not None:
            hold(built for built, _ in kernels.values())
        return kernels

    def executor(self, program: Program) -> Callable[..., list[torch.Tensor]]:
        return CudaExecutor(with_allocations(program, _LARGE), self.device)

    def recorder(self, program: Program) -> CudaRecorder:
        return CudaRecorder(program, self.device)

    def launches(self, function: PrimFunc, scalars: Sequence[int]) -> tuple[str, ...]:
        return launch_shapes(function, scalars)

    def source(self, function: PrimFunc, name: str, form: str) -> str:
        return kernel_source(function, name, self.arch, form)
