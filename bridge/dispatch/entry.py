"""An entry: one compiled call of one module; inputs from its guard → the module's result.

A call runs a list of steps (:mod:`bridge.dispatch.call_steps`): random draws, the forward program (through autograd if
something requires grad) with its checks, write-back of buffers, assembly of the result, updates of attributes. If the
forward program raises, nothing has been written, the draws are undone, and the call runs eager.

:class:`BoundCalls`: an entry with dynamic shapes + the sizes of a call → the call's bound steps, cached. Executors of
forward and backward, shapes of draws, strides and aliases of results are computed once for each combination of sizes.
The cache is bounded in number and in bytes. Autograd graphs of earlier calls own the backward that they need.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
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
from bridge.dispatch.guards import EntryGuard, Sizes
from bridge.dispatch.programs import Programs
from bridge.dispatch.recompute import Observed, alignments, numbers_read
from bridge.lowering import LoweredCall
from bridge.state import SampleCall

__all__ = ["MAX_BOUND", "MAX_BOUND_BYTES", "BoundCalls", "Entry", "EntryOptions"]

#: Most combinations of sizes for which an entry keeps bound calls.
MAX_BOUND = 256
#: Most bytes of host memory of the bound calls, without arenas, which belong to the process.
MAX_BOUND_BYTES = 256 << 20
_BYTES_OF_A_STEP = 4096
"""Approximate bytes of an instruction's bound arguments, views and tensors."""


@dataclass(frozen=True)
class EntryOptions:
    """Options of an entry's compilation.

    Attributes:
        partition: the strategy.
        backend: the compiling backend.
        freeze: whether the module's tensors become constants, if no gradients are wanted.
        graphs: control of the programs' CUDA graphs; ``None``: no graphs.
        dims: the dynamic dimensions.
        steady: whether to refuse a module whose random draws select the code to run.
    """

    partition: Any
    backend: Backend
    freeze: bool = False
    graphs: RecordedGraphs | None = None
    dims: tuple[DynamicDim, ...] = ()
    steady: bool = False


class BoundCalls:
    """Cache of an entry with dynamic shapes: sizes of a call → its bound steps. Thread-safe.

    Attributes:
        replaced_hits: of each entry for fixed sizes whose place this one took, its hits.
    """

    def __init__(self, lowered: LoweredCall, programs: Programs, guard: EntryGuard):
        captured = lowered.captured
        self._lowered, self._programs, self._guard = lowered, programs, guard
        self._sizes = sizes = guard.sizes
        _ = sizes.guards  # compiled now
        self._samples = {symbol.name: size for symbol, size in sizes.scope.samples.items()}
        self._counted = numbers_read(captured.numbers.expressions, captured.device) if captured.sizes.counted else None
        self._symbolic = Observed(tuple(captured.draws), tuple(captured.outputs))
        self._observed = evaluator(self._symbolic, sizes.scope)
        self._kept = LeastRecentlyUsed[tuple, CallRun](MAX_BOUND, MAX_BOUND_BYTES)
        made = [programs.forward.program, *([programs.backward.program] if programs.backward is not None else [])]
        self._bytes = _BYTES_OF_A_STEP * sum(len(program.steps) for program in made)
        self.replaced_hits: list[int] = []

    @property
    def steps(self) -> tuple[CallStep, ...]:
        """The steps of a call with symbolic extents, except the strides of results, which are the sample's."""
        symbolic = {MakeDraws: {"draws": self._symbolic.draws}, Results: {"outputs": self._symbolic.outputs}}
        return tuple(replace(step, **symbolic.get(type(step), {})) for step in self._planned(self._samples))

    def of(self, call: CallValues) -> CallRun:
        """The bound steps of a call with the guard's inputs; data-dependent sizes are appended to the inputs.

        Raises:
            GuardFailure: the sizes cannot be bound.
        """
        if self._counted is not None:
            call.inputs = call.primals = self._counted(call.inputs)
        tensors = call.inputs[len(call.inputs) - self._sizes.count :]  # scalar inputs come before them
        key = self._sizes.key(tensors)
        if self._counted is not None:  # the guard did not check data-dependent sizes: ``_check`` does, once per key
            key = tuple([(tensor.shape, tensor.stride()) for tensor in tensors])
        found = self._kept.get(key)
        if found is None:
            if self._counted is not None:
                self._check(tensors)
            found = self._kept.put(key, self._bind(self._sizes.of(tensors)), self._bytes)
        return found

    def _check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raises :class:`GuardFailure` for data-dependent sizes that the entry does not serve."""
        failure = self._sizes.failure(tensors)
        if failure is None and not self._sizes.strided(tensors):
            failure = GuardFailure(RUN, "strides of arguments", "others than for the sizes that were counted")
        if failure is not None:
            failure.stage = RUN
            raise failure

    def _bind(self, sizes: Sizes) -> CallRun:
        """:meth:`bind` with errors as :class:`GuardFailure`, so that the call runs eager."""
        try:
            return self.bind(sizes)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            given = ", ".join(f"{name} = {size}" for name, size in sizes.items())
            failure = GuardFailure(RUN, "error in binding sizes", f"{given}: {type(error).__name__}: {error}")
            raise failure from error

    def _planned(self, sizes: Sizes) -> tuple[CallStep, ...]:
        return plan_call(self._lowered, self._programs, self._guard, self._observed(sizes))

    def bind(self, sizes: Sizes | None = None) -> CallRun:
        """The bound steps for sizes, by default the sample's; waits for machine code, raises its errors."""
        sizes = self._samples if sizes is None else sizes
        return CallRun(self._planned(sizes), self._programs.at(sizes), self._guard, self._lowered.captured)

    def clear(self) -> None:
        """Empties the cache; calls bind anew."""
        self._kept.clear()

    def __str__(self) -> str:
        """The symbols and their guards, then the cached sizes."""
        given = [", ".join(f"{name} = {size}" for name, size in sizes.items()) for sizes in reversed(self.sizes)]
        return "\n".join([str(self._sizes), *(f"bound for {each}" for each in given)])

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def sizes(self) -> list[Sizes]:
        """The cached combinations, the latest used last."""
        return [run.programs.sizes for _, run in self._kept.items()]


_CLOCK = count(1)


class Entry:
    """A compiled call of one module.

    Attributes:
        lowered: every stage of the lowering; shared with entries of equal calls (:mod:`bridge.lowering.reuse`).
        programs: its forward and backwards; ``options``: the options of their compilation.
        steps: the steps of a call, including the backward for grad_outs of the expected outputs.
        bound: with dynamic shapes, the bound calls of the latest sizes, else ``None``.
        run: with static shapes, the steps as functions.
        compile_seconds: from capture to the compiled programs.
        hits: calls that this entry ran; ``last_used``: a clock value of the latest of them.
        worth: step times against eager, for small work (:mod:`bridge.dispatch.profitability`).
        cause: the guard whose failure led to this entry; ``None``: added by the user.
    """

    def __init__(
        self,
        guard: EntryGuard,
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
        self.bound = None if guard.sizes is None else BoundCalls(lowered, programs, guard)
        if steps is None:
            steps = plan_call(lowered, programs, guard) if self.bound is None else self.bound.steps
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
        """Whether the forward has loops of a fixed length; an entry for another length compiles no kernels."""
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
        """A copy of the entry with the current values of the frozen tensors; nothing is compiled.

        Raises:
            GuardFailure: the call differs in more than frozen tensors.
            UnsupportedModule: the values cannot be frozen.
        """
        guard, tensors = self.guard.renewed(call)
        steps = self.steps if self.bound is None else None
        found = Entry(guard, self.lowered, self.programs.renewed(tensors), self.options, steps)
        found.cause = self.cause
        return found

    @property
    def readings(self) -> tuple[ScalarGuard, ...]:
        """Scalar guards: the numbers that forward read in Python. The entry serves calls that read the same."""
        return self.lowered.captured.numbers.guards

    @property
    def plan(self) -> Any:
        """The saved tensors with reasons, or ``None``."""
        return self.lowered.plan

    def __repr__(self) -> str:
        captured = self.lowered.captured
        dims = captured.sizes.shapes or [tensor.shape for tensor in captured.given.tensors]
        given = zip(captured.given.tensors[: len(dims) - captured.sizes.counted], dims, strict=False)
        shapes = ", ".join(
            f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]" for tensor, shape in given
        )
        sizes = f", {len(self.bound)} sizes" if self.bound is not None else ""
        if self.bound is not None and self.bound.replaced_hits:
            sizes += f", in place of an entry for fixed sizes with {sum(self.bound.replaced_hits)} hits"
        kind = "forward and backward" if self.backward else "frozen" if self.is_frozen else "forward only"
        slower = f", {self.worth}" if self.worth is not None and self.worth.is_slower else ""
        head = f"Entry({captured.module_name}({shapes}), {kind}"
        return f"{head}, {self.hits} hits{sizes}, compiled in {self.compile_seconds:.2f} s{slower})"

    def __call__(self, inputs: list[torch.Tensor], module: nn.Module | None = None) -> Any:
        """Runs the call on the tensors that the guard returned; same result as the module's forward.

        Args:
            inputs: module tensors, numbers and arguments.
            module: the module whose attributes are updated; required if the call sets attributes.

        Raises:
            GuardFailure: the forward program or a check failed: the call must run eager. No state has changed, not even
                the generator's.
        """
        self.last_used = next(_CLOCK)
        self.hits += 1  # counted first: a checkpoint may stop the call by an exception once it has the saved tensors
        call = CallValues()
        call.later = self.guard.later
        call.inputs = call.primals = inputs
        call.module, call.undo, call.beside = module, None, None
        try:
            call.run = run = self.run if self.bound is None else self.bound.of(call)
            for act in run.before:
                act(call)
            if self._apply is not None:
                call.computed = self._apply(call, *self._wanted(call.primals))
            else:
                with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
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
