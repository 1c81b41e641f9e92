"""Piecewise CUDA graphs: a run → captured graphs, and the library calls between them.

A library call's results are in memory that it allocates, which a recording must not hand out. If one is a result of the
run, the call writes it into the caller's memory if it can; otherwise it is copied there at the end.

A call with an explicit generator offset (attention's dropout) is not captured: inside of a capture, torch's kernels
take the generator's state only from torch's own graphs, and other threads could not draw meanwhile. So a run ends a
graph before the call and begins the next one after it. A replay launches the graphs in order and repeats the calls in
between: they read the graphs' results in place, and their results are copied to the next graph's inputs. In the
backward, attention's kernel reads the state from the device and is captured; a replay copies the state there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bridge.base.tensor_properties import span_of
from bridge.base.torch_internals import VF
from bridge.compile.cuda.copies import bring, copy
from bridge.compile.cuda.executor import ALIGNMENT, CudaExecutor
from bridge.compile.graphs.recordings import Form, Replay
from bridge.compile.loop_ir.views import dense_strides
from bridge.compile.runtime.executor import Executor, bind
from bridge.compile.runtime.instructions import CallLibrary, MakeView
from bridge.compile.runtime.layout import ArenaPool
from bridge.compile.runtime.loop_frame import Instruction, RunLoop, inner_steps
from bridge.compile.runtime.program import Program
from bridge.library import DRAWS_AT_OFFSET, INTO_GIVEN, invoke_into

__all__ = ["PiecewiseExecutor", "PiecewiseGraphs", "inside_of_loops", "is_between"]


def is_between(step: Instruction) -> bool:
    """Whether each replay repeats a step between two graphs."""
    return isinstance(step, CallLibrary) and step.name in DRAWS_AT_OFFSET


def inside_of_loops(steps: Sequence[Instruction]) -> Iterator[Instruction]:
    """The steps of loops, which are captured as a whole."""
    for step in steps:
        if isinstance(step, RunLoop):
            yield from inner_steps(step.steps)


@dataclass(frozen=True)
class _Origin:
    """The origin of a tensor among a call's tensors.

    Attributes:
        place: among inputs and memory for results, in a row.
        geometry: shape, strides and offset of a view of it; ``None``: the tensor itself.
        order: see :class:`bridge.compile.runtime.layout.Register`.
    """

    place: int
    geometry: tuple[tuple[int, ...], tuple[int, ...], int] | None
    order: tuple[int, ...] | None

    def of(self, given: Sequence[torch.Tensor]) -> torch.Tensor:
        tensor = given[self.place]
        if self.order is not None:
            tensor = tensor.permute(self.order)
        if tensor.data_ptr() % ALIGNMENT or not tensor.is_contiguous():  # as in a run without recording
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        if self.geometry is None:
            return tensor
        shape, strides, offset = self.geometry
        return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)


def _origin(
    slot: int, views: Mapping[int, MakeView], given: Mapping[int, int], orders: Mapping[int, tuple[int, ...] | None]
) -> _Origin | None:
    """The origin of a slot's tensor, or ``None`` if it is in none of the call's. ``orders``: of parameters, by slot."""
    geometry, offset = None, 0
    while (view := views.get(slot)) is not None:
        geometry = geometry or (view.shape, view.strides)
        offset += view.offset
        (slot,) = view.reads
    if slot not in given:
        return None
    return _Origin(given[slot], None if geometry is None else (*geometry, offset), orders.get(slot))


@dataclass(frozen=True)
class _Kept:
    """A call's memory for a result that a library function allocates; ``place``: as in :class:`_Origin`."""

    memory: torch.Tensor
    place: int


class _Between:
    """A library call between two graphs. All recordings of a program for one stream share it: they run one at a time.

    Args:
        views: all views, by slot; ``given``: places of a call's tensors, by slot; ``orders``: of parameters.

    Attributes:
        memory: slot → memory of a result for later graphs, unless it is the caller's; from the first recording.
    """

    def __init__(
        self,
        step: CallLibrary,
        views: Mapping[int, MakeView],
        given: Mapping[int, int],
        orders: Mapping[int, tuple[int, ...] | None],
    ):
        self._step, self._action, self._views, self._given = step, bind(step, {}, {}), views, given
        self._orders = orders
        self.memory: dict[int, torch.Tensor] = {}

    def record(
        self,
        registers: list,
        on_host: Mapping[int, torch.Tensor],
        kept: Mapping[int, _Kept],
        take: Callable[[Form], torch.Tensor],
    ) -> Replay:
        """Puts the memory of the call's results into the registers.

        Makes the call on ones, only to learn its results' metadata: the run's values do not exist yet, and a kernel
        that finds an invalid parameter of a distribution ends the process's work on the GPU.

        Args:
            on_host: states, by slot; ``kept``: the caller's memory, by slot.
            take: allocates other memory.
        """
        step, action = self._step, self._action
        there = {slot: each.place for slot, each in kept.items() if registers[slot] is each.memory}
        given = {**self._given, **there}
        found = {slot: _origin(slot, self._views, given, self._orders) for slot in step.reads}
        origins = {slot: origin for slot, origin in found.items() if origin is not None}
        missing = [slot for slot in step.writes if slot not in kept and slot not in self.memory]
        if missing:
            tried = {slot: on_host[slot] if slot in on_host else _ones(registers[slot]) for slot in step.reads}
            action(tried)
            for slot in missing:
                made = tried[slot]
                self.memory[slot] = take((tuple(made.shape), dense_strides(made.shape), made.dtype))
        places = {slot: kept[slot].place for slot in step.writes if slot in kept}
        memory = {slot: self.memory[slot] for slot in step.writes if slot not in kept}
        for slot in step.writes:
            registers[slot] = kept[slot].memory if slot in kept else memory[slot]
        own = {slot: registers[slot] for slot in step.reads if slot not in origins}

        def replay(given: Sequence[torch.Tensor]) -> None:
            found = dict(own)
            for slot, origin in origins.items():
                found[slot] = origin.of(given)
            action(found)
            copy(
                [
                    *((target, found[slot]) for slot, target in memory.items()),
                    *((given[place], found[slot]) for slot, place in places.items()),
                ]
            )

        return replay


def _ones(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of ones with the same layout, valid as any operator's argument."""
    memory = VF.ones(span_of(tensor.shape, tensor.stride()), dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, tensor.stride())


class PiecewiseGraphs:
    """The pieces of one run, in order, while it is recorded.

    Args:
        capture: a context that captures the current stream; its value contains the graph afterwards.
        launch: a graph → the function that launches it.
    """

    def __init__(
        self, capture: Callable[[], AbstractContextManager[list[Any]]], launch: Callable[[Any], Callable[..., Any]]
    ):
        self._capture, self._launch = capture, launch
        self._stack = ExitStack()
        self._made: list[Any] = []
        self.parts: list[Replay] = []

    def __enter__(self) -> PiecewiseGraphs:
        self._made = self._stack.enter_context(self._capture())
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
        if error[0] is None:
            self.parts += [self._launch(graph) for graph in self._made if not graph.is_empty]

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Ends the current graph, and begins the next one afterwards."""
        self.__exit__(None, None, None)
        yield
        self.__enter__()


class PiecewiseExecutor(CudaExecutor):
    """Runs a program in the memory of one stream's recordings. Its runs are recorded, one at a time.

    Attributes:
        brought: slot of a generator's state that captured steps read → its memory on the device.
    """

    __call__ = Executor.__call__

    def __init__(self, program: Program, device: torch.device, pool: ArenaPool):
        super().__init__(program, device, pool)
        layout = self._layout
        views = {step.writes[0]: step for step in (*self.steps, *layout.views) if isinstance(step, MakeView)}
        slots = [*range(len(layout.params)), *(made.slot for made in layout.fresh)]
        place_of = {slot: place for place, slot in enumerate(slots)}
        orders = {param.slot: param.order for param in layout.params}
        self._between: dict[int, _Between] = {}
        for index, step in enumerate(self.steps):
            if is_between(step):
                self._between[index] = _Between(step, views, place_of, orders)
        read = {slot for step in self.steps if not is_between(step) for slot in step.reads}
        self._on_host = [slot for slot, param in enumerate(layout.params) if param.lies_on_host]
        self.brought = {slot: self._state() for slot in self._on_host if slot in read}
        self._pieces: PiecewiseGraphs | None = None
        self._take_between: Callable[[Form], torch.Tensor] | None = None
        self._kept: dict[int, _Kept] = {}
        self._writers = {
            index: INTO_GIVEN[step.name]
            for index, step in enumerate(self.steps)
            if isinstance(step, CallLibrary) and step.allocates and step.name in INTO_GIVEN
        }
        self._states: dict[int, torch.Tensor] = {}

    @contextmanager
    def recorded_by(
        self,
        pieces: PiecewiseGraphs,
        take: Callable[[Form], torch.Tensor],
        copies: Sequence[tuple[int, torch.Tensor]] = (),
    ) -> Iterator[None]:
        """A context in which a run is recorded as ``pieces``.

        Args:
            take: allocates memory for results of calls between graphs.
            copies: ``(place, memory)`` of results that library calls allocate; returned if the run wrote it.
        """
        self._pieces, self._take_between = pieces, take
        first = len(self._layout.params) + len(self._layout.fresh)
        for number, (place, memory) in enumerate(copies):
            self._kept[self._layout.results[place]] = _Kept(memory, first + number)
        if self.brought:
            pieces.parts.insert(0, self._bring)
        try:
            yield
        finally:
            self._pieces = self._take_between = None
            self._states, self._kept = {}, {}

    @torch.inference_mode(False)  # it serves runs of any mode
    def _state(self) -> torch.Tensor:
        return VF.empty(2, dtype=torch.uint64, device=self._device)

    def _bring(self, given: Sequence[torch.Tensor]) -> None:
        bring(self._states_of(given))

    def _states_of(self, given: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """``(device memory, state on the host)`` of a call's states."""
        return [(memory, given[slot]) for slot, memory in self.brought.items()]

    def _bring_states(self, registers: list) -> None:
        """Uses the memory shared by all runs; a piece of the run copies the states there."""
        self._states = {slot: registers[slot] for slot in self._on_host}
        for slot, memory in self.brought.items():
            registers[slot] = memory

    def _act(self, registers: list) -> None:
        for index, (action, last_used) in enumerate(self.actions):
            if index in self._between:
                self._interrupt(index, registers)
            elif not (index in self._writers and self._is_written(index, registers)):
                action(registers)
            for slot in last_used:
                registers[slot] = None

    def _is_written(self, index: int, registers: list) -> bool:
        """Lets a library call write all its results into the caller's memory, if possible; returns whether it did."""
        step = self.steps[index]
        if not all(slot in self._kept for slot in step.writes):
            return False
        outs = [self._kept[slot].memory for slot in step.writes]
        values = [list(value) if isinstance(value, tuple) else value for value in step.attrs]
        if not invoke_into(self._writers[index], outs, values, [registers[slot] for slot in step.reads]):
            return False
        for slot, out in zip(step.writes, outs, strict=True):
            registers[slot] = out
        return True

    def _interrupt(self, index: int, registers: list) -> None:
        """Makes a call between two graphs."""
        with self._pieces.interrupted():
            part = self._between[index].record(registers, self._states, self._kept, self._take_between)
        self._pieces.parts.append(part)
