"""Backend: a target as one object, which the compiler asks for kernels, machine code and choices of matrix products.

Everything that differs between targets is asked of a :class:`Backend`; loop IR, passes, schedule and run time know no
target. The CPU's is :class:`bridge.compile.cpu.backend.CpuBackend`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import tvm_ffi
from tvm import relax
from tvm.ir import IRModule
from tvm.tirx import PrimFunc

from autodiff.lazy import cached_property
from bridge.compile.loop_ir.operations import LookupPlan, PackPlan, PoolPlan, ProductPlan, ScatterPlan
from bridge.compile.schedule.chain_plan import CallShape, ChainPlan, ColumnPlan, ProductPolicy, ProductShape
from bridge.compile.schedule.choices import NO_CHOICES, Alternative, Choices
from bridge.compile.schedule.horizontal_fusion import HorizontalFusionPlan
from bridge.compile.schedule.limits import Limits
from bridge.compile.schedule.order import ReductionOrder
from bridge.compile.schedule.row_plan import RowPlan

__all__ = ["Backend", "Built"]


class Built:
    """A kernel's machine code, maybe still in the making: it is freed when nobody holds this object or the function.

    Args:
        make: waits for the function, and raises what went wrong.
        build: the making of the library that it is in, ``None`` where that is over.
        kept: its key in the disk cache, once it is made; ``None``: it is in none.
    """

    def __init__(
        self, make: Callable[[], tvm_ffi.Function], build: Any = None, kept: Callable[[], str | None] = lambda: None
    ):
        self._make = make
        self.build = build
        self.kept = kept

    @cached_property
    def function(self) -> tvm_ffi.Function:
        """The function; waits until it is built, and raises what went wrong."""
        return self._make()


@dataclass(frozen=True)
class Backend(ABC):
    """One target; the :class:`~bridge.compile.schedule.limits.Rules` of passes and schedule.

    Frozen: what is compiled for backends of equal keys is the same.

    Attributes:
        choices: in what it differs from the default one of its target; see :meth:`choosing`.
    """

    order: ReductionOrder
    limits: Limits
    choices: Choices = field(default=NO_CHOICES, kw_only=True)

    def choosing(self, choices: Choices) -> Backend:
        """This backend, of no choices so far, with these. ``ValueError``: it has some, or a value is none."""
        if self.choices and choices != self.choices:
            raise ValueError(f"wanted a backend without choices, got one of {self.choices}")
        if not choices or choices == self.choices:
            return self
        limits, order = self.limits.having(**dict(choices.limits)), replace(self.order, **dict(choices.order))
        return replace(self, limits=limits, order=order, choices=choices)

    @property
    def of_steps(self) -> Backend:
        """This backend for the steps of loops: the same bits, of kernels that are started in threads earlier, and one
        after another."""
        limits = self.limits
        work = min(limits.threads.parallel_work, limits.threads.parallel_steps)
        return replace(self, limits=limits.having(parallel_work=work, streams=1))

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """Numbers that are worth a try with other values, the most promising first."""
        return ()

    @property
    def measures_products(self) -> bool:
        """Whether the ways of matrix products are measured when they are first met."""
        return False

    def seconds_of_ways(self, product: ProductShape) -> Mapping[str, float]:
        """Ways that may compute a product of a class, those that are not tried at first use included, measured now; few
        where it is clear that others are slower, none where nothing is to be chosen."""
        return {}

    def seconds_of_forms(self, call: CallShape) -> Mapping[str, float]:
        """The function of a library's call, first, and the forms that give its results, measured now; none where
        nothing is to be chosen."""
        return {}

    @abstractmethod
    def machine(self) -> tuple:
        """What measured times depend on beside the key, as plain data: this machine."""

    @property
    @abstractmethod
    def key(self) -> str:
        """Everything that code or values depend on, as text; backends of one key share programs and kernels."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the tensors of a program live."""

    @abstractmethod
    def threads(self) -> int:
        """How many threads a kernel would run on if it were launched now."""

    @abstractmethod
    def settings(self) -> tuple[str, ...]:
        """Settings of torch that what a program computes depends on, as they are now, in words."""

    @abstractmethod
    def products(self, threads: int, deterministic: bool) -> ProductPolicy:
        """Choices for matrix products on a number of threads; ``deterministic``: the same in every process."""

    @abstractmethod
    def kernel(
        self, plan: RowPlan | ColumnPlan | ProductPlan | PackPlan | HorizontalFusionPlan | ChainPlan
    ) -> PrimFunc:
        """The kernel of a plan. It follows from the plan alone: equal plans share one.

        A product's is one for all plans of an element type: it reads
        :data:`~bridge.compile.loop_ir.operations.FIELDS` at each launch. Plans are launched together only where the
        backend's limits ask for it.
        """

    def apart(self, plan: RowPlan | ColumnPlan | HorizontalFusionPlan | ChainPlan) -> tuple[PrimFunc, PrimFunc] | None:
        """A plan's kernel as two that are launched apart, as others may wait for the first alone: one that leaves sums
        of columns in parts, and what adds these; ``None``: it is one.

        The first takes inputs, results but for the columns', scratch memory; the second parts, results.
        """
        return None

    @abstractmethod
    def legalized(self, function: PrimFunc) -> PrimFunc:
        """See :class:`~bridge.compile.schedule.limits.Rules`."""

    @property
    def adds_float64(self) -> bool:
        """See :class:`~bridge.compile.schedule.limits.Rules`."""
        return False

    def pool_gradient(self, plan: PoolPlan) -> PrimFunc | None:
        """See :class:`~bridge.compile.schedule.limits.Rules`: by default, the library's is the only one."""
        return None

    def lookup(self, plan: LookupPlan) -> PrimFunc | None:
        """Likewise."""
        return None

    def scatter_sum(self, plan: ScatterPlan, length: int) -> PrimFunc | None:
        """Likewise."""
        return None

    def sorts_before(self, plan: ScatterPlan, length: int) -> bool:
        """See :class:`~bridge.compile.schedule.limits.Rules`."""
        return False

    @abstractmethod
    def build(self, functions: Sequence[tuple[str, PrimFunc]]) -> list[Built]:
        """Machine code for functions given with names; equal functions share it while somebody holds it.

        It may be made in the background: see :attr:`Built.function`.
        """

    def kept(self, keys: Mapping[str, str]) -> Mapping[str, tuple[Built, Callable[[], PrimFunc]]] | None:
        """Kernels of the disk cache, by name, from their keys there: machine code, and what reads the function.

        ``None`` where one of them is not there any more, or where this backend keeps none.
        """
        return None

    @abstractmethod
    def executable(self, module: IRModule) -> relax.VMExecutable:
        """A Relax module → code of TVM's default pipeline for this target, which TVM's runtime runs without torch."""

    @abstractmethod
    def prepare(self, tensors: Sequence[torch.Tensor], in_loops: bool = False) -> None:
        """Begins, in the background, what compiling a module of such tensors will most likely need; ``in_loops``: what
        its loops will."""

    @abstractmethod
    def executor(self, program: Any) -> Callable[..., list[torch.Tensor]]:
        """What runs a :class:`~bridge.compile.runtime.program.Program`: ``(inputs, *, consume)`` → results."""

    def recorder(self, program: Any) -> Any:
        """The :class:`~bridge.compile.graphs.recordings.GraphRecorder` of a program's launches as one, or ``None``."""
        return None

    @abstractmethod
    def launches(self, function: PrimFunc, scalars: Sequence[int]) -> tuple[str, ...]:
        """What a launch of a kernel with these integers runs on, in words; nothing where there is nothing to say."""

    @abstractmethod
    def source(self, function: PrimFunc, name: str, form: str) -> str:
        """A kernel as text: ``"tvmscript"``, or a form of the target's. ``ValueError`` names the forms there are."""
