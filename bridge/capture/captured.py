"""Captured call: a module's sample call as a functional ATen graph, with the metadata that training needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import fx

from autodiff.extents import Dim, ExtentScope, SizeGuard
from bridge.base.devices import HOST
from bridge.base.errors import BY_DRAWS, Unsupported
from bridge.base.torch_internals import pytree
from bridge.capture.distributed import COLLECTIVE
from bridge.capture.kept_state import KeptPlace
from bridge.capture.loops.lengths import AnyLength
from bridge.capture.numbers import Counter
from bridge.capture.observation import Draw, Observation, Output
from bridge.capture.opaque_functions import APPLY
from bridge.capture.precall_guards import PreCallExpression
from bridge.capture.scalar_guards import ScalarGuard
from bridge.state import ModuleTensor


class CapturedArguments(NamedTuple):
    """The arguments of a captured call.

    Attributes:
        tensors: the leaves that are tensors (fake), in pytree order, then the counted sizes.
        leaves: all leaves, tensors replaced by ``None``. ``is_tensor``: for each, whether it is one.
        spec: pytree structure of ``(args, kwargs)``.
        followed: places of the tensors on which forward turns ``requires_grad`` on.
    """

    tensors: tuple[torch.Tensor, ...]
    leaves: tuple[Any, ...]
    is_tensor: tuple[bool, ...]
    spec: pytree.TreeSpec
    followed: frozenset[int] = frozenset()


class CapturedNames(NamedTuple):
    """Nodes of a captured graph by their names.

    Attributes:
        placeholders: name → index into ``module_tensors`` and the arguments' tensors (tied ones share one).
        draws: name of each node that draws → index into the observation's draws.
        literals: tensor literals of the module's code, by placeholder name.
    """

    placeholders: dict[str, int]
    draws: dict[str, int]
    literals: dict[str, torch.Tensor]


class CapturedNumbers(NamedTuple):
    """The numbers that forward read from tensors on the sample, in order.

    Attributes:
        guards: scalar guards, one for each number.
        expressions: pre-call guard expressions of numbers (:mod:`bridge.capture.precall_guards`).
        by_draws: indices of the numbers that draws alone decide, so that other calls read other numbers.
    """

    guards: tuple[ScalarGuard, ...] = ()
    expressions: tuple[PreCallExpression, ...] = ()
    by_draws: tuple[int, ...] = ()


class CapturedSizes(NamedTuple):
    """The dynamic dimensions of a captured call.

    Attributes:
        scope: their symbols; ``None``: every size is static. With symbols, shapes and strides in the observation hold
            extents, and the arguments' tensors have the sample's sizes.
        shapes, strides: of the arguments' tensors, with extents; empty without symbols.
        lines: the user's line for each guard that the capture added to ``scope``.
        counted: number of the last tensors among the arguments that are no leaves but tensors without elements, whose
            first dimension is a number that a call computes from its inputs (:mod:`bridge.capture.counted_dims`).
    """

    scope: ExtentScope | None = None
    shapes: tuple[tuple[Dim, ...], ...] = ()
    strides: tuple[tuple[Dim, ...], ...] = ()
    lines: Mapping[SizeGuard, str] = MappingProxyType({})
    counted: int = 0


class CapturedLoop(NamedTuple):
    """The recorded loops of a captured call.

    Attributes:
        is_recorded: whether the graph holds a long recorded loop as one step (:mod:`bridge.capture.loops`).
        recording: the loop's record, for the comparison with another length (:mod:`bridge.capture.loops.lengths`).
        any_length: for a loop of any length: the lengths that are proven, and how to prove others.
    """

    is_recorded: bool = False
    recording: Any = None
    any_length: AnyLength | None = None


class CapturedState(NamedTuple):
    """The attributes that each call sets: counters, and places whose values follow the call's own results."""

    counters: tuple[Counter, ...] = ()
    kept: tuple[KeptPlace, ...] = ()


@dataclass(frozen=True)
class Captured:
    """A module's sample call as a traced graph.

    Attributes:
        module_name: class name of the module.
        graph: functional ATen graph.
        names: the meaning of its nodes.
        module_tensors: parameters, buffers and other tensors of the module, each once.
        given: the arguments.
        results: for each leaf of the module's result, the graph node that computes it (``None``: not computed).
        mutated: ``(index into module_tensors + arguments, node of its new value)`` of each input written in place.
        observation: metadata of the eager run, see :mod:`bridge.capture.observation`.
        state: attributes that each call sets.
        numbers: the scalar guards.
        read: node of each of these numbers; ``None`` for one that is constant, certain or computed before the call.
        sizes: the dynamic dimensions.
        device: device of all tensors.
        loop: the recorded loops.
    """

    module_name: str
    graph: fx.Graph
    names: CapturedNames
    module_tensors: tuple[ModuleTensor, ...]
    given: CapturedArguments
    results: tuple[fx.Node | None, ...]
    mutated: tuple[tuple[int, fx.Node], ...]
    observation: Observation
    state: CapturedState = field(default=CapturedState())
    numbers: CapturedNumbers = field(default=CapturedNumbers())
    read: tuple[fx.Node | None, ...] = ()
    sizes: CapturedSizes = field(default=CapturedSizes())
    device: torch.device = HOST
    loop: CapturedLoop = field(default=CapturedLoop())

    @property
    def problems(self) -> list[Unsupported]:
        return self.observation.unsupported

    @property
    def decisions(self) -> list[Unsupported]:
        """Refusals of the numbers that draws decide anew in each call."""
        reason = f"{BY_DRAWS[0]} what comes next: a compiled call decides as the sample's"
        hint = "dispatch the modules inside (whole=False), or this module for one decision (whole=True)"
        where = dict.fromkeys(self.numbers.guards[place].where for place in self.numbers.by_draws)
        return [Unsupported("a number that forward reads", each, reason, hint) for each in where]

    @property
    def group(self) -> str | None:
        """The process group with which a call exchanges tensors, if it does."""
        return next((node.args[-1] for node in self.graph.nodes if node.target is COLLECTIVE), None)

    @property
    def runs_python(self) -> bool:
        """Whether a call runs the user's Python code: that of an autograd.Function that cannot be traced."""
        return any(node.target is APPLY for node in self.graph.nodes)

    @property
    def draws(self) -> list[Draw]:
        return self.observation.draws

    @property
    def outputs(self) -> list[Output]:
        return self.observation.outputs

    @property
    def read_again(self) -> dict[int, tuple[bool, bool]]:
        """Inputs that eager's backward reads at its own time → (whether through views, whether it is a parameter).

        The compiled backward reads every parameter then, because parameters are never copied.
        """
        seen, written = self.observation, {index for index, _ in self.mutated}
        parameters = {index for index, each in enumerate(self.module_tensors) if each.kind == "parameter"}
        found = (seen.saved | seen.saved_views | parameters) - written - seen.checkpointed.keys()
        return {index: (index in seen.saved_views, index in parameters) for index in sorted(found)}

    @property
    def left(self) -> dict[int, int]:
        """Position in :attr:`mutated` → index, of each input that forward overwrites unseen by autograd."""
        written = self.observation.overwritten
        return {place: index for place, (index, _) in enumerate(self.mutated) if index in written}

    @property
    def watched(self) -> tuple[set[int], set[int]]:
        """Indices of the inputs and of the result's leaves whose memory eager's autograd saves uncopied: its backward
        raises if that memory has been written in place since the call."""
        seen = self.observation
        if seen.differentiates:  # the run did not observe which tensors autograd saves
            return set(), set()
        written = {index for index, _ in self.mutated} | seen.overwritten | seen.checkpointed.keys()
        computed = {leaf for leaf, each in enumerate(self.outputs) if each.is_tensor and each.is_saved}
        return {*seen.saved, *seen.saved_views} - written, computed

    @property
    def apart(self) -> tuple[set[int], set[int]]:
        """Result leaves that the caller may change: (leaves of which eager saves nothing, leaves of which it saves
        another tensor in the same memory, which does not follow ``tensor.data = other``)."""
        numbered = [(leaf, each) for leaf, each in enumerate(self.outputs) if each.is_tensor and not each.is_held]
        nothing = {leaf for leaf, each in numbered if not each.is_saved}
        return nothing, {leaf for leaf, _ in numbered} - nothing

    def input_name(self, index: int) -> str:
        """The user's name of a module tensor or an argument."""
        owned = len(self.module_tensors)
        if index < owned:
            return self.module_tensors[index].name
        names = (name for name, place in self.names.placeholders.items() if place == index)
        return next(names, f"argument {index - owned}")

    def written_name(self, index: int) -> str:
        """The name of an input in :attr:`mutated` for messages."""
        kind = "buffer" if index < len(self.module_tensors) else "argument"
        return f"{kind} '{self.input_name(index)}'"
