"""The compiled programs of a call: the forward, and a backward for each set of outputs that got a grad_out.

A frozen call has two programs: one computes the constants from the module's tensors (:class:`Constants`), when the
entry is made and after a tensor has changed; the other maps a call's arguments to results. Neither contains values of
the module, so equal modules share both.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

import torch

from autodiff.extents import SizeGuard
from autodiff.ir import results
from autodiff.lazy import cached_property
from bridge.base.errors import Unsupported, UnsupportedModule
from bridge.base.tensor_properties import as_parts
from bridge.base.threads import free_in_children, interrupts_deferred
from bridge.base.torch_internals import VF
from bridge.capture import functions_of_torch
from bridge.compile import Backend, CompileOptions, EntryGraphs, Liveness, Program, RecordedGraphs
from bridge.dispatch.backward_nodes import (
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
from bridge.dispatch.executable import Executable
from bridge.dispatch.guards import Sizes
from bridge.dispatch.recompute import RecomputedMasks
from bridge.dispatch.results import backward_orders, forward_orders, memory_orders
from bridge.lowering import FrozenCall, LoweredCall, freeze_call

__all__ = ["BackwardRun", "Constants", "Programs", "compile_programs", "freeze_programs"]

Holds = Callable[[Sizes], SizeGuard | None]
Nodes = tuple[tuple[int, ...], ...]

_LATER = free_in_children(threading.RLock())
"""Held while a scope assumes sizes other than the sample's."""

_MOST_LATER = 8
"""Most backwards for one set of outputs, which differ in their guards on sizes; the newest are kept."""


@dataclass(frozen=True)
class Constants:
    """The constants of a frozen call, computed from the module's tensors.

    Attributes:
        executable: the program that computes them.
        weights: places of constants that are folded factors of products.
        stages: the lowering's stages; ``None`` for a loaded program.
    """

    executable: Executable
    weights: tuple[int, ...]
    stages: FrozenCall | None = None

    @torch.inference_mode(False)  # the constants serve calls in any mode
    def bound(self, call: Executable, tensors: Sequence[torch.Tensor]) -> Executable:
        """The call's program, whose last parameters are the constants, with the constants of these module's tensors.

        Raises:
            UnsupportedModule: a folded weight is not finite.
        """
        with torch.no_grad():
            made = self.executable.run(list(map(as_parts, tensors)))
        params, name = call.program.layout.params, call.module_name
        for place in self.weights:
            if not bool(VF.isfinite(made[place]).all()):
                weight = params[len(params) - len(made) + place].name
                what = Unsupported(weight, name, "not finite once a scale or a shift is folded into it")
                raise UnsupportedModule(name, [what])
        return call.with_constants(made, len(tensors))


class Programs:
    """Forward and backwards of one call, compiled: for all sizes, or (:meth:`at`) for given ones.

    Attributes:
        forward: the compiled forward.
        num_outputs: number of results that the module returns; new buffer values and saved tensors follow them.
        differentiable: indices of the outputs that take a grad_out; ``not_differentiable``: of the other outputs.
        device_type: the type of the programs' device, for autocast.
        masks: recomputed dropout masks, or ``None``.
        constants: the constants of a frozen call, which are bound to its forward; ``None``: the call is not frozen.
        nodes: per autograd node of a backward, in the order of execution, the places of its gradients among the inputs
            that get one; most modules have one node.
        eager_backwards: number of backwards by eager's operators, by reason.
        sizes: symbol name → size; ``None``: all sizes, or static shapes.

    Args:
        make: compiles the backward for grad_outs of some outputs, and for sizes, if any.
        expected: the outputs from which a training loop runs backward.
        eager: the backward by eager's operators.
    """

    def __init__(
        self,
        forward: Executable,
        num_outputs: int,
        differentiable: Sequence[int] = (),
        make: Callable[[tuple[int, ...], Sizes | None], BackwardRun] | None = None,
        expected: tuple[int, ...] = (),
        nodes: Nodes = ((),),
        masks: RecomputedMasks | None = None,
        eager: EagerBackward | None = None,
        constants: Constants | None = None,
    ):
        self.forward, self.num_outputs, self.differentiable = forward, num_outputs, tuple(differentiable)
        self.not_differentiable = [place for place in range(num_outputs) if place not in differentiable]
        self.device_type = forward.program.backend.device.type
        self.nodes, self.masks, self._eager, self._make, self._expected = nodes, masks, eager, make, expected
        self.eager_backwards: Counter[str] = Counter()
        self.sizes, self.constants = None, constants
        self._backwards: dict[tuple[int, ...], BackwardRun] = {}

    @property
    def is_frozen(self) -> bool:
        """Whether the module's tensors are constants of the forward."""
        return self.constants is not None

    @property
    def device(self) -> torch.device:
        """The programs' device."""
        return self.forward.program.backend.device

    @property
    def frozen(self) -> FrozenCall | None:
        """The stages of a frozen call's lowering; ``None`` for another call or a loaded one."""
        return None if self.constants is None else self.constants.stages

    def renewed(self, tensors: Sequence[torch.Tensor]) -> Programs:
        """The same programs with constants from these module's tensors. Raises as :meth:`Constants.bound`."""
        found = copy(self)
        found.forward = self.constants.bound(self.forward, tensors)
        return found

    def at(self, sizes: Sizes) -> Programs:
        """A copy for one combination of sizes of the symbolic extents."""
        found = copy(self)
        found.__dict__.pop("eager_backward", None)
        found.forward, found.sizes, found._backwards = self.forward.at(sizes), sizes, {}
        return found

    @cached_property
    def eager_backward(self) -> EagerBackward | None:
        """The differentiable backward by eager's operators; ``None``: nothing requires grad, or a loaded program."""
        return self._eager if self.sizes is None or self._eager is None else self._eager.at(self.sizes)

    @property
    def backward(self) -> BackwardRun | None:
        """The backward for grad_outs of the outputs from which a training loop runs backward, or ``None``."""
        return self.backward_for(self._expected) if self.differentiable else None

    def backward_for(self, outputs: tuple[int, ...]) -> BackwardRun:
        """The backward for grad_outs of these outputs; compiled at first use."""
        found = self._backwards.get(outputs)
        if found is None:
            found = self._backwards[outputs] = self._make(outputs, self.sizes)
        return found

    @property
    def backwards(self) -> dict[tuple[int, ...], BackwardRun]:
        """Outputs with a grad_out → backward, for the backwards used so far."""
        return dict(self._backwards)


@functions_of_torch()
def compile_programs(
    lowered: LoweredCall,
    backend: Backend,
    graphs: RecordedGraphs | None = None,
    addresses: Mapping[int, int] | None = None,
) -> Programs:
    """Compiles forward and backward of a lowered call.

    Args:
        graphs: control and statistics of CUDA graphs; ``None``: no graphs.
        addresses: see :class:`bridge.dispatch.recompute.RecomputedMasks`.

    Raises:
        UnsupportedModule: an operator has no kernel.
        CompilationError: compiling failed, a bug of this package.
    """
    name, num_outputs = lowered.captured.module_name, lowered.imported.num_outputs
    shared = None if graphs is None else EntryGraphs(graphs)
    options, masks = CompileOptions.current(backend), RecomputedMasks(lowered, backend, addresses)
    forward = Executable(
        lowered.forward_source,
        name,
        "forward",
        replace(options, **forward_orders(lowered)),
        masks.forward,
        None if shared is None else partial(shared.forward, outputs=num_outputs, saved_tensors=lowered.num_results),
    )
    if not lowered.differentiable:
        made = Programs(forward, num_outputs, masks=masks)
    else:
        make = _Backwards(lowered, options, masks, shared)  # while the forward compiles in the background
        _ = forward.program
        make.finish()
        eager = EagerBackward(lowered, masks)
        made = Programs(forward, num_outputs, lowered.differentiable, make, lowered.expected, make.nodes, masks, eager)
    if lowered.captured.sizes.scope is None:
        _ = forward.run
        if made.backward is not None:
            made.backward.wait()
    return made


class _Backwards:
    """Compiles the backwards of one lowered call, by the outputs that got a grad_out, and sizes.

    A backward other than the expected one is compiled later, for the sizes of the call that needs it. Its guards on
    sizes cannot become guards of the entry: if they fail for another call, another backward is compiled.
    """

    def __init__(
        self, lowered: LoweredCall, options: CompileOptions, masks: RecomputedMasks, graphs: EntryGraphs | None
    ):
        self._lowered, self._options, self._masks, self._graphs = lowered, options, masks.backward, graphs
        self._expected = self._begun(lowered.expected)
        self._made: dict[tuple[int, ...], list[tuple[Holds, BackwardRun]]] = {}

    def finish(self) -> None:
        """Finishes the expected backward, which determines :attr:`nodes`."""
        lowered, program = self._lowered, self._expected.program
        self.nodes: Nodes = (tuple(range(len(lowered.wanted))),)
        if most_nodes(program) > 1:
            flow = Liveness(program)
            self.nodes = nodes_of(program, flow, self._gradients(lowered.expected, program, flow), len(lowered.wanted))
        self._made[lowered.expected] = [(_always, self._run(lowered.expected, self._expected))]

    def __call__(self, outputs: tuple[int, ...], sizes: Sizes | None) -> BackwardRun:
        with _LATER:
            known = self._made.setdefault(outputs, [])
            found = next((run for broken, run in known if broken(sizes) is None), None)
            if found is None:
                scope = self._lowered.captured.sizes.scope
                assumed = nullcontext() if scope is None else scope.assuming(sizes)
                with interrupts_deferred(), functions_of_torch(), assumed as guards:
                    found = self._run(outputs, self._begun(outputs))
                known.append((_always if scope is None else scope.broken(guards), found))
                del known[:-_MOST_LATER]
        return found if sizes is None else found.at(sizes)

    def _begun(self, outputs: tuple[int, ...]) -> Executable:
        lowered = self._lowered
        graphed = None if self._graphs is None else partial(self._graphs.backward, grad_outs=len(outputs))
        options = replace(self._options, grad_outs=len(outputs), **backward_orders(lowered, outputs))
        source, name = lowered.backward_source(outputs), lowered.captured.module_name
        return Executable(source, name, "backward", options, self._masks, graphed)

    def _run(self, outputs: tuple[int, ...], executable: Executable) -> BackwardRun:
        """Finishes a compilation, except machine code; cuts the program into a segment per autograd node."""
        lowered, program = self._lowered, executable.program
        count, names, wanted = len(program.layout.params), input_names(lowered), lowered.wanted
        copied = program.shared_results(handed_on=range(count - len(outputs), count))
        gradients = lowered.gradients_for(outputs)
        absent = tuple(place for place, index in enumerate(wanted) if index not in gradients)
        given = tuple(names[index] for index in wanted if index in gradients)
        step = Backward(executable.name, outputs, given, tuple(copied), absent)
        if len(self.nodes) == 1:
            return BackwardRun(executable, step)
        flow = Liveness(program)
        made = self._gradients(outputs, program, flow)
        result_of = {each.place: result for result, each in enumerate(made)}
        told = tuple(tuple(names[wanted[place]] for place in node if place in result_of) for node in self.nodes)
        executable = executable.in_segments(places_of(program, flow, made, self.nodes))
        taken = [[result_of.get(place) for place in node] for node in self.nodes]
        return BackwardRun(executable, replace(step, nodes=told), taken)

    def _gradients(self, outputs: tuple[int, ...], program: Program, flow: Liveness) -> list[Gradient]:
        lowered = self._lowered
        gradients = lowered.gradients_for(outputs)
        places = [place for place, index in enumerate(lowered.wanted) if index in gradients]
        slot_of = {index: slot for slot, index in enumerate(lowered.plan.saved_primals)}
        inputs = {place: slot_of[lowered.wanted[place]] for place in places if lowered.wanted[place] in slot_of}
        return gradients_of(program, flow, places, inputs)


def _always(sizes: Sizes | None) -> None:
    """The guard of static shapes: no sizes break it."""


class BackwardRun:
    """The backward for one set of outputs: saved tensors + grad_outs → gradients.

    Attributes:
        executable: the compiled program; ``step``: its description as a call step.

    Args:
        taken: per autograd node, the places of its gradients among the results; empty for a single node.
    """

    def __init__(self, executable: Executable, step: Backward, taken: Sequence[Sequence[int | None]] = ()):
        self.executable, self.step, self._taken = executable, step, taken

    @property
    def program(self) -> Program:
        """The whole program."""
        return self.executable.program

    def at(self, sizes: Sizes) -> BackwardRun:
        """A copy for one combination of sizes of the symbolic extents."""
        return BackwardRun(self.executable.at(sizes), self.step, self._taken)

    def wait(self) -> None:
        """Waits for the machine code; raises its compilation errors."""
        _ = self.executable.segments if self._taken else self.executable.run

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """One gradient per wanted input, ``None`` where eager has none. Empties ``inputs``."""
        gradients = self.executable.run(inputs, consume=True)
        for place in self.step.copied:
            gradients[place] = gradients[place].clone()
        for place in self.step.absent:  # ascending: a place counts the gradients inserted before it
            gradients.insert(place, None)
        return gradients

    def begin(self, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Runs the first segment → the first node's gradients, then a token with the run. Empties ``inputs``."""
        run = SegmentedRun(self.executable.segments, self._taken, self.step.copied, inputs)
        return [*run(0), make_token(self.program.backend.device, run)]


def freeze_programs(
    lowered: LoweredCall, backend: Backend, tensors: Sequence[torch.Tensor], graphs: RecordedGraphs | None = None
) -> Programs:
    """Compiles a lowered call with the module's tensors as constants.

    Args:
        tensors: the module's tensors, from the guard.
        graphs: control and statistics of CUDA graphs; ``None``: no graphs.

    Raises:
        UnsupportedModule: the call cannot be frozen, an operator has no kernel, or a folded weight is not finite.
        CompilationError: compiling failed, a bug of this package.
    """
    name, outputs = lowered.captured.module_name, lowered.imported.num_outputs
    options, frozen = CompileOptions.current(backend), freeze_call(lowered)
    orders = memory_orders(lowered.captured, lowered.imported.output_of)
    same = replace(options, constants=len(results(frozen.constants)), orders=orders)
    shared = None if graphs is None else EntryGraphs(graphs)
    graphed = None if shared is None else partial(shared.forward, outputs=outputs, saved_tensors=lowered.num_results)
    constants = Executable(frozen.constants, name, "constants", options)
    call = Executable(frozen.call, name, "forward", same, graphed=graphed)
    _ = constants.program, call.program  # whose compilation may time candidates, before either's machine code
    made = Constants(constants, tuple(frozen.weights), frozen)
    return Programs(made.bound(call, tensors), outputs, constants=made)
