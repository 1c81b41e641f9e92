"""Backend: one object per target; the compiler asks it for kernels, machine code and matrix-product policies.

Only a :class:`Backend` knows its target; loop IR, passes, schedule and run time are target-independent. The CPU's is
:class:`bridge.compile.cpu.backend.CpuBackend`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import tvm_ffi
from tvm import relax
from tvm.ir import IRModule
from tvm.tirx import PrimFunc

from autodiff.lazy import cached_property
from bridge.compile.loop_ir.operations import PackPlan, ProductPlan
from bridge.compile.schedule.horizontal_fusion import HorizontalFusionPlan
from bridge.compile.schedule.limits import Rules
from bridge.compile.schedule.products import ColumnPlan, ProductPolicy
from bridge.compile.schedule.row_plan import RowPlan

__all__ = ["Backend", "Built"]


class Built:
    """A kernel's machine code, perhaps still being built; it is freed with the last reference to it or to its function.

    Args:
        make: waits for the function; raises the error of a failed build.
        build: the pending build of the kernel's library; ``None`` once the build is done.
        kept: the key in the disk cache once the kernel is built; ``None`` if the cache does not hold it.
    """

    def __init__(
        self, make: Callable[[], tvm_ffi.Function], build: Any = None, kept: Callable[[], str | None] = lambda: None
    ):
        self._make = make
        self.build = build
        self.kept = kept

    @cached_property
    def function(self) -> tvm_ffi.Function:
        """The function; waits for the build, and raises its error if it failed."""
        return self._make()


@dataclass(frozen=True)
class Backend(Rules):
    """One target. Frozen: backends of equal keys compile a function to the same code."""

    @property
    def of_steps(self) -> Backend:
        """This backend for loop bodies: the same bits, threads from less work on."""
        limits = self.limits
        work = min(limits.threads.parallel_work, limits.threads.parallel_steps)
        return replace(self, limits=limits.having(parallel_work=work))

    @property
    def measures_products(self) -> bool:
        """Whether the algorithm variants of a matrix product are timed at the first use of its class."""
        return False

    @property
    @abstractmethod
    def key(self) -> str:
        """Everything that code or values depend on, as text; backends of one key share programs and kernels."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of a program's tensors."""

    @abstractmethod
    def threads(self) -> int:
        """The number of threads that a kernel launched now would use."""

    @abstractmethod
    def settings(self) -> tuple[str, ...]:
        """torch's current settings that affect a program's values, in words."""

    @abstractmethod
    def products(self, threads: int, deterministic: bool) -> ProductPolicy:
        """The product policy for a number of threads; ``deterministic``: the same choices in every process."""

    @abstractmethod
    def kernel(self, plan: RowPlan | ColumnPlan | ProductPlan | PackPlan | HorizontalFusionPlan) -> PrimFunc:
        """The kernel of a plan; equal plans share one kernel.

        One product kernel serves all plans of an element type: it reads
        :data:`~bridge.compile.loop_ir.operations.FIELDS` at each launch. The limits decide on horizontal fusion.
        """

    @abstractmethod
    def build(self, functions: Sequence[tuple[str, PrimFunc]]) -> list[Built]:
        """Machine code for named functions; equal functions share one while it is in use.

        The build may run in the background: see :attr:`Built.function`.
        """

    def kept(self, keys: Mapping[str, str]) -> Mapping[str, tuple[Built, Callable[[], PrimFunc]]] | None:
        """Kernels of the disk cache: name → key becomes name → (machine code, reader of the function).

        ``None`` if the cache lacks a key, or if this backend keeps no kernels there.
        """
        return None

    @abstractmethod
    def executable(self, module: IRModule) -> relax.VMExecutable:
        """Compiles a Relax module by TVM's default pipeline → an executable that TVM's runtime runs without torch."""

    @abstractmethod
    def prepare(self, tensors: Sequence[torch.Tensor], in_loops: bool = False) -> None:
        """Starts background builds that a module of these tensors will likely need, or (``in_loops``) its loops."""

    @abstractmethod
    def executor(self, program: Any) -> Callable[..., list[torch.Tensor]]:
        """The executor of a :class:`~bridge.compile.runtime.program.Program`: ``(inputs, *, consume)`` → results."""

    def recorder(self, program: Any) -> Any:
        """The :class:`~bridge.compile.graphs.recordings.GraphRecorder` of a program, or ``None``."""
        return None

    @abstractmethod
    def launches(self, function: PrimFunc, scalars: Sequence[int]) -> tuple[str, ...]:
        """Describes the launch of a kernel with these integers (threads, blocks) in words; may be empty."""

    @abstractmethod
    def source(self, function: PrimFunc, name: str, form: str) -> str:
        """A kernel as text in ``form``: ``"tvmscript"`` or a target's own. ``ValueError`` lists the valid forms."""
