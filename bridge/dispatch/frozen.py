"""Frozen programs: a lowered call, frozen, and the module's tensors → the program of a call, with its constants bound.

Two programs: one computes the constants from the module's tensors, when the entry is made and when a tensor has
changed; the other one is a call, given the arguments. Neither holds a number of the module's, so equal modules share
both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from autodiff.ir import Function, results
from bridge.base.errors import Unsupported, UnsupportedModule
from bridge.base.tensor_properties import as_parts
from bridge.compile import Backend, CompileOptions, EntryGraphs, Program, RecordedGraphs, with_constants
from bridge.dispatch.guards import Sizes
from bridge.dispatch.programs import Compiling
from bridge.dispatch.recompute import ComputedMasks
from bridge.dispatch.results import memory_orders
from bridge.lowering import FrozenCall, LoweredCall, freeze_call

__all__ = ["FrozenPrograms"]

Execute = Callable[..., list[torch.Tensor]]


class FrozenPrograms:
    """The programs of a call without gradients whose module's tensors are frozen.

    What an entry asks for is as in :class:`bridge.dispatch.programs.Programs`; there is no backward.

    Args:
        tensors: the module's, as the guard gives them.
        graphs: whether calls are recorded as graphs; ``None``: they are not.

    Attributes:
        frozen: the lowering's stages.
        constants: tensors → constants; ``forward``: a call, its constants among the parameters.
        weights: places of constants that are computed factors of products.

    Raises:
        UnsupportedModule: it cannot be frozen, or there is no kernel for an operator.
        CompilationError: compiling failed, a bug of this package.
    """

    is_frozen = True
    num_wanted = 0
    backward = eager_backward = None
    nodes = ((),)

    def __init__(
        self,
        lowered: LoweredCall,
        backend: Backend,
        tensors: Sequence[torch.Tensor],
        graphs: RecordedGraphs | None = None,
    ):
        name = lowered.captured.module_name
        options = CompileOptions.current(backend)
        self.frozen: FrozenCall = freeze_call(lowered)
        self.num_outputs = lowered.imported.num_outputs
        self.differentiable: tuple[int, ...] = ()
        self.not_differentiable = list(range(self.num_outputs))
        self.device, self.device_type = backend.device, backend.device.type
        self.masks = ComputedMasks(lowered, backend)  # none: a frozen call draws nothing
        self._is_symbolic = lowered.captured.extents is not None
        orders = memory_orders(lowered.captured, lowered.imported.output_of)
        same = replace(options, constants=len(results(self.frozen.constants)), orders=orders)
        compiling = [
            Compiling(self.frozen.constants, name, "constants", options, {}),
            Compiling(self.frozen.call, name, "forward", same, {}),
        ]
        if graphs is not None:
            compiling[1].graphed = partial(
                EntryGraphs(graphs).forward, outputs=lowered.imported.num_outputs, captures=lowered.num_results
            )
        self._begin(name, compiling, self.frozen.weights, tensors)

    @classmethod
    def made(
        cls, constants: Program, call: Program, weights: Sequence[int], outputs: int, tensors: Sequence[torch.Tensor]
    ) -> FrozenPrograms:
        """Programs that were compiled before.

        Args:
            weights: places of constants that are computed factors of products.
            outputs: how many of the call's results are the module's.
        """
        found = cls.__new__(cls)
        found.num_outputs, found.differentiable = outputs, ()
        found.not_differentiable = list(range(outputs))
        found.device, found._is_symbolic = call.backend.device, False
        found.device_type = found.device.type
        found._begin(call.name, [_Made(constants), _Made(call)], weights, tensors)
        return found

    def _begin(
        self, name: str, pair: Sequence[Compiling | _Made], weights: Sequence[int], tensors: Sequence[torch.Tensor]
    ) -> None:
        self._name, self._count, self.weights = name, len(tensors), tuple(weights)
        self._constants, self._call = pair
        self.constants, self.forward = (each.program() for each in pair)
        self._freeze(tensors)

    @property
    def forward_function(self) -> Function:
        """What :attr:`forward` was compiled from."""
        return self.frozen.call

    def renewed(self, tensors: Sequence[torch.Tensor]) -> FrozenPrograms:
        """The same programs with the constants of these tensors.

        Raises:
            UnsupportedModule: a folded weight is not finite.
        """
        found = copy(self)
        found._freeze(tensors)
        return found

    def forward_for(self, sizes: Sizes) -> Execute:
        """Runs a call of these sizes; module tensors among its inputs are not looked at."""
        return self._behind_module_tensors(self._call.execute(sizes, self._bound))

    @torch.inference_mode(False)  # what is made serves calls of any mode
    def _freeze(self, tensors: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            made = self._constants.execute()(list(map(as_parts, tensors)))
        params = self.forward.layout.params
        for place in self.weights:
            if not bool(torch.isfinite(made[place]).all()):
                weight = params[len(params) - len(made) + place].name
                what = Unsupported(weight, self._name, "not finite with what is folded into it: not exact")
                raise UnsupportedModule(self._name, [what])
        self._bound: Program = with_constants(self.forward, made)
        if not self._is_symbolic:
            self.execute = self._behind_module_tensors(self._call.execute(program=self._bound))

    def _behind_module_tensors(self, execute: Execute) -> Execute:
        count = self._count

        def run(inputs: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
            return execute(inputs[count:], **options)

        return run


class _Made:
    """A program in the place of its compilation."""

    def __init__(self, program: Program):
        self._program = program

    def program(self) -> Program:
        return self._program

    def execute(self, sizes: Sizes | None = None, program: Program | None = None) -> Execute:
        made = self._program if program is None else program
        return made.executor if sizes is None else made.bind(sizes)
