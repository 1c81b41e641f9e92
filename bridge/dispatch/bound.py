"""Bound calls: an entry whose sizes vary, and the sizes of a call → what a call of these sizes runs, kept for the next.

What depends on sizes is evaluated once for each combination of them: the executors of forward and backward, the shapes
of draws, strides and aliases of results. A few hundred combinations are kept, bounded in number and in bytes; one that
comes back after it has left is bound again. Graphs of earlier calls hold the backward that they need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from bridge.base.errors import RUN, GuardFailure, is_out_of_memory
from bridge.base.lru import LeastRecentlyUsed
from bridge.dispatch.call_plan import plan_call
from bridge.dispatch.call_run import CallRun
from bridge.dispatch.call_steps import CallStep, MakeDraws, Results
from bridge.dispatch.frozen import FrozenPrograms
from bridge.dispatch.guards import ArgumentSizes, EntryGuard, Sizes
from bridge.dispatch.observed import Observed, observed_for
from bridge.dispatch.programs import BoundPrograms, Programs
from bridge.lowering import LoweredCall

__all__ = ["MAX_BOUND", "MAX_BOUND_BYTES", "Bound", "BoundCalls"]

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
