"""Instructions of a program but for loops: frozen data for people and for the executor.

An instruction works on *registers*, by slot: it reads the tensors in some slots and writes into, or fills, others.
``inputs`` and ``outputs`` are the names of those tensors, for people.

The integers of a program for any sizes may be symbolic; only instructions of numbers are bound and run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from autodiff.extents import Dim
from bridge.compile.runtime.contents import StepContents

__all__ = ["CallLibrary", "Launch", "MakeView", "roots_of"]


@dataclass(frozen=True)
class Launch:
    """A generated kernel: ``name(reads…, writes…)``; ``ops`` are the operators it fuses, in order.

    ``writes`` are the slots of the outputs, then of scratch memory. ``scalars``, if there are any, reach the kernel as
    an array of int64, its last argument. With ``offsets`` it takes addresses, that many bytes behind each tensor's own.
    ``once``: what it makes lasts, so that a loop, all of whose steps read the same, launches it before the first one.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    ops: tuple[str, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    scalars: tuple[Dim, ...] = ()
    offsets: tuple[Dim, ...] | None = None
    contents: StepContents = field(default=StepContents(), repr=False)
    once: bool = False

    def __str__(self) -> str:
        return f"{', '.join(self.outputs)} = kernel {self.name}({', '.join(self.inputs)})  # {' '.join(self.ops)}"


@dataclass(frozen=True)
class CallLibrary:
    """A kernel of torch by its name in :mod:`bridge.library`.

    One of ``OUT_KERNELS`` writes into the tensors of ``writes``; if ``allocates``, one of ``FUNCTIONS`` returns tensors
    of its own, which fill those slots. ``attrs``: plain data, see :class:`bridge.compile.loop_ir.graph.LibraryCall`.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    attrs: tuple = ()
    allocates: bool = False
    contents: StepContents = field(default=StepContents(), repr=False)

    def __str__(self) -> str:
        arguments = "; ".join(", ".join(map(str, part)) for part in (self.inputs, self.attrs) if part)
        return f"{', '.join(self.outputs)} = library {self.name}({arguments})"


@dataclass(frozen=True)
class MakeView:
    """A strided view: ``torch.as_strided`` of the dense tensor in ``reads[0]`` fills ``writes[0]``. No data moves."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    offset: Dim

    def __str__(self) -> str:
        geometry = f"{self.shape}, {self.strides}, {self.offset}"
        return f"{self.outputs[0]} = view {self.name}({self.inputs[0]}, {geometry})"


def roots_of(views: Iterable[MakeView]) -> dict[int, int]:
    """Of each view's slot, that of the tensor whose memory it is; a view of a view comes after that one."""
    roots: dict[int, int] = {}
    for view in views:
        (base,), (slot,) = view.reads, view.writes
        roots[slot] = roots.get(base, base)
    return roots
