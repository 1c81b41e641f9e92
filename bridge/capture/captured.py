"""Captured call: a module's sample call as a functional ATen graph, with what training needs beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autodiff.extents import Dim, ExtentScope, SizeGuard
from bridge.base.devices import HOST
from bridge.base.errors import BY_DRAWS, Unsupported
from bridge.base.torch_internals import pytree
from bridge.capture.kept_state import KeptPlace
from bridge.capture.loops.lengths import AnyLength
from bridge.capture.numbers import Counter
from bridge.capture.observation import Draw, Observation, Output
from bridge.capture.precall_guards import PreCallExpression
from bridge.capture.scalar_guards import ScalarGuard
from bridge.state import ModuleTensor

__all__ = ["Captured"]


@dataclass(frozen=True)
class Captured:
    """A module's sample call as a traced graph.

    Attributes:
        module_name: class name of the module.
        graph: functional ATen graph; placeholders are bound by ``placeholders``.
        placeholders: name of each placeholder -> index into ``module_tensors + arguments`` (tied ones share one).
        module_tensors: what the module owns, each once.
        arguments: the argument leaves that are tensors (fake), in pytree order.
        argument_leaves: all leaves of the arguments, tensors replaced by ``None``.
        argument_is_tensor: which of them are tensors.
        in_spec: pytree structure of ``(args, kwargs)``.
        results: for each leaf of the module's result, the graph node that computes it (``None``: not computed).
        mutated: ``(index into module_tensors + arguments, node of its new value)`` pairs: what forward writes in place.
        observation: what eager does, see :mod:`bridge.capture.observation`.
        draw_of: name of each node that draws -> index into ``observation.draws``.
        literals: tensor literals of the module's code, by placeholder name.
        counters: attributes that each call counts up.
        kept: places that each call sets; their values are the results behind the module's own.
        readings: numbers that forward took out of tensors on the sample, in order.
        read: the nodes of those numbers; ``None`` for those that are recomputed, for constants and what is certain.
        recomputed: those that a call computes from its inputs by itself (:mod:`bridge.capture.precall_guards`).
        by_draws: which of the readings draws alone decide, so that calls read others: indices.
        extents: the symbols of the dimensions that vary; ``None``: every extent is a number. Where there are some,
            shapes and strides in ``observation`` hold extents, and ``arguments`` are of the sample's sizes.
        argument_shapes, argument_strides: of ``arguments``, with extents; empty where ``extents`` is ``None``.
        lines: of the guards that capturing gave ``extents``, where the question was asked.
        counted: how many of ``arguments``, the last ones, are no argument's leaf: tensors without elements, of which
            the first dimension is a number that a call computes from its inputs (:mod:`bridge.capture.counted_dims`).
        device: of all tensors.
        loops: whether its graph has one step in the place of a recorded loop's (:mod:`bridge.capture.loops`).
        recording: what was recorded then, to be compared with another length (:mod:`bridge.capture.loops.lengths`).
        any_length: where such a loop is of any length: which lengths are proven, and how others are.
    """

    module_name: str
    graph: fx.Graph
    placeholders: dict[str, int]
    module_tensors: tuple[ModuleTensor, ...]
    arguments: tuple[torch.Tensor, ...]
    argument_leaves: tuple[Any, ...]
    argument_is_tensor: tuple[bool, ...]
    in_spec: pytree.TreeSpec
    results: tuple[fx.Node | None, ...]
    mutated: tuple[tuple[int, fx.Node], ...]
    observation: Observation
    draw_of: dict[str, int]
    literals: dict[str, torch.Tensor]
    counters: tuple[Counter, ...] = ()
    kept: tuple[KeptPlace, ...] = ()
    readings: tuple[ScalarGuard, ...] = ()
    read: tuple[fx.Node | None, ...] = ()
    recomputed: tuple[PreCallExpression, ...] = ()
    by_draws: tuple[int, ...] = ()
    extents: ExtentScope | None = None
    argument_shapes: tuple[tuple[Dim, ...], ...] = ()
    argument_strides: tuple[tuple[Dim, ...], ...] = ()
    lines: Mapping[SizeGuard, str] = field(default_factory=dict)
    counted: int = 0
    device: torch.device = HOST
    loops: bool = False
    recording: Any = None
    any_length: AnyLength | None = None

    @property
    def problems(self) -> list[Unsupported]:
        return self.observation.unsupported

    @property
    def decisions(self) -> list[Unsupported]:
        """What each call decides anew, by draws."""
        reason = f"{BY_DRAWS[0]} what comes next: a compiled call decides as the sample's"
        hint = "dispatch the modules inside (whole=False), or this module for one decision (whole=True)"
        where = dict.fromkeys(self.readings[place].where for place in self.by_draws)
        return [Unsupported("a number that forward reads", each, reason, hint) for each in where]

    @property
    def draws(self) -> list[Draw]:
        return self.observation.draws

    @property
    def outputs(self) -> list[Output]:
        return self.observation.outputs

    @property
    def read_again(self) -> dict[int, tuple[bool, bool]]:
        """Inputs of which eager's backward reads what is in them when it comes: whether through views, too, and whether
        it is a parameter (of which the compiled one does, saved or not: none is copied)."""
        seen, written = self.observation, {index for index, _ in self.mutated}
        parameters = {index for index, each in enumerate(self.module_tensors) if each.kind == "parameter"}
        found = (seen.saved | seen.saved_views | parameters) - written - seen.checkpointed.keys()
        return {index: (index in seen.saved_views, index in parameters) for index in sorted(found)}

    @property
    def left(self) -> dict[int, int]:
        """Places in :attr:`mutated` of inputs that are overwritten behind autograd's back, each with its input."""
        written = self.observation.overwritten
        return {place: index for place, (index, _) in enumerate(self.mutated) if index in written}

    @property
    def watched(self) -> tuple[set[int], set[int]]:
        """Inputs, and leaves of the result, in whose memory eager's autograd saves something as it is: its backward
        raises where that has been written in place since the call."""
        seen = self.observation
        if seen.differentiates:  # what autograd saves was not looked at
            return set(), set()
        written = {index for index, _ in self.mutated} | seen.overwritten | seen.checkpointed.keys()
        computed = {leaf for leaf, each in enumerate(self.outputs) if each.is_tensor and each.is_saved}
        return {*seen.saved, *seen.saved_views} - written, computed

    @property
    def apart(self) -> tuple[set[int], set[int]]:
        """Leaves of the result that the caller may change: those of which eager saves nothing at all, and those of
        which it saves another tensor in the same memory, which does not follow ``tensor.data = other``."""
        numbered = [(leaf, each) for leaf, each in enumerate(self.outputs) if each.is_tensor and not each.is_held]
        nothing = {leaf for leaf, each in numbered if not each.is_saved}
        return nothing, {leaf for leaf, _ in numbered} - nothing

    def input_name(self, index: int) -> str:
        """What a module tensor or an argument is called: as the user has it."""
        owned = len(self.module_tensors)
        if index < owned:
            return self.module_tensors[index].name
        names = (name for name, place in self.placeholders.items() if place == index)
        return next(names, f"argument {index - owned}")

    def written_name(self, index: int) -> str:
        """What of :attr:`mutated` is called in a sentence."""
        kind = "buffer" if index < len(self.module_tensors) else "argument"
        return f"{kind} '{self.input_name(index)}'"
