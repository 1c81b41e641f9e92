"""An entry: one compiled call of one module; inputs from its guard → the module's result.

What a call does is a list of steps (:mod:`bridge.dispatch.call_steps`): random draws, the forward program (through
autograd where something requires grad) with its checks, new values of buffers written back, the result put together,
attributes counted up. If the forward program raises, nothing is written yet, the draws are undone, and the call is
eager's.
"""

from __future__ import annotations

import time
from itertools import count
from typing import Any

import torch
from torch import nn

from bridge.base.errors import GuardFailure
from bridge.base.pytrees import picker
from bridge.capture import DynamicDim, ScalarGuard
from bridge.compile import Backend, Program, RecordedGraphs, RunLoop
from bridge.dispatch.autograd import apply
from bridge.dispatch.autograd_nodes import apply_in_nodes
from bridge.dispatch.beside import ChainedGradients
from bridge.dispatch.bound import BoundCalls
from bridge.dispatch.call_plan import plan_call
from bridge.dispatch.call_run import CallRun, CallValues
from bridge.dispatch.call_steps import CallStep, MakeDraws, Results
from bridge.dispatch.chained import chain_results, chains_of, take_hooks
from bridge.dispatch.complex_places import complex_places
from bridge.dispatch.computed_masks import alignments
from bridge.dispatch.frozen import FrozenPrograms
from bridge.dispatch.guards import EntryGuard, argument_sizes
from bridge.dispatch.host_inputs import host_inputs
from bridge.dispatch.programs import Programs
from bridge.dispatch.recompute import numbers_read
from bridge.lowering import LoweredCall

__all__ = ["Entry"]

_CLOCK = count(1)


class Entry:
    """A call of one module that runs in TVM.

    Attributes:
        lowered: every stage of the lowering; shared with entries of equal calls (:mod:`bridge.lowering.reuse`).
        programs: its forward and its backwards.
        steps: what a call does, in order, the backward for grad_outs of all differentiable outputs included.
        bound: what calls of the latest sizes run; ``None`` where every extent is a number.
        run: the steps as functions, where every extent is a number.
        compile_seconds: from capture to the compiled programs.
        hits: calls that this entry ran; ``last_used``: tells which of the entries ran the latest call.
        partition, backend: what it was compiled with.
        dims: the dimensions that were to vary.
        tuned: the choices that it was compiled with; ``None``: default ones.
        worth: a step of it beside one of eager, where the work is small (:mod:`bridge.dispatch.worth`).
        cause: in what the call that it was compiled for differed from the earlier entries; ``None``: added by hand.
    """

    partition: Any = None
    backend: Backend
    dims: frozenset[DynamicDim] = frozenset()
    cause: str | None = None
    tuned: Any = None
    worth: Any = None

    def __init__(
        self,
        guard: EntryGuard | None,
        lowered: LoweredCall,
        backend: Backend,
        programs: FrozenPrograms | None = None,
        graphs: RecordedGraphs | None = None,
        steps: tuple[CallStep, ...] | None = None,
    ):
        started = time.perf_counter()
        self.guard = guard
        self.lowered = lowered
        self.backend = backend
        self.hits = 0
        self.last_used = 0
        if programs is None:
            programs = Programs(lowered, backend, graphs, None if guard is None else guard.addresses)
        self.programs = programs
        self.bound = _bound_calls(lowered, self.programs, guard)
        if steps is not None:
            forward = steps
        elif self.bound is None:
            made = self.programs
            held = () if made.eager_backward is None else made.eager_backward.held
            forward = plan_call(
                lowered, made.forward, guard, computed=made.masks.draws, frozen=made.is_frozen, beside=held
            )
        else:
            forward = self.bound.steps
        if guard is not None:
            drawn = next((step for step in forward if isinstance(step, MakeDraws)), None)
            guard.aligned = {} if drawn is None else alignments(drawn.draws, drawn.computed)
        backward = self.programs.backward
        self.steps: tuple[CallStep, ...] = forward if backward is None else (*forward, backward.step)
        if self.bound is None:
            self.run = CallRun(
                self.steps, self.programs.execute, self.programs.device_type, guard, lowered.captured.module_name
            )
        else:
            self.bound.bind_sample()
        self._wanted = picker(lowered.wanted)
        captured = lowered.captured
        self._counted = numbers_read(captured.recomputed, captured.device) if captured.counted else None
        self._complex = complex_places(lowered)
        self._hosted = host_inputs(lowered.captured)
        results = next(step for step in self.steps if isinstance(step, Results))
        self._chains = chains_of(results.outputs, results.computed) if lowered.differentiable else ()
        self._is_differentiable, self._are_several = bool(lowered.differentiable), len(lowered.differentiable) > 1
        self._apply = apply if len(self.programs.nodes) == 1 else apply_in_nodes
        self.compile_seconds = time.perf_counter() - started + lowered.seconds

    @property
    def has_loops(self) -> bool:
        """Whether its programs have loops: of one length, of which another one compiles no kernels."""
        return any(isinstance(step, RunLoop) for step in self.forward.steps)

    @property
    def forward(self) -> Program:
        """The forward program."""
        return self.programs.forward

    @property
    def backward(self) -> Program | None:
        """The backward program for grad_outs of :attr:`LoweredCall.expected` outputs, or ``None``."""
        backward = self.programs.backward
        return None if backward is None else backward.program

    @property
    def is_frozen(self) -> bool:
        """Whether the module's tensors are constants of the forward program."""
        return self.programs.is_frozen

    def renewed(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Entry:
        """The entry of this call with the frozen tensors as they are now; nothing is compiled.

        Raises:
            GuardFailure: the call differs in more than frozen tensors.
            UnsupportedModule: they cannot be frozen.
        """
        guard, tensors = self.guard.renewed(module, args, kwargs)
        steps = self.steps if self.bound is None else None
        found = Entry(guard, self.lowered, self.backend, self.programs.renewed(tensors), steps=steps)
        found.partition, found.backend, found.dims, found.cause = self.partition, self.backend, self.dims, self.cause
        found.tuned = self.tuned
        return found

    @property
    def has_complex_tensors(self) -> bool:
        """Whether complex tensors enter or leave the call; its programs know their parts."""
        return self._complex is not None

    @property
    def readings(self) -> tuple[ScalarGuard, ...]:
        """Numbers that forward read: the entry is the branch of calls that read the same."""
        return self.lowered.captured.readings

    @property
    def plan(self) -> Any:
        """What is saved for the backward and why, or ``None``."""
        return self.lowered.plan

    def __repr__(self) -> str:
        captured = self.lowered.captured
        dims = captured.argument_shapes or [tensor.shape for tensor in captured.arguments]
        given = zip(captured.arguments[: len(dims) - captured.counted], dims, strict=False)
        shapes = ", ".join(
            f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]" for tensor, shape in given
        )
        sizes = f", {len(self.bound)} sizes" if self.bound is not None else ""
        kind = "forward and backward" if self.backward else "frozen" if self.is_frozen else "forward only"
        slower = f", {self.worth}" if self.worth is not None and self.worth.is_slower else ""
        head = f"Entry({captured.module_name}({shapes}), {kind}"
        return f"{head}, {self.hits} hits{sizes}, {self.compile_seconds:.2f} s{slower})"

    def __call__(self, inputs: list[torch.Tensor], module: nn.Module | None = None) -> Any:
        """Runs the call on the tensors that the guard returned; same result as the module's forward.

        Args:
            inputs: module tensors, numbers and arguments.
            module: whose attributes are counted up; needed where the guard says that the call sets some.

        Raises:
            GuardFailure: the forward program raised: the call is eager's. Nothing is changed, the generator included.
        """
        self.last_used = next(_CLOCK)
        self.hits += 1  # a checkpoint may leave off once it has what the backward needs
        call = CallValues()
        call.later = None if self.guard is None else self.guard.later
        call.module, call.undo, call.beside = module, None, ChainedGradients() if self._chains else None
        try:
            if self._counted is not None:
                inputs = self._counted(inputs)
            call.inputs = call.primals = inputs
            bound = self if self.bound is None else self.bound.of(inputs)
            run = bound.run
            if self._complex is not None:
                call.primals = inputs = self._complex.opened(inputs)
            if self._hosted is not None:
                call.primals = inputs = self._hosted.moved(inputs)
            for act in run.before:
                act(call)
            if self._is_differentiable:
                call.computed = self._apply(bound.programs, run.forward, call, *self._wanted(inputs))
            else:
                with torch.no_grad():
                    for act in run.forward:
                        act(call)
                call.computed = call.values
        except GuardFailure as failure:
            failure.tried = (self,)
            self.hits -= 1
            if call.undo is not None:
                call.undo()
            raise
        if self._chains and torch.is_grad_enabled():
            call.computed = chain_results(bound.programs, self._chains, call.beside, call.computed)
        if self._are_several:
            take_hooks(call.computed)
        if self._complex is not None:
            call.computed = self._complex.closed(call.computed)
        for act in run.after:
            act(call)
        return call.result


def _bound_calls(
    lowered: LoweredCall, programs: Programs | FrozenPrograms, guard: EntryGuard | None
) -> BoundCalls | None:
    captured = lowered.captured
    names = [f"input {place}" for place in range(len(captured.arguments) - captured.counted)]
    sizes = guard.sizes if guard is not None else argument_sizes(captured, names)
    return None if sizes is None else BoundCalls(lowered, programs, guard, sizes)
