"""Peers of the GPU benchmarks: a module and a batch → a training step of ours, of eager, of torch.compile.

``ours`` is the default: recorded as CUDA graphs where that pays. ``recorded`` is ours with ``cuda_graphs=True``,
``launched`` with ``False``, kernel by kernel; ``graph`` is eager's whole step in a CUDA graph; the others are modes of
``torch.compile``. Every peer trains a module of its own, made from the same seed, on tensors of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.gpu_clock import Step
from bridge import add_tvm_dispatch

COMPILED = {"default": None, "reduce-overhead": "reduce-overhead", "max-autotune": "max-autotune"}
"""``torch.compile`` by mode."""
OURS: dict[str, bool | Literal["auto"]] = {"ours": "auto", "recorded": True, "launched": False}
"""Our peers, by ``cuda_graphs=``."""
PEERS = ("eager", "graph", "recorded", "launched", *COMPILED)
"""All peers but ``ours``."""
_SETTLED = 40
"""Steps until graphs have been tested for profit and recorded."""


@dataclass(frozen=True)
class Precision:
    """The dtype of a run's numbers, and the settings around its steps."""

    dtype: torch.dtype = torch.float32
    tf32: bool = False
    autocast: torch.dtype | None = None

    @contextlib.contextmanager
    def switched(self) -> Iterator[None]:
        """While active, the settings except autocast."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)

    def casting(self, device: str) -> torch.autocast:
        """Autocast, or a disabled one."""
        return torch.autocast(device, self.autocast, enabled=self.autocast is not None)


PRECISIONS = {
    "fp32": Precision(),
    "tf32": Precision(tf32=True),
    "amp": Precision(autocast=torch.bfloat16),
    "amp16": Precision(autocast=torch.float16),
    "bf16": Precision(torch.bfloat16),
    "fp16": Precision(torch.float16),
}


@dataclass(frozen=True)
class Batch:
    """Arguments of a call; tensors that require grad get one."""

    args: tuple[Tensor, ...] = ()
    kwargs: dict[str, Tensor] = field(default_factory=dict)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors."""
        return [*self.args, *self.kwargs.values()]

    def copied(self, device: torch.device, dtype: torch.dtype, memory_format: torch.memory_format) -> Batch:
        """New leaves on a device; floating-point numbers as ``dtype``, images in the memory format."""

        def copied(tensor: Tensor) -> Tensor:
            found = tensor.detach().to(device, dtype if tensor.is_floating_point() else None, copy=True)
            found = found.contiguous(memory_format=memory_format) if found.ndim == 4 else found
            return found.requires_grad_(tensor.requires_grad)

        return Batch(tuple(map(copied, self.args)), {name: copied(each) for name, each in self.kwargs.items()})


class Peer:
    """A module that trains on one batch, from its loss or with one cotangent of its first output.

    Attributes:
        leaves: tensors that get a gradient.
        grad: the cotangent, made in the first step; ``None``: the result is a loss.
        result: of the latest step, detached.
    """

    def __init__(
        self, module: nn.Module, batch: Batch, precision: Precision, optimizer: torch.optim.Optimizer | None = None
    ):
        self.module, self.batch, self.precision, self.optimizer = module, batch, precision, optimizer
        self.leaves = [*(each for each in batch.tensors if each.requires_grad), *module.parameters()]
        self.grad: Tensor | None = None
        self.result: Tensor | None = None
        self._device = self.leaves[-1].device.type

    def _forward(self) -> Tensor:
        with self.precision.casting(self._device):  # for one forward: autocast casts weights once per step
            y = self.module(*self.batch.args, **self.batch.kwargs)
        return y if isinstance(y, Tensor) else y[0]  # a model's loss comes first

    def step(self) -> None:
        """Forward, backward, optimizer; gradients are new at each step, as after ``optimizer.zero_grad()``."""
        for leaf in self.leaves:
            leaf.grad = None
        self.result = None  # memory of a recorded graph
        y = self._forward()
        if y.ndim and self.grad is None:
            self.grad = torch.randn_like(y)
        y.backward(self.grad)
        self.result = y.detach()
        if self.optimizer is not None:
            self.optimizer.step()

    def graphed(self) -> Step:
        """The step's replay as one CUDA graph; its gradients stay in place."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        # cuBLAS's workspace must be in this graph's own memory: reduce-overhead frees that of earlier graphs
        torch._C._cuda_clearCublasWorkspaces()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()

        def replay(_read: Peer = self) -> None:  # keeps the memory that the graph reads
            graph.replay()

        return replay


def prepared(
    name: str,
    make: Callable[[], nn.Module],
    batch: Batch,
    precision: Precision,
    device: torch.device,
    memory_format: torch.memory_format = torch.contiguous_format,
    optimizes: bool = False,
    whole: bool | None = None,
) -> Peer:
    """A peer before its first step.

    Args:
        name: ``ours`` or one of :data:`PEERS`.
        optimizes: whether a step ends with that of a fused AdamW.
        whole: whether ours is the module as a whole, or its parts; ``None``: a module that draws decide is in parts.
    """
    torch.manual_seed(0)
    module = make().to(device, precision.dtype, memory_format=memory_format).train()
    batch = batch.copied(device, precision.dtype, memory_format)
    optimizer = None
    if optimizes:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True, capturable=name == "graph")
    if name in OURS:
        with precision.casting(device.type):
            add_tvm_dispatch(module, batch.args, sample_kwargs=batch.kwargs, cuda_graphs=OURS[name], whole=whole)
    elif name in COMPILED:
        module = torch.compile(module, mode=COMPILED[name])
    return Peer(module, batch, precision, optimizer)


def peer(name: str, *arguments: Any, **options: Any) -> tuple[Step, nn.Module]:
    """A peer's step after its first run, and its module; takes the arguments of :func:`prepared`."""
    made = prepared(name, *arguments, **options)
    run: Step = made.graphed() if name == "graph" else made.step
    run()
    return run, made.module


def settle(runs: Mapping[str, Step]) -> None:
    """Runs peers' steps until ours have tested graphs for profit and recorded them; the GPU keeps up.

    Peers take turns, as in the measurement: their allocations move each other's addresses, and addresses that do not
    repeat are detected as well.
    """
    if OURS.keys() & runs.keys():
        for _ in range(_SETTLED):
            for run in runs.values():
                run()
                torch.cuda.synchronize()
