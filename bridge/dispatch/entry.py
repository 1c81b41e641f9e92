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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import nn

from bridge.base.errors import RUN, GuardFailure, is_out_of_memory
from bridge.base.log import Stopwatch
from bridge.base.lru import LeastRecentlyUsed
from bridge.base.pytrees import picker
from bridge.capture import DynamicDim, ScalarGuard
from bridge.compile import Backend, Program, RecordedGraphs, RunLoop, evaluator
from bridge.dispatch.autograd import apply, apply_in_nodes
from bridge.dispatch.call_run import CallRun, CallValues
from bridge.dispatch.call_steps import CallStep, MakeDraws, Results, plan_call
from bridge.dispatch.guards import ArgumentSizes, EntryGuard, Sizes, argument_sizes
from bridge.dispatch.programs import Programs
from bridge.dispatch.recompute import Observed, alignments, numbers_read
from bridge.lowering import LoweredCall
from bridge.state import SampleCall

__all__ = ["MAX_BOUND", "MAX_BOUND_BYTES", "BoundCalls", "Entry", "EntryOptions"]

#: Combinations of sizes that an entry keeps what it needs for.
MAX_BOUND = 256
#: Bytes of the host's that these may take, all arenas apart: those are the process's.
MAX_BOUND_BYTES = 256 << 20
_BYTES_OF_A_STEP = 4096
"""An instruction's bound arguments, views and tensors, about."""


@dataclass(frozen=True)
class EntryOptions:
    """How a call is compiled.

    Attributes:
        partition: the strategy; ``backend``: what compiles it.
        freeze: whether the module's tensors become constants, if no gradients are wanted.
        graphs: control of the programs' recorded graphs; ``None``: there are none.
        dims: the dimensions that are to vary.
        tuned: the choices that it is compiled with; ``None``: default ones.
        steady: whether a call is refused of which each decides anew, by draws.
    """

    partition: Any
    backend: Backend
    freeze: bool = False
    graphs: RecordedGraphs | None = None
    dims: tuple[DynamicDim, ...] = ()
    tuned: Any = None
    steady: bool = False


class BoundCalls:
    """The bound calls of one entry. Threads may share them.

    Args:
        sizes: reads the sizes of a call from its argument tensors.

    Raises:
        GuardFailure: by :meth:`of`, where sizes cannot be bound.
    """

    def __init__(self, lowered: LoweredCall, programs: Programs, guard: EntryGuard | None, sizes: ArgumentSizes):
        captured = lowered.captured
        self._lowered, self._programs, self._guard = lowered, programs, guard
        self._sizes = sizes
        _ = sizes.guards  # all is compiled
        self._samples = {symbol.name: size for symbol, size in sizes.scope.samples.items()}
        self._counted = numbers_read(captured.recomputed, captured.device) if captured.counted else None
        self._symbolic = Observed(tuple(captured.draws), tuple(captured.outputs))
        self._observed = evaluator(self._symbolic, sizes.scope)
        self._kept = LeastRecentlyUsed[tuple, CallRun](MAX_BOUND, MAX_BOUND_BYTES)
        made = [programs.forward.program, *([programs.backward.program] if programs.backward is not None else [])]
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

    def of(self, call: CallValues) -> CallRun:
        """What a call with these inputs, which the guard gave, runs; counted sizes become inputs of it."""
        if self._counted is not None:
            call.inputs = call.primals = self._counted(call.inputs)
        tensors = call.inputs[len(call.inputs) - self._sizes.count :]  # number inputs come before them
        key = self._sizes.key(tensors)
        if self._counted is not None:  # the guard could not tell about these: they are looked at once, in whole
            key = tuple([(tensor.shape, tensor.stride()) for tensor in tensors])
        found = self._kept.get(key)
        if found is None:
            if self._counted is not None:
                self._check(tensors)
            found = self._kept.put(key, self._bind(self._sizes.of(tensors)), self._bytes)
        return found

    def _check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raises :class:`GuardFailure` for sizes that were counted, about which the guard could not tell."""
        failure = self._sizes.failure(tensors)
        if failure is None and not self._sizes.strided(tensors):
            failure = GuardFailure(RUN, "strides of arguments", "others than for the sizes that were counted")
        if failure is not None:
            failure.stage = RUN
            raise failure

    def _bind(self, sizes: Sizes) -> CallRun:
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
        return _planned(self._lowered, self._programs, self._guard, self._observed(sizes))

    def bind(self, sizes: Sizes | None = None) -> CallRun:
        """What a call of these sizes, by default the sample's, runs; waits for machine code, raises what goes wrong."""
        sizes = self._samples if sizes is None else sizes
        return CallRun(self._planned(sizes), self._programs.at(sizes), self._guard, self._lowered.captured)

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
        return [run.programs.sizes for _, run in self._kept.items()]


def _planned(
    lowered: LoweredCall, programs: Programs, guard: EntryGuard | None, observed: Observed | None = None
) -> tuple[CallStep, ...]:
    computed = () if programs.masks is None else programs.masks.draws
    held = () if programs.eager_backward is None else programs.eager_backward.held
    return plan_call(lowered, programs.forward.program, guard, observed, computed, programs.is_frozen, held)


_CLOCK = count(1)


class Entry:
    """A call of one module that runs in TVM.

    Attributes:
        lowered: every stage of the lowering; shared with entries of equal calls (:mod:`bridge.lowering.reuse`).
        programs: its forward and its backwards; ``options``: what they were compiled with.
        steps: what a call does, in order, the backward for grad_outs of all differentiable outputs included.
        bound: what calls of the latest sizes run; ``None`` where every extent is a number.
        run: the steps as functions, where every extent is a number.
        compile_seconds: from capture to the compiled programs.
        hits: calls that this entry ran; ``last_used``: tells which of the entries ran the latest call.
        worth: a step of it beside one of eager, where the work is small (:mod:`bridge.dispatch.profitability`).
        cause: in what the call that it was compiled for differed from the earlier entries; ``None``: added by hand.
    """

    def __init__(
        self,
        guard: EntryGuard | None,
        lowered: LoweredCall,
        programs: Programs,
        options: EntryOptions,
        steps: tuple[CallStep, ...] | None = None,
    ):
        watch = Stopwatch()
        self.guard, self.lowered, self.programs, self.options = guard, lowered, programs, options
        self.hits = self.last_used = 0
        self.worth: Any = None
        self.cause: str | None = None
        self.bound = _bound_calls(lowered, programs, guard)
        if steps is None:
            steps = _planned(lowered, programs, guard) if self.bound is None else self.bound.steps
        if guard is not None:
            drawn = next((step for step in steps if isinstance(step, MakeDraws)), None)
            guard.inputs.aligned = {} if drawn is None else alignments(drawn.draws, drawn.computed)
        backward = programs.backward
        self.steps: tuple[CallStep, ...] = steps if backward is None else (*steps, backward.step)
        if self.bound is None:
            self.run = CallRun(self.steps, programs, guard, lowered.captured)
        else:
            self.bound.bind()
        self._wanted = picker(lowered.wanted)
        several = apply_in_nodes if len(programs.nodes) > 1 else apply
        self._apply = several if lowered.differentiable else None
        self.compile_seconds = watch.seconds + lowered.seconds

    @property
    def has_loops(self) -> bool:
        """Whether its programs have loops: of one length, of which another one compiles no kernels."""
        return any(isinstance(step, RunLoop) for step in self.forward.steps)

    @property
    def forward(self) -> Program:
        """The forward program."""
        return self.programs.forward.program

    @property
    def backward(self) -> Program | None:
        """The backward program for grad_outs of :attr:`LoweredCall.expected` outputs, or ``None``."""
        backward = self.programs.backward
        return None if backward is None else backward.program

    @property
    def is_frozen(self) -> bool:
        """Whether the module's tensors are constants of the forward program."""
        return self.programs.is_frozen

    def renewed(self, call: SampleCall) -> Entry:
        """The entry of this call with the frozen tensors as they are now; nothing is compiled.

        Raises:
            GuardFailure: the call differs in more than frozen tensors.
            UnsupportedModule: they cannot be frozen.
        """
        guard, tensors = self.guard.renewed(call)
        steps = self.steps if self.bound is None else None
        found = Entry(guard, self.lowered, self.programs.renewed(tensors), self.options, steps)
        found.cause = self.cause
        return found

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
        call.inputs = call.primals = inputs
        call.module, call.undo, call.beside = module, None, None
        try:
            run = self.run if self.bound is None else self.bound.of(call)
            for act in run.before:
                act(call)
            if self._apply is not None:
                call.computed = self._apply(run.programs, run.forward, call, *self._wanted(call.primals))
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
        for act in run.after:
            act(call)
        return call.result


def _bound_calls(lowered: LoweredCall, programs: Programs, guard: EntryGuard | None) -> BoundCalls | None:
    captured = lowered.captured
    names = [f"input {place}" for place in range(len(captured.arguments) - captured.counted)]
    sizes = guard.sizes if guard is not None else argument_sizes(captured, names)
    return None if sizes is None else BoundCalls(lowered, programs, guard, sizes)
