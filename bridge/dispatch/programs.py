"""The compiled programs of a lowered call: the forward, and a backward for each pattern of grad_outs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import profiler

from autodiff.ir import Function
from bridge.base.errors import CompilationError, Unsupported, UnsupportedModule
from bridge.base.interrupts import interrupts_deferred
from bridge.compile import Backend, CompileOptions, Program, compile_function
from bridge.dispatch.call_plan import input_names
from bridge.dispatch.call_steps import Backward
from bridge.lowering import LoweredCall

__all__ = ["BackwardRun", "Programs"]


class Programs:
    """Forward and backwards of one lowered call, compiled.

    Attributes:
        forward: the forward program.
        execute: runs it: primals → results.
        num_wanted: how many inputs get a gradient, for some grad_outs.
        num_outputs: results that the module returns; new buffer values and captures come after them.
        differentiable: indices of the outputs that take a grad_out; ``not_differentiable``: the others.

    Raises:
        UnsupportedModule: there is no kernel for an operator.
        CompilationError: compiling failed, a bug of this package.
    """

    def __init__(self, lowered: LoweredCall, backend: Backend):
        name = lowered.captured.module_name
        self._lowered = lowered
        self._options = CompileOptions.current(backend)
        self.forward = _compiled(lowered.forward, name, "forward", self._options)
        self.execute = _under_name(self.forward, name, "forward")
        self.num_wanted = len(lowered.wanted)
        self.num_outputs = lowered.imported.num_outputs
        self.differentiable = lowered.differentiable
        self.not_differentiable = [i for i in range(self.num_outputs) if i not in lowered.differentiable]
        self._backwards: dict[tuple[int, ...], BackwardRun] = {}
        if lowered.differentiable:
            self.backward_for(lowered.expected)

    @property
    def backward(self) -> BackwardRun | None:
        """The backward for grad_outs of the outputs that a training loop goes backward from, or ``None``."""
        return self._backwards.get(self._lowered.expected)

    def backward_for(self, outputs: tuple[int, ...]) -> BackwardRun:
        """The backward for a call in which these outputs got a grad_out; compiled when first asked for."""
        found = self._backwards.get(outputs)
        if found is None:
            with interrupts_deferred():
                found = self._backwards[outputs] = BackwardRun(self._lowered, outputs, self._options)
        return found


class BackwardRun:
    """The backward of one pattern of grad_outs; called with saved tensors and grad_outs.

    Attributes:
        program: its program.
        step: what a call of it does.
    """

    def __init__(self, lowered: LoweredCall, outputs: tuple[int, ...], options: CompileOptions):
        function, name = lowered.backward_for(outputs), lowered.captured.module_name
        self.program = _compiled(function, name, "backward", options)
        self._execute = _under_name(self.program, name, "backward")
        count, names = len(function.params), input_names(lowered)
        copied = self.program.shared_results(handed_on=range(count - len(outputs), count))
        gradients = lowered.gradients_for(outputs)
        absent = [place for place, index in enumerate(lowered.wanted) if index not in gradients]
        given = tuple(names[index] for index in lowered.wanted if index in gradients)
        self.step = Backward(f"{name}_backward", outputs, given, tuple(copied), tuple(absent))

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """One gradient per wanted input, ``None`` where eager has none. Empties ``inputs``."""
        gradients = self._execute(inputs, consume=True)
        for place in self.step.copied:
            gradients[place] = gradients[place].clone()
        for place in self.step.absent:  # in ascending order, so that the later places are still to come
            gradients.insert(place, None)
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
