"""Freezing of a lowered call: its forward for inference → what is computed once and what each call does, by stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import autodiff
from autodiff import inference
from autodiff.ir import Function
from bridge.base.devices import HOST
from bridge.base.errors import CompilationError, Unsupported, UnsupportedModule
from bridge.base.interrupts import raise_deferred
from bridge.base.torch_cuda import products_are_tf32
from bridge.lowering.lowered import LoweredCall
from bridge.lowering.stage import Stage, stage_named

__all__ = ["FrozenCall", "freeze_call"]

_EVAL = "call module.eval() before it is frozen"


@dataclass(frozen=True)
class FrozenCall:
    """A forward with its module's tensors frozen.

    Attributes:
        stages: in order; index by name. The last two are ``"constants"`` and ``"call"``.
        split: the two functions.
    """

    stages: tuple[Stage, ...]
    split: inference.Frozen

    @property
    def constants(self) -> Function:
        """The module's tensors → the constants of :attr:`call`."""
        return self.split.constants

    @property
    def call(self) -> Function:
        """Numbers, argument tensors, then constants → the results of the forward."""
        return self.split.call

    @property
    def weights(self) -> tuple[int, ...]:
        """Places of constants that are computed factors of products."""
        return self.split.weights

    def __getitem__(self, name: str) -> Stage:
        return stage_named(self.stages, name)

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)

    def __str__(self) -> str:
        return "\n".join(stage.provenance for stage in self.stages)


def freeze_call(lowered: LoweredCall) -> FrozenCall:
    """Freezes the module's tensors in the forward of a call that was lowered without gradients.

    Raises:
        UnsupportedModule: the call changes what would be frozen, draws random numbers, or gradients are wanted.
        CompilationError: a pass failed; a bug of this package.
    """
    _refuse(lowered)
    frozen = len(lowered.captured.module_tensors)
    last = lowered["forward"]
    stages: list[Stage] = []
    body = autodiff.Body.of(last.function)
    split = None
    try:
        for apply in _passes(lowered):
            started, edits = time.perf_counter(), body.edits
            apply(body, frozen)
            function = last.function if body.edits == edits else body.function()
            seconds = time.perf_counter() - started
            made_by = f"autodiff.inference.{apply.__name__}"
            last = Stage(apply.__name__.replace("_", " "), made_by, function, seconds, last.size)
            stages.append(last)
            raise_deferred()
        started = time.perf_counter()
        split = inference.split_static(autodiff.clean(last.function), frozen)
    except Exception as error:
        raise CompilationError("freeze", last.function.script(), error) from error
    made_by = "autodiff.inference.split_static"
    stages.append(Stage("constants", made_by, split.constants, time.perf_counter() - started, last.size))
    stages.append(Stage("call", made_by, split.call, 0.0, last.size))
    return FrozenCall(tuple(stages), split)


def _passes(lowered: LoweredCall) -> Iterator[Callable[[autodiff.Body, int], None]]:
    """What is done with a frozen forward on the device of a call, in order."""
    if lowered.captured.device == HOST or not products_are_tf32():
        yield inference.spell_attention
    yield from inference.PASSES


def _refuse(lowered: LoweredCall) -> None:
    captured = lowered.captured
    where = f"{captured.module_name}.forward"
    problems = [
        Unsupported(captured.written_name(index), where, "a call changes it, frozen", _EVAL)
        for index, _ in captured.mutated
    ]
    if captured.draws:
        problems.append(Unsupported("random draws (dropout)", where, "frozen modules are for evaluation", _EVAL))
    if lowered.differentiable:
        problems.append(Unsupported("gradients", where, "frozen modules have none", "freeze it under torch.no_grad()"))
    if problems:
        raise UnsupportedModule(captured.module_name, problems)
