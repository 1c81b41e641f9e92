"""Observation: eager metadata of one run of a module: its outputs, random draws, and refusals."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch

from bridge.base.devices import HOST
from bridge.base.errors import Unsupported
from bridge.state import constant_key


@dataclass(frozen=True)
class Parameter:
    """A tensor argument of a draw, as in ``torch.bernoulli(p)``: a computed parameter of the distribution.

    Its strides decide which element gets which number; a fake run may have other strides.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] = field(compare=False)


@dataclass(frozen=True)
class DropoutOperand:
    """The operand of a fused dropout, whose layout decides which element gets which number.

    Its dtype, strides and address decide how many numbers a thread of eager's kernel takes at once, and in which order.

    Attributes:
        of: the input (a module tensor or an argument) in whose memory it lies; ``None`` for memory of the call.
        offset: bytes from the input's first element, or from the start of the memory.
    """

    dtype: torch.dtype
    stride: tuple[int, ...] = field(compare=False)
    offset: int = field(compare=False, default=0)
    of: int | None = field(compare=False, default=None)


@dataclass(frozen=True)
class StepMasks:
    """The dropout masks of a loop's steps as one draw; eager draws them in order, the first step's first.

    Attributes:
        counts, kept: number of elements and probability of a one of each mask that a step draws, in order.
        dtype: dtype of the tensors that eager fills.
        dropouts: on a GPU, eager's draws in order, because each operand decides which element gets which number.
    """

    counts: tuple[int, ...]
    kept: tuple[float, ...]
    dtype: torch.dtype
    dropouts: tuple[Draw, ...] = ()


def is_fused_attention(operator: Any) -> bool:
    """Whether an operator is fused attention, which is tagged as random but draws only for dropout."""
    return "scaled_dot_product" in str(operator)


@dataclass(frozen=True)
class Draw:
    """One random draw of eager's generator.

    Attributes:
        op: the ATen operator that drew, as in ``"aten.bernoulli_.float"``.
        shape, stride, dtype: of the tensor that it filled; the order in memory is the order of the draws.
        args: its further arguments: numbers, strings, dtypes (for bernoulli_: the probability of a one), and
            :class:`Parameter` for tensors.
        kwargs: its keyword arguments.
        device: of the tensor and of its generator.
        operand: operand of a fused dropout (``aten.native_dropout``), which fills its mask.
        advance: how far an in-kernel draw, or attention's mask, moves its generator's offset: as measured in the eager
            run, in a fake run by a rule, or ``None`` without a rule.
        steps: the masks of a loop's steps, if it stands for them.
    """

    op: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    device: torch.device = HOST
    operand: DropoutOperand | None = None
    advance: int | None = field(compare=False, default=None)
    steps: StepMasks | None = field(compare=False, default=None)

    @property
    def is_placed(self) -> bool:
        """Whether the program draws it in a kernel at a known generator offset: the dropout of a fused attention
        kernel, or a GPU's draw with computed parameters. Both move the generator independently of numbers."""
        if self.is_attention_mask:
            return False
        return is_fused_attention(self.op) or (self.device != HOST and self._has_parameters)

    @property
    def is_attention_mask(self) -> bool:
        """Whether it is the mask of attention weights, for attention that matrix products compute."""
        return is_fused_attention(self.op) and self.dtype == torch.bool

    @property
    def is_computed(self) -> bool:
        """Whether the program makes it and all later draws, because tensors decide how far it moves the generator."""
        return self._has_parameters and not self.is_placed

    @property
    def _has_parameters(self) -> bool:
        return any(isinstance(arg, Parameter) for arg in self.args)


@dataclass(frozen=True)
class Output:
    """One leaf of the module's result, as eager returns it.

    Attributes:
        value: the leaf itself if it is not a tensor.
        is_tensor: whether it is a tensor.
        alias_of: ``("input", i)`` or ``("output", j)`` when it shares the memory of the i-th module tensor or
            argument, or of an earlier output that spans its memory; ``None`` when the memory is its own.
        is_same_object: whether it is the same tensor object as ``alias_of``.
        shape, stride, offset, dtype: of the tensor; the offset (in elements) is relative to ``alias_of``. Between a
            complex tensor and its parts (``view_as_complex``, ``.real``) it is in real elements.
        is_conjugate: whether it is a conjugated view of ``alias_of``.
        requires_grad: whether autograd tracks it.
        reaches: indices of the inputs that its autograd graph reaches.
        through: other leaves on the way to these inputs.
        is_saved: whether eager's autograd saves a tensor in its memory; ``is_held``: whether it saves this tensor.
    """

    value: Any = None
    is_tensor: bool = False
    alias_of: tuple[str, int] | None = None
    is_same_object: bool = False
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype | None = None
    is_conjugate: bool = False
    requires_grad: bool = False
    reaches: frozenset[int] = frozenset()
    through: frozenset[int] = frozenset()
    is_saved: bool = False
    is_held: bool = False

    @property
    def key(self) -> tuple | None:
        """A key that is equal only for equal results; ``None`` if the value cannot be compared with another one."""
        value = constant_key(self.value)
        rest = tuple(getattr(self, each.name) for each in fields(self) if each.name != "value")
        return None if value is None else (value, *rest)


@dataclass
class Observation:
    """Eager metadata of one run of a module.

    Attributes:
        outputs: the leaves of its result, in pytree order.
        out_spec: pytree structure of the result.
        draws: its random draws, in order.
        unsupported: refusals.
        differentiates: whether forward runs a backward itself.
        derived: indices of the inputs with respect to which it takes derivatives.
        reads_validation: whether forward depends on whether ``torch.distributions`` check their arguments.
        objects: the objects in its result that a compiled call makes anew (:mod:`bridge.base.pytrees`).
        counted: indices of the inputs whose version counter it moved. A batch norm writes its running statistics
            without moving it, so that autograd takes them for unchanged.
        saved: indices of the inputs that eager's autograd saves; ``saved_views``: inputs of which it saves views.
        overwritten: indices of the inputs that forward writes by ``.data`` and eager's autograd saves: the backward
            reads the numbers that they have at its time.
        checkpointed: index of each input that a checkpoint reads, which the backward runs again -> the line.
        reads: forward's reads of state outside of the call (:class:`bridge.guards.Reads`).
    """

    outputs: list[Output] = field(default_factory=list)
    out_spec: Any = None
    draws: list[Draw] = field(default_factory=list)
    unsupported: list[Unsupported] = field(default_factory=list)
    differentiates: bool = False
    derived: frozenset[int] = frozenset()
    reads_validation: bool = False
    objects: list[Any] = field(default_factory=list)
    counted: frozenset[int] = frozenset()
    saved: frozenset[int] = frozenset()
    saved_views: frozenset[int] = frozenset()
    overwritten: frozenset[int] = frozenset()
    checkpointed: dict[int, str] = field(default_factory=dict)
    reads: Any = field(default=None, compare=False, repr=False)
