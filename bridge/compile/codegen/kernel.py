"""A generated kernel: a PrimFunc in destination-passing style and the values its arguments stand for."""

from __future__ import annotations

from dataclasses import dataclass, field

from tvm.tirx import PrimFunc

from autodiff.extents import Dim
from bridge.compile.loop_ir.graph import Value

__all__ = ["Finish", "Kernel"]


@dataclass(frozen=True)
class Finish:
    """A second launch: ``func(parts…, outputs…, descriptor)``, ``parts`` of the kernel's scratch memory."""

    func: PrimFunc = field(repr=False)
    parts: tuple[Value, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True)
class Kernel:
    """``func(inputs…, outputs…, scratch…, descriptor)``; ``ops`` are the operators it computes, in order.

    The descriptor, a pointer, is there only if ``scalars`` is not empty: those integers, as int64, of a launch.
    What ``finish`` computes is not among the outputs.
    """

    func: PrimFunc = field(repr=False)
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    scratch: tuple[Value, ...] = ()
    ops: tuple[str, ...] = ()
    scalars: tuple[Dim, ...] = ()
    finish: Finish | None = None
