"""The compiled programs of a lowered call: the forward, and a backward for each pattern of grad_outs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch.autograd import profiler

from autodiff.extents import SizeGuard
from autodiff.ir import Function
from bridge.base.errors import CompilationError, Unsupported, UnsupportedModule
from bridge.base.threads import free_in_children, interrupts_deferred
from bridge.compile import (
    Backend,
    Compilation,
    CompileOptions,
    DrawnMask,
    EntryGraphs,
    KeptFunction,
    Liveness,
    Program,
    RecordedGraphs,
    Segment,
    cut,
)
from bridge.dispatch.backward_nodes import (
    BoundSegment,
    Gradient,
    SegmentedRun,
    gradients_of,
    make_token,
    most_nodes,
    nodes_of,
    places_of,
)
from bridge.dispatch.call_steps import Backward, input_names
from bridge.dispatch.eager_backward import EagerBackward
from bridge.dispatch.guards import Sizes
from bridge.dispatch.recompute import ComputedMasks
from bridge.dispatch.results import backward_orders, forward_orders
from bridge.lowering import LoweredCall, script

__all__ = ["BackwardRun", "BoundPrograms", "Compiling", "Programs"]

Execute = Callable[..., list[torch.Tensor]]
Graphed = Callable[[Program, Execute, Program], Execute]
Holds = Callable[[Sizes], SizeGuard | None]
_LATER = free_in_children(threading.RLock())
"""Held while a scope answers for sizes other than the sample's."""

_MOST_LATER = 8
"""Backwards of one pattern of grad_outs, by what they conclude about the sizes; the newest stay."""


class Programs:
    """Forward and backwards of one lowered call, compiled.

    Attributes:
        forward: the forward program.
        execute: runs it: primals → results. Where extents are symbolic, :class:`BoundPrograms` run.
        num_wanted: how many inputs get a gradient, for some grad_outs.
        num_outputs: results that the module returns; new buffer values and captures come after them.
        differentiable: indices of the outputs that take a grad_out; ``not_differentiable``: the others.
        device: that they run on; ``device_type``: as autocast names it.
        masks: those that they compute.
        is_frozen: whether the module's tensors are constants of the forward.
        nodes: of each autograd node of a backward, in the order in which they run, the places among the inputs that
            get a gradient of those whose it returns; most modules have one.
        eager_backward: the backward by eager's operators, which can be differentiated; ``None``: nothing requires grad.
        eager_backwards: how often that was, by the reason.

    Args:
        graphs: whether they are recorded as graphs, and what becomes of that; ``None``: they are not.
        addresses: see :class:`bridge.dispatch.recompute.ComputedMasks`.

    Raises:
        UnsupportedModule: there is no kernel for an operator.
        CompilationError: compiling failed, a bug of this package.
    """

    is_frozen = False

    def __init__(
        self,
        lowered: LoweredCall,
        backend: Backend,
        graphs: RecordedGraphs | None = None,
        addresses: Mapping[int, int] | None = None,
    ):
        name = lowered.captured.module_name
        self._graphs = None if graphs is None else EntryGraphs(graphs)
        self._lowered = lowered
        self._is_symbolic = lowered.captured.extents is not None
        self._options = CompileOptions.current(backend)
        self.device, self.device_type = backend.device, backend.device.type
        self.masks = ComputedMasks(lowered, backend, addresses)
        options = replace(self._options, **forward_orders(lowered))
        self._forward = forward = Compiling(lowered.forward_source, name, "forward", options, self.masks.forward)
        if self._graphs is not None:
            forward.graphed = partial(
                self._graphs.forward, outputs=lowered.imported.num_outputs, captures=lowered.num_results
            )
        self.num_wanted = len(lowered.wanted)
        self.num_outputs = lowered.imported.num_outputs
        self.differentiable = lowered.differentiable
        self.not_differentiable = [i for i in range(self.num_outputs) if i not in lowered.differentiable]
        self._backwards: dict[tuple[int, ...], BackwardRun] = {}
        self._later: dict[tuple[int, ...], list[tuple[Holds, BackwardRun]]] = {}
        expected = lowered.expected
        self.nodes: tuple[tuple[int, ...], ...] = (tuple(range(self.num_wanted)),)
        self.eager_backward = EagerBackward(lowered, self.masks) if lowered.differentiable else None
        self.eager_backwards: Counter[str] = Counter()
        backward = self._backward_run(expected) if lowered.differentiable else None
        self.forward = forward.program()
        if backward is not None:
            backward.compile()
            self.nodes = backward.nodes(self.num_wanted)
            backward.split(self.nodes)
            self._backwards[expected] = backward
        if self._is_symbolic:
            return
        self.execute = forward.execute()
        if backward is not None:
            backward.wait()

    def forward_for(self, sizes: Sizes) -> Execute:
        """Runs the forward program for these sizes."""
        return self._forward.execute(sizes)

    @property
    def forward_function(self) -> Function:
        """What :attr:`forward` was compiled from."""
        return self._lowered.forward

    @property
    def backward(self) -> BackwardRun | None:
        """The backward for grad_outs of the outputs that a training loop goes backward from, or ``None``."""
        return self._backwards.get(self._lowered.expected)

    def backward_for(self, outputs: tuple[int, ...]) -> BackwardRun:
        """The backward for a call in which these outputs got a grad_out; compiled when first asked for."""
        found = self._backwards.get(outputs)
        if found is None:
            with interrupts_deferred():
                found = self._backward_run(outputs)
                found.compile()
                found.split(self.nodes)
                self._backwards[outputs] = found
        return found

    @property
    def backwards(self) -> dict[tuple[int, ...], BackwardRun]:
        """Those that are compiled, by the outputs that got a grad_out; of all sizes."""
        return dict(self._backwards)

    def _backward_run(self, outputs: tuple[int, ...]) -> BackwardRun:
        graphed = None if self._graphs is None else partial(self._graphs.backward, grad_outs=len(outputs))
        return BackwardRun(self._lowered, outputs, self._options, self.masks.backward, graphed)

    def backward_at(self, outputs: tuple[int, ...], sizes: Sizes) -> BackwardRun:
        """As :meth:`backward_for`, where extents are symbolic: one that is right for these sizes.

        What is compiled after the forward is compiled for the sizes of the call that asks for it. What that concludes
        about them is no condition of calls that the forward serves already; where it does not hold, another is made.
        """
        if outputs == self._lowered.expected:
            return self._backwards[outputs].bound(sizes)
        scope = self._lowered.captured.extents
        with _LATER:
            known = self._later.setdefault(outputs, [])
            found = next((run for broken, run in known if broken(sizes) is None), None)
            if found is None:
                with interrupts_deferred(), scope.assuming(sizes) as guards:
                    found = self._backward_run(outputs)
                    found.compile()
                    found.split(self.nodes)
                known.append((scope.broken(guards), found))
                del known[:-_MOST_LATER]
        return found.bound(sizes)


class BoundPrograms:
    """Forward and backwards for one combination of sizes; attributes as of :class:`Programs`.

    Args:
        programs: those of all sizes.
        sizes: by the names of the symbols.
    """

    def __init__(self, programs: Programs, sizes: Sizes):
        self._programs, self._sizes = programs, sizes
        self.execute, self.device_type = programs.forward_for(sizes), programs.device_type
        self.num_wanted, self.num_outputs = programs.num_wanted, programs.num_outputs
        self.differentiable, self.not_differentiable = programs.differentiable, programs.not_differentiable
        self.nodes, self.device = programs.nodes, programs.device
        self._backwards: dict[tuple[int, ...], BackwardRun] = {}

    @cached_property
    def eager_backward(self) -> EagerBackward | None:
        """As :attr:`Programs.eager_backward`."""
        return None if self._programs.eager_backward is None else self._programs.eager_backward.at(self._sizes)

    @property
    def eager_backwards(self) -> Counter[str]:
        """As :attr:`Programs.eager_backwards`."""
        return self._programs.eager_backwards

    def backward_for(self, outputs: tuple[int, ...]) -> BackwardRun:
        """As :meth:`Programs.backward_for`, bound when first asked for."""
        found = self._backwards.get(outputs)
        if found is None:
            found = self._backwards[outputs] = self._programs.backward_at(outputs, self._sizes)
        return found


class BackwardRun:
    """The backward of one pattern of grad_outs; called with saved tensors and grad_outs, once it is compiled.

    Attributes:
        program: its program.
        step: what a call of it does.
    """

    def __init__(
        self,
        lowered: LoweredCall,
        outputs: tuple[int, ...],
        options: CompileOptions,
        masks: Mapping[int, DrawnMask],
        graphed: Graphed | None = None,
    ):
        self._lowered, self._outputs, self._sizes = lowered, outputs, None
        self._name = f"{lowered.captured.module_name}_backward"
        self._segments: tuple[Segment, ...] = ()
        name = lowered.captured.module_name
        options = replace(options, sums_in_place=True, grad_outs=len(outputs), **backward_orders(lowered, outputs))
        self._compiling = Compiling(lowered.backward_source(outputs), name, "backward", options, masks)
        self._compiling.graphed = graphed

    def compile(self) -> None:
        """Ends the compilation, but for machine code that is in the making."""
        lowered, outputs = self._lowered, self._outputs
        self.program = self._compiling.program()
        count, names = len(self.program.layout.params), input_names(lowered)
        copied = self.program.shared_results(handed_on=range(count - len(outputs), count))
        gradients = lowered.gradients_for(outputs)
        absent = [place for place, index in enumerate(lowered.wanted) if index not in gradients]
        given = tuple(names[index] for index in lowered.wanted if index in gradients)
        self.step = Backward(self._name, outputs, given, tuple(copied), tuple(absent))

    def nodes(self, count: int) -> tuple[tuple[int, ...], ...]:
        """See :attr:`Programs.nodes`; ``count``: of the inputs that get a gradient."""
        if most_nodes(self.program) == 1:
            return (tuple(range(count)),)
        return nodes_of(self.program, self._flow, self._gradients, count)

    def split(self, nodes: Sequence[Sequence[int]]) -> None:
        """Cuts the program into a segment for each autograd node; ``nodes``: places of the inputs by node."""
        if len(nodes) == 1:
            return
        places = places_of(self.program, self._flow, self._gradients, nodes)
        self._segments = cut(self.program, places, self._name)
        result_of = {each.place: result for result, each in enumerate(self._gradients)}
        self._taken = [[result_of.get(place) for place in node] for node in nodes]
        names, wanted = input_names(self._lowered), self._lowered.wanted
        told = tuple(tuple(names[wanted[place]] for place in node if place in result_of) for node in nodes)
        self.step = replace(self.step, nodes=told)

    @cached_property
    def _flow(self) -> Liveness:
        return Liveness(self.program)

    @cached_property
    def _gradients(self) -> list[Gradient]:
        lowered = self._lowered
        gradients = lowered.gradients_for(self._outputs)
        places = [place for place, index in enumerate(lowered.wanted) if index in gradients]
        slot_of = {index: slot for slot, index in enumerate(lowered.plan.saved_primals)}
        inputs = {place: slot_of[lowered.wanted[place]] for place in places if lowered.wanted[place] in slot_of}
        return gradients_of(self.program, self._flow, places, inputs)

    @classmethod
    def made(cls, program: Program, step: Backward) -> BackwardRun:
        """A backward that was compiled before, for one autograd node."""
        found = cls.__new__(cls)
        found.program, found.step, found._sizes, found._segments = program, step, None, ()
        found._execute = program.executor
        return found

    def wait(self) -> None:
        """Waits for the machine code; raises what went wrong with it."""
        _ = self._bound_segments if self._segments else self._execute

    def bound(self, sizes: Sizes) -> BackwardRun:
        """The same for one combination of sizes, where extents are symbolic."""
        found = copy(self)
        found._sizes = sizes
        return found

    @cached_property
    def _execute(self) -> Execute:
        return self._compiling.execute(self._sizes)

    @cached_property
    def _bound_segments(self) -> list[BoundSegment]:
        execute = self._compiling.execute
        return [(each, None if each.program is None else execute(self._sizes, each.program)) for each in self._segments]

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """One gradient per wanted input, ``None`` where eager has none. Empties ``inputs``."""
        gradients = self._execute(inputs, consume=True)
        for place in self.step.copied:
            gradients[place] = gradients[place].clone()
        for place in self.step.absent:  # in ascending order, so that the later places are still to come
            gradients.insert(place, None)
        return gradients

    def begin(self, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """The first segment: the gradients of the first node, and a token with the pass that has begun. Empties
        ``inputs``."""
        run = SegmentedRun(self._bound_segments, self._taken, self.step.copied, inputs)
        return [*run(0), make_token(self.program.backend.device, run)]


class Compiling:
    """A function on its way to a program: see :class:`bridge.compile.Compilation`.

    Attributes:
        graphed: makes what records the program, of the program, of what runs it and of the program of all sizes;
            ``None``: nothing does.

    Raises:
        UnsupportedModule: names an operator that there is no kernel for.
        CompilationError: anything else that goes wrong, at any stage.
    """

    def __init__(
        self,
        function: Function | KeptFunction,
        module_name: str,
        direction: str,
        options: CompileOptions,
        masks: Mapping[int, DrawnMask],
    ):
        self.function, self._module_name, self._direction = function, module_name, direction
        self.graphed: Graphed | None = None
        with self._errors():
            self._compilation = Compilation(function, f"{module_name}_{direction}", options, masks)

    def program(self) -> Program:
        """The program; its machine code may still be in the making."""
        with self._errors():
            return self._compilation.finish()

    def execute(self, sizes: Sizes | None = None, program: Program | None = None) -> Execute:
        """Runs the program, for these sizes where extents are symbolic; waits for its machine code.

        ``program``: what was made of it, with constants in the place of parameters.
        """
        with self._errors():
            whole = self._compilation.finish() if program is None else program
            program = whole if sizes is None else whole.at(sizes)
            execute = _under_name(program, self._module_name, self._direction)
            if sizes is None:
                self._compilation.keep()
            return execute if self.graphed is None else self.graphed(program, execute, whole)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except NotImplementedError as error:
            words = str(error).replace(":", " ").split()
            op = next((word for word in words if word.startswith(("relax.", "library."))), "a Relax operator")
            problem = Unsupported(op, f"{self._module_name}'s {self._direction}", str(error))
            raise UnsupportedModule(self._module_name, [problem], cause=error) from None
        except Exception as error:
            function = self.function.read() if isinstance(self.function, KeptFunction) else self.function
            raise CompilationError(f"compile {self._direction}", script(function), error) from error


def _under_name(program: Program, module_name: str, direction: str) -> Execute:
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
