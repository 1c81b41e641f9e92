"""An entry: one compiled call of one module; inputs from its guard → the module's result.

What a call does is a list of steps (:mod:`bridge.dispatch.call_steps`): random draws, the forward program (through
autograd where something requires grad) with its checks, new values of buffers written back, the result put together,
attributes counted up. If the forward program raises, nothing is written yet, the draws are undone, and the call is
eager's.

Bound calls: an entry whose sizes vary, and the sizes of a call → what a call of these sizes runs, kept for the next.

What depends on sizes is evaluated once for each combination of them: the executors of forward and backward, the shapes
of draws, strides and aliases of results. A few hundred combinations are kept, bounded in number and in bytes; one that
comes back after it has left is bound again. Graphs of earlier calls hold the backward that they need.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import nn

from bridge.base.errors import RUN, GuardFailure, is_out_of_memory
from bridge.base.lru import LeastRecentlyUsed
from bridge.base.pytrees import picker
from bridge.capture import DynamicDim, ScalarGuard
from bridge.compile import Backend, Program, RecordedGraphs, RunLoop
from bridge.dispatch.autograd import apply
from bridge.dispatch.autograd_nodes import apply_in_nodes
from bridge.dispatch.beside import ChainedGradients
from bridge.dispatch.call_run import CallRun, CallValues
from bridge.dispatch.call_steps import CallStep, MakeDraws, Results, plan_call
from bridge.dispatch.chained import chain_results, chains_of, take_hooks
from bridge.dispatch.frozen import FrozenPrograms
from bridge.dispatch.guards import ArgumentSizes, EntryGuard, Sizes, argument_sizes
from bridge.dispatch.programs import BoundPrograms, Programs
from bridge.dispatch.recompute import Observed, alignments, numbers_read, observed_for
from bridge.dispatch.results import complex_places, host_inputs
from bridge.lowering import LoweredCall

__all__ = ["MAX_BOUND", "MAX_BOUND_BYTES", "Bound", "BoundCalls", "Entry"]

#: Combinations of sizes that an entry keeps what it needs for.
MAX_BOUND = 256
#: Bytes of the host's that these may take, all arenas apart: those are the process's.
MAX_BOUND_BYTES = 256 << 20
_BYTES_OF_A_STEP = 4096
"""An instruction's bound arguments, views and tensors, about."""


class Bound:
    """What a call of one combination of sizes runs.

    Attributes:
        programs: forward and backwards.
        run: the steps of a call.
        sizes: by the names of the symbols.
    """

    __slots__ = ("programs", "run", "sizes")

    def __init__(self, programs: BoundPrograms, run: CallRun, sizes: Sizes):
        self.programs, self.run, self.sizes = programs, run, sizes


class BoundCalls:
    """The bound calls of one entry. Threads may share them.

    Args:
        sizes: reads the sizes of a call from its argument tensors.

    Raises:
        GuardFailure: by :meth:`of`, where sizes cannot be bound.
    """

    def __init__(
        self, lowered: LoweredCall, programs: Programs | FrozenPrograms, guard: EntryGuard | None, sizes: ArgumentSizes
    ):
        captured = lowered.captured
        self._lowered, self._programs, self._guard = lowered, programs, guard
        self._sizes = sizes
        _ = sizes.guards  # all is compiled
        self._samples = {symbol.name: size for symbol, size in sizes.scope.samples.items()}
        self._count = sizes.count  # number inputs come before them
        self._symbolic = Observed(tuple(captured.draws), tuple(captured.outputs))
        self._observed = observed_for(self._symbolic, sizes.scope)
        self._kept = LeastRecentlyUsed[tuple, Bound](MAX_BOUND, MAX_BOUND_BYTES)
        made = [programs.forward, *([programs.backward.program] if programs.backward is not None else [])]
        self._bytes = _BYTES_OF_A_STEP * sum(len(program.steps) for program in made)

    @property
    def steps(self) -> tuple[CallStep, ...]:
        """The steps of a call: with extents, but for the strides of results, which are the sample's."""
        steps = self._planned(self._samples)
        symbolic = {MakeDraws: {"draws": self._symbolic.draws}, Results: {"outputs": self._symbolic.outputs}}
        return tuple(replace(step, **symbolic.get(type(step), {})) for step in steps)

    def fit(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether argument tensors have sizes that the entry serves, and strides as compiled for these."""
        return self._sizes.failure(tensors) is None and self._sizes.strided(tensors)

    def of(self, inputs: Sequence[torch.Tensor]) -> Bound:
        """What a call with these inputs, which the guard gave, runs."""
        tensors = inputs[len(inputs) - self._count :]
        if self._lowered.captured.counted:
            self._check(tensors)
        key = self._sizes.key(tensors)
        return self._kept.get(key) or self._kept.put(key, self._bind(self._sizes.of(tensors)), self._bytes)

    def _check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raises :class:`GuardFailure` for sizes that were counted, about which the guard could not tell."""
        failure = self._sizes.failure(tensors)
        if failure is None and not self._sizes.strided(tensors):
            failure = GuardFailure(RUN, "strides of arguments", "others than for the sizes that were counted")
        if failure is not None:
            failure.stage = RUN
            raise failure

    def bind_sample(self) -> None:
        """Binds the sizes of the sample, which waits for machine code; raises what goes wrong."""
        self.bind(self._samples)

    def _bind(self, sizes: Sizes) -> Bound:
        """As :meth:`bind` for a call, which is eager's if that fails."""
        try:
            return self.bind(sizes)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            given = ", ".join(f"{name} = {size}" for name, size in sizes.items())
            failure = GuardFailure(RUN, "error in binding sizes", f"{given}: {type(error).__name__}: {error}")
            raise failure from error

    def _planned(self, sizes: Sizes) -> tuple[CallStep, ...]:
        programs = self._programs
        return plan_call(
            self._lowered,
            programs.forward,
            self._guard,
            self._observed(sizes),
            programs.masks.draws,
            programs.is_frozen,
            () if programs.eager_backward is None else programs.eager_backward.held,
        )

    def bind(self, sizes: Sizes) -> Bound:
        """What a call of these sizes runs."""
        lowered, programs = self._lowered, BoundPrograms(self._programs, sizes)
        steps = self._planned(sizes)
        run = CallRun(steps, programs.execute, programs.device_type, self._guard, lowered.captured.module_name)
        return Bound(programs, run, sizes)

    def clear(self) -> None:
        """Forgets what is kept; calls bind anew."""
        self._kept.clear()

    def __str__(self) -> str:
        """The symbols and what was concluded about them, then the sizes that are kept."""
        given = [", ".join(f"{name} = {size}" for name, size in sizes.items()) for sizes in reversed(self.sizes)]
        return "\n".join([str(self._sizes), *(f"bound for {each}" for each in given)])

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def sizes(self) -> list[Sizes]:
        """The combinations that are kept, the latest used last."""
        return [bound.sizes for _, bound in self._kept.items()]


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
