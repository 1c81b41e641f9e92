"""The compiled programs of a lowered call: the forward, and a backward for each pattern of grad_outs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import profiler

from autodiff.ir import Function
from bridge.base.errors import CompilationError, Unsupported, UnsupportedModule, is_out_of_memory
from bridge.base.guard_failure import RUN, GuardFailure
from bridge.base.interrupts import interrupts_deferred
from bridge.compile import Backend, CompileOptions, Program, compile_function
from bridge.dispatch.results import result_layouts
from bridge.lowering import LoweredCall
from bridge.rng import go_on

__all__ = ["Programs", "outside_autocast"]


class Programs:
    """Forward and backward of one lowered call, as functions of tensors.

    Attributes:
        forward: the forward program.
        wanted: indices of the inputs (module tensors, then arguments) that get a gradient.
        differentiable: indices of the outputs that take a grad_out.
        not_differentiable: the other outputs.
        num_outputs: results that the module returns; new buffer values and captures come after them.
        can_fail: whether the forward may raise, whatever the shapes.

    Raises:
        UnsupportedModule: there is no kernel for an operator.
        CompilationError: compiling failed, a bug of this package.
    """

    def __init__(self, lowered: LoweredCall, backend: Backend):
        captured, imported = lowered.captured, lowered.imported
        self._lowered = lowered
        self._options = CompileOptions.current(backend)
        self.forward = _compiled(lowered.forward, captured.module_name, "forward", self._options)
        self.can_fail = bool(imported.checks) or self.forward.can_fail
        self._run_forward = _under_name(self.forward, captured.module_name, "forward")
        self.wanted = lowered.wanted
        self.differentiable = lowered.differentiable
        self.num_outputs = imported.num_outputs
        self.not_differentiable = [i for i in range(imported.num_outputs) if i not in lowered.differentiable]
        self._checks = imported.checks
        self._num_results = lowered.num_results
        self._relaid = result_layouts(lowered, self.forward)
        self._mutated = [index for index, _ in captured.mutated]
        self._state = self.num_outputs + len(self._mutated) if imported.leaves_state else None
        self._state_before = len(captured.module_tensors) + len(captured.arguments) + len(imported.input_draws) - 1
        self._saved_primals = lowered.plan.saved_primals if lowered.plan else ()
        self._saved_outputs = lowered.plan.saved_outputs if lowered.plan else ()
        self._backwards: dict[tuple[int, ...], _Backward] = {}
        if lowered.differentiable:
            self.backward_for(lowered.differentiable)

    @property
    def backward(self) -> Program | None:
        """The backward program for grad_outs of all differentiable outputs, or ``None``."""
        return self._backwards[self.differentiable].program if self._backwards else None

    def run_forward(self, primals: list[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs, new buffer values, what is for us, captures: each in eager's layout and in memory of its own.

        Draws that the program made have moved the default generator. Nothing has been written when this raises, and
        the generator is where it was.

        Raises:
            GuardFailure: the program raised an error (an index out of range), which eager has its own words for; or
                forward would read other numbers than on the sample, and may go another way.
            MemoryError, RuntimeError: there is no memory left, also for eager.
        """
        try:
            values = outside_autocast(self._run_forward, primals)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            failure = GuardFailure(RUN, "error in the compiled forward", f"{type(error).__name__}: {error}")
            raise failure from error
        if self._checks and (broken := int(values[self._num_results - 1])):
            raise GuardFailure(RUN, *self._checks[broken - 1])
        for position, relay in self._relaid:
            values[position] = relay(values[position])
        if self._state is not None:
            go_on(primals[self._state_before], values[self._state])
        return values

    def write_back(self, primals: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        """Gives the mutated buffers their new values, as eager did in place."""
        for offset, index in enumerate(self._mutated, self.num_outputs):
            primals[index].detach().copy_(values[offset])

    def saved(self, primals: list[torch.Tensor], values: list[torch.Tensor]) -> list[torch.Tensor]:
        """What the backward reads: primals (a buffer that is about to change as a copy), outputs, captures."""
        saved = [primals[i] for i in self._saved_primals]
        for position, index in enumerate(self._saved_primals):
            if index in self._mutated:
                saved[position] = saved[position].clone()
        return saved + [values[i] for i in self._saved_outputs] + values[self._num_results :]

    def backward_for(self, outputs: tuple[int, ...]) -> _Backward:
        """The backward for a call in which these outputs got a grad_out; compiled when first asked for."""
        found = self._backwards.get(outputs)
        if found is None:
            with interrupts_deferred():
                found = self._backwards[outputs] = _Backward(self._lowered, outputs, self._options)
        return found


class _Backward:
    """The backward program of one pattern of grad_outs; called with saved tensors and grad_outs."""

    def __init__(self, lowered: LoweredCall, outputs: tuple[int, ...], options: CompileOptions):
        full = outputs == lowered.differentiable
        function = lowered.backward if full else lowered.backward_for(outputs)
        self.program = _compiled(function, lowered.captured.module_name, "backward", options)
        self._run = _under_name(self.program, lowered.captured.module_name, "backward")
        count = len(function.params)
        self._copies = self.program.shared_results(handed_on=range(count - len(outputs), count))
        gradients = lowered.gradients_for(outputs)
        self._absent = [position for position, i in enumerate(lowered.wanted) if i not in gradients]

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """One gradient per wanted input, ``None`` where eager has none. Empties ``inputs``."""
        gradients = self._run(inputs, consume=True)
        for position in self._copies:
            gradients[position] = gradients[position].clone()
        for position in self._absent:  # in ascending order, so that the later positions are still to come
            gradients.insert(position, None)
        return gradients


def _compiled(function: Function, module_name: str, direction: str, options: CompileOptions) -> Program:
    """The program of a function. :class:`UnsupportedModule` names an operator that there is no kernel for."""
    try:
        options = replace(options, sums_in_place=direction == "backward")
        return compile_function(function, name=f"{module_name}_{direction}", options=options)
    except NotImplementedError as error:
        words = str(error).replace(":", " ").split()
        op = next((word for word in words if word.startswith(("relax.", "library."))), "a Relax operator")
        problem = Unsupported(op, f"{module_name}'s {direction}", str(error))
        raise UnsupportedModule(module_name, [problem], cause=error) from None
    except Exception as error:
        raise CompilationError(f"compile {direction}", function.script(), error) from error


def _under_name(program: Program, module_name: str, direction: str) -> Callable[..., list[torch.Tensor]]:
    """The program; if it was compiled for an equal module of another class, a profiler is told the name of this one."""
    name = f"{module_name}_{direction}"
    execute = program.executor
    if program.name == name:
        return execute

    def run(inputs: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
        if not profiler._is_profiler_enabled:
            return execute(inputs, **options)
        with profiler.record_function(f"tvm: {name}"):
            return execute(inputs, **options)

    return run


def outside_autocast(run: Callable[[list], list], inputs: list) -> list:
    """Runs compiled code: the casts that autocast made are in it, those of the backward included."""
    if not torch.is_autocast_enabled("cpu"):
        return run(inputs)
    with torch.autocast("cpu", enabled=False):
        return run(inputs)
