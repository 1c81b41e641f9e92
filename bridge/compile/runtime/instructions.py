"""Instructions of a program except loops: frozen data for display and for the executor.

An instruction works on *registers*, by slot: it reads the tensors in some slots and writes into, or fills, others.
``inputs`` and ``outputs`` are these tensors' names, for display. The integers of a program for any sizes may be
symbolic; only instructions with numbers are bound and run.

Step contents, for display only: nodes → operations by name, with operands, results and cost.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from autodiff.extents import Dim, same, same_shape, sample_of
from autodiff.ir import itemsize
from bridge.compile.loop_ir.graph import LibraryCall, Node, Operand, Pointwise, Product, Reduction, Scalar, Value
from bridge.compile.loop_ir.views import is_dense, merged

__all__ = ["Allocate", "CallLibrary", "Launch", "MakeView", "Operation", "StepContents", "contents"]

_PRODUCTS = ("mm", "mm_lt", "mm_biased", "bmm", "addmm", "baddbmm")


@dataclass(frozen=True)
class Operation:
    """``result: dtype shape = op(operands)``.

    Operands that are not results of the same step have the names of the step's inputs; numbers are written out. A mark
    after a name shows its access: ``~`` broadcast, ``^`` permuted, ``/`` in part. ``binding``: the variable of the
    Relax function that the operation was made for.
    """

    op: str
    operands: tuple[str, ...]
    result: str
    shape: tuple[Dim, ...]
    dtype: str
    binding: str

    def __str__(self) -> str:
        extents = ", ".join(map(str, self.shape))
        return f"{self.result}: {self.dtype}[{extents}] = {self.op}({', '.join(self.operands)})"


@dataclass(frozen=True)
class StepContents:
    """The operations of a step and their cost.

    Attributes:
        operations: in order.
        reads: names of the tensors it reads (parameters of the program or results of other steps), without views.
        flops: arithmetic operations for the sample; a transcendental function counts as one. 0 if unknown (library
            calls other than products).
        bytes: read and written for the sample, each tensor once.
        plan: of a generated matrix product; empty for other steps.
    """

    operations: tuple[Operation, ...] = ()
    reads: tuple[str, ...] = ()
    flops: int = 0
    bytes: int = 0
    plan: str = ""

    @property
    def bindings(self) -> tuple[str, ...]:
        """The Relax variables that the step computes, each once."""
        return tuple(dict.fromkeys(operation.binding for operation in self.operations))


def contents(nodes: Sequence[Node], stored: Sequence[Value], name_of: Callable[[Value], str]) -> StepContents:
    """The contents of a step from its nodes.

    Args:
        stored: the results that later steps read.
        name_of: the name of a value that the step reads or stores.
    """
    leaving = set(stored)
    names: dict[Value, str] = {}
    used: Counter[str] = Counter()

    def name(value: Value) -> str:
        if value not in names:
            inside = value in made and value not in leaving
            names[value] = _inner(value.name, used) if inside else name_of(value)
        return names[value]

    made = {out for node in nodes for out in node.outs}
    operations = []
    read: dict[Value, int] = {}
    for node in nodes:
        operands = []
        for operand in node.operands:
            operands.append(_text(operand, name))
            if isinstance(operand, Operand) and operand.value not in made:
                touched = _touched(operand)
                read[operand.value] = min(sample_of(operand.value.nbytes), read.get(operand.value, 0) + touched)
        op = node.name if isinstance(node, LibraryCall) else "matmul" if isinstance(node, Product) else node.op
        for out in node.outs:
            operations.append(Operation(op, tuple(operands), name(out), out.shape, out.dtype, out.name))
    moved = sum(read.values()) + sum(sample_of(value.nbytes) for value in leaving)
    flops = sum(sample_of(_flops(node)) for node in nodes)
    plan = ", ".join(str(node.plan) for node in nodes if isinstance(node, Product))
    return StepContents(tuple(operations), tuple(name(value) for value in read), flops, moved, plan)


def _inner(name: str, used: Counter[str]) -> str:
    used[name] += 1
    return f"{name}'{used[name]}"


def _touched(operand: Operand) -> int:
    """Bytes of a tensor that a view of it reads."""
    elements = math.prod(sample_of(extent) for extent, stride in merged(operand.view) if sample_of(stride))
    return min(sample_of(operand.value.nbytes), elements * itemsize(operand.dtype))


def _text(operand: Operand | Scalar, name: Callable[[Value], str]) -> str:
    if isinstance(operand, Scalar):
        return f"{operand.number:.6g}" if isinstance(operand.number, float) else str(operand.number)
    view, value = operand.view, operand.value
    if any(same(stride, 0) for stride in view.strides) and not same_shape(view.shape, value.shape):
        return f"{name(value)}~"
    if sample_of(view.numel) < sample_of(value.numel):
        return f"{name(value)}/"
    return name(value) if is_dense(view) else f"{name(value)}^"


def _flops(node: Node) -> Dim:
    if isinstance(node, Pointwise):
        return 0 if node.op in ("copy", "astype", "pad") else node.out.numel
    if isinstance(node, Reduction):
        return node.operand.view.numel
    if isinstance(node, Product):
        return 2 * node.out.numel * node.operands[0].shape[-1]
    if isinstance(node, LibraryCall) and node.name in _PRODUCTS:
        return 2 * node.outs[0].numel * node.operands[-1].shape[-2]
    return 0


@dataclass(frozen=True)
class Launch:
    """A generated kernel: ``name(reads…, writes…)``; ``ops``: its fused operators, in order.

    ``writes``: slots of the outputs, then of scratch memory. ``scalars``, if any, are the kernel's last argument, an
    int64 array. With ``offsets``, it takes addresses: each tensor's own plus as many bytes. ``once``: a loop whose
    steps all read the same result launches it only before the first step.
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
    """A torch kernel, by its name in :mod:`bridge.library`.

    An ``OUT_KERNELS`` kernel writes into the tensors of ``writes``; if ``allocates``, one of ``FUNCTIONS`` returns new
    tensors, which fill these slots. ``attrs``: plain data, see :class:`bridge.compile.loop_ir.graph.LibraryCall`.
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
    """A strided view: ``torch.as_strided`` of the dense tensor in ``reads[0]`` fills ``writes[0]``; copies no data."""

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


@dataclass(frozen=True)
class Allocate:
    """Memory of torch's allocator for a dense tensor, which fills ``writes[0]`` until its last use."""

    name: str
    outputs: tuple[str, ...]
    writes: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    inputs: tuple[str, ...] = ()
    reads: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.outputs[0]} = {self.name}({self.shape}, {self.dtype})"
