"""Executor: a program bound to callables: ``executor(inputs) -> results``.

A run works on *registers*: a list with a slot for every tensor that the instructions touch. A run takes a block of the
process's arena pool (:mod:`bridge.compile.runtime.pool`) and finds, or makes once, its registers there: slots of
intermediates are filled with tensors in that block, those of constants with the constants. Slots of inputs, results and
views of those are filled during a call and emptied after it. Who has the block has the registers that are bound to it,
so concurrent and re-entrant calls never share them. Results are never in the block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.autograd import profiler

from bridge.base.pytrees import picker
from bridge.base.torch_internals import empty_strided
from bridge.compile.backend import Built
from bridge.compile.loop_ir.views import dense_strides
from bridge.compile.runtime.bind import Action, Arrays, bind, last_uses
from bridge.compile.runtime.forms import InputForms
from bridge.compile.runtime.instructions import MakeView
from bridge.compile.runtime.layout import RegisterLayout
from bridge.compile.runtime.loop_frame import Drive, Instruction
from bridge.compile.runtime.pool import ARENAS, ArenaPool, PoolBlock

__all__ = ["Actions", "Executor", "bind_all"]

Actions = Sequence[tuple[Action, tuple[int, ...]]]
"""Instructions as functions of the registers, each with the slots that it is the last to use."""


def bind_all(
    steps: Sequence[Instruction],
    layout: RegisterLayout,
    constants: Sequence[tuple[int, torch.Tensor]],
    code: Mapping[str, Built],
    drive: Drive | None = None,
) -> Actions:
    """The instructions of a program, bound, for any of its executors; arguments as of :class:`Executor`."""
    functions = {kernel: built.function for kernel, built in code.items()}
    kept = {*layout.filled, *(slot for slot, _ in constants), *layout.results}
    arrays: Arrays = {}
    return tuple(zip([bind(step, functions, arrays, drive) for step in steps], last_uses(steps, kept), strict=True))


class Executor:
    """Runs one program; safe to call from any thread.

    Attributes:
        steps: the instructions.
        actions: they, bound.

    Args:
        device: of the inputs, but for states of generators.
        prepare: called before each run, in the thread that runs.
        empty: shape, strides, element type → memory of a result.
        pool: of blocks on the device; the host's unless given.
        drive: runs the steps of loops.
        actions: of another executor of the same program, whose are shared.
    """

    def __init__(
        self,
        name: str,
        steps: Sequence[Instruction],
        layout: RegisterLayout,
        constants: Sequence[tuple[int, torch.Tensor]],
        code: Mapping[str, Built],
        *,
        device: torch.device,
        prepare: Callable[[], object],
        empty: Callable[..., torch.Tensor] = empty_strided,
        pool: ArenaPool | None = None,
        drive: Drive | None = None,
        actions: Actions | None = None,
    ):
        self.name = name
        self._prepare = prepare
        self.steps = steps
        self._layout = layout
        self._constants = constants
        self._code = code  # alive as long as this
        self.actions = bind_all(steps, layout, constants, code, drive) if actions is None else actions
        self._static_views = [bind(view, {}, {}) for view in layout.views]
        self._forms = InputForms(name, layout.params, device)
        self._empty = empty
        self._fresh = [(made.slot, made.shape, dense_strides(made.shape), made.torch_dtype) for made in layout.fresh]
        views = {step.writes[0] for step in (*layout.views, *steps) if isinstance(step, MakeView)}
        self._results = picker(layout.results)
        self._viewed = [i for i, slot in enumerate(layout.results) if slot in views]
        self._passed_on = [(i, slot) for i, slot in enumerate(layout.results) if slot < len(layout.params)]
        self._arena_bytes = layout.arena_bytes
        pool = ARENAS if pool is None else pool
        self._key = pool.enroll(self, self._arena_bytes)
        self._take, self._give = pool.take, pool.give

    def __call__(
        self,
        inputs: Sequence[torch.Tensor],
        *,
        consume: bool = False,
        fresh: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """See :meth:`bridge.compile.runtime.program.Program.__call__`.

        ``fresh``: memory for the results in ``layout.fresh``, in their order, dense; new memory if ``None``.
        """
        block = self._take(self._arena_bytes)
        try:
            registers, between_calls = block.bound.get(self._key) or self._bound_to(block)
            try:
                if not torch.is_grad_enabled():
                    return self._run(registers, inputs, consume, fresh)
                with torch.no_grad():
                    return self._run(registers, inputs, consume, fresh)
            finally:
                registers[:] = between_calls
        finally:
            self._give(block)

    def _run(
        self,
        registers: list,
        inputs: Sequence[torch.Tensor],
        consume: bool,
        fresh: Sequence[torch.Tensor] | None,
    ) -> list[torch.Tensor]:
        self._prepare()
        self._load(registers, inputs)
        passed_on = [(i, inputs[slot]) for i, slot in self._passed_on] if self._passed_on else ()
        if consume:
            inputs.clear()
        if fresh is None:
            for slot, shape, strides, dtype in self._fresh:
                registers[slot] = self._empty(shape, strides, dtype)
        else:
            for (slot, *_), memory in zip(self._fresh, fresh, strict=True):
                registers[slot] = memory
        self._act(registers)
        results = [*self._results(registers)]
        for i in self._viewed:  # autograd lets nobody write into an output that it knows as a view
            results[i] = results[i].data
        for i, tensor in passed_on:
            results[i] = tensor
        return results

    def _act(self, registers: list) -> None:
        """The actions, in order; slots are emptied after their last use."""
        if profiler._is_profiler_enabled:
            self._act_recorded(registers)
            return
        for action, last_used in self.actions:
            action(registers)
            for slot in last_used:
                registers[slot] = None

    def _act_recorded(self, registers: list) -> None:
        """The actions under a profiler: a range for the program, one for each instruction in it."""
        with profiler.record_function(f"tvm: {self.name}"):
            for (action, last_used), step in zip(self.actions, self.steps, strict=True):
                with profiler.record_function(f"tvm: {self.name}/{step.name}"):
                    action(registers)
                for slot in last_used:
                    registers[slot] = None

    def _load(self, registers: list, inputs: Sequence[torch.Tensor]) -> None:
        """Puts the inputs into their slots, dense. Some may require grad: nothing records it."""
        registers[: len(inputs)] = self._forms.dense(inputs)

    @torch.inference_mode(False)  # its tensors serve calls of any mode
    def _bound_to(self, block: PoolBlock) -> tuple[list, list]:
        """The registers of runs in a block, and what is in them between runs."""
        registers: list = [None] * self._layout.size
        self._layout.fill(registers, block.memory)
        for slot, tensor in self._constants:
            registers[slot] = tensor
        for make_view in self._static_views:
            make_view(registers)
        block.bound[self._key] = bound = registers, registers.copy()
        return bound
