"""The compiled product: a flat list of steps over torch tensors.

A run works on a *frame*: one list with a place for every tensor the steps touch. Places of intermediates and constants
are filled once, when the frame is made, with tensors in the frame's own arena; places of inputs, results and views of
those are filled during a call and emptied after it. Frames are kept in a free-list, so concurrent and re-entrant calls
never share one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter

import torch
from torch.autograd import profiler
from tvm.target import Target
from tvm.tirx import PrimFunc

from bridge.compile.loop_ir.graph import Value
from bridge.compile.loop_ir.views import dense_strides
from bridge.compile.runtime.arena import ArenaPlan
from bridge.compile.runtime.contents import Contents
from bridge.compile.runtime.source import kernel_source

__all__ = ["KernelStep", "LibraryStep", "Program", "Step", "ViewStep"]


@dataclass(frozen=True)
class KernelStep:
    """A generated kernel; ``ops`` are the operators it fuses, in order."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    ops: tuple[str, ...]
    contents: Contents = field(default=Contents(), repr=False)

    def __str__(self) -> str:
        return f"{', '.join(self.outputs)} = kernel {self.name}({', '.join(self.inputs)})  # {' '.join(self.ops)}"


@dataclass(frozen=True)
class LibraryStep:
    """A kernel of torch."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    contents: Contents = field(default=Contents(), repr=False)

    def __str__(self) -> str:
        return f"{', '.join(self.outputs)} = library {self.name}({', '.join(self.inputs)})"


@dataclass(frozen=True)
class ViewStep:
    """A strided view: ``torch.as_strided`` of a dense tensor. No data moves."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def __str__(self) -> str:
        geometry = f"{self.shape}, {self.strides}, {self.offset}"
        return f"{self.outputs[0]} = view {self.name}({self.inputs[0]}, {geometry})"


_FORM = attrgetter("shape", "dtype", "is_cpu")
Step = KernelStep | LibraryStep | ViewStep
Action = Callable[[list], None]
"""A step as a function of the frame."""


@dataclass(frozen=True)
class Layout:
    """Places of a frame.

    ``views``: (place, base place, shape, strides, offset) of arena and constant tensors. ``memory``: of each result,
    the place of the tensor whose memory it is, or is a view of.
    """

    size: int
    params: tuple[Value, ...]
    constants: tuple[tuple[int, torch.Tensor], ...]
    arena: ArenaPlan
    arena_places: tuple[tuple[int, Value], ...]
    views: tuple[tuple[int, int, tuple[int, ...], tuple[int, ...], int], ...]
    fresh: tuple[tuple[int, tuple[int, ...], torch.dtype], ...]
    results: tuple[int, ...]
    kept: frozenset[int]
    memory: tuple[int, ...]


@dataclass(eq=False)
class Program:
    """``program(inputs) -> results`` for one Relax function. Shared by equal functions; safe to call from any thread.

    ``steps`` tells what runs, in order; ``source`` what a kernel does; ``timings`` where compilation spent its seconds;
    ``results`` the names of the results in ``steps``; ``variables`` the function's parameters, then its bindings.
    """

    name: str
    steps: tuple[Step, ...]
    timings: Mapping[str, float]
    actions: tuple[tuple[Action, tuple[int, ...]], ...] = field(repr=False)  # with the places that die after each
    layout: Layout = field(repr=False)
    kernels: Mapping[str, PrimFunc] = field(repr=False)
    target: Target | None = field(default=None, repr=False)
    results: tuple[str, ...] = field(default=(), repr=False)
    variables: tuple[str, ...] = field(default=(), repr=False)
    code: tuple[object, ...] = field(default=(), repr=False)  # the kernels' machine code, which lives as long as this
    _frames: list[tuple[list, list]] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        layout = self.layout
        self._forms = [(torch.Size(v.shape), getattr(torch, v.dtype), True) for v in layout.params]
        self._fresh = [
            (place, partial(torch.empty_strided, shape, dense_strides(shape), dtype=dtype))
            for place, shape, dtype in layout.fresh
        ]
        self._passed_on = [(i, place) for i, place in enumerate(layout.results) if place < len(layout.params)]

    @property
    def arena_bytes(self) -> int:
        """Bytes of intermediates that a run needs."""
        return self.layout.arena.size

    def __call__(self, inputs: Sequence[torch.Tensor], *, consume: bool = False) -> list[torch.Tensor]:
        """Run on inputs in parameter order, of any strides.

        With ``consume``, ``inputs`` is a list that is emptied, and each input is let go after the last step that reads
        it, so that its memory can serve again.

        Results are new dense tensors (views of one another only where one is a reshape of another), or the input
        object itself where a result is a parameter. Gradients are not recorded. ``ValueError`` if the number, a shape
        an element type or the device of the inputs is not what the program was compiled for.
        """
        try:
            frame, between_calls = self._frames.pop()
        except IndexError:
            frame = self._new_frame()
            between_calls = frame.copy()
        try:
            if not torch.is_grad_enabled():
                return self._run(frame, inputs, consume)
            with torch.no_grad():
                return self._run(frame, inputs, consume)
        finally:
            frame[:] = between_calls
            self._frames.append((frame, between_calls))

    def _run(self, frame: list, inputs: Sequence[torch.Tensor], consume: bool) -> list[torch.Tensor]:
        torch.get_num_threads()  # a new thread's OpenMP setting becomes torch's when torch is first asked in it
        self._load(frame, inputs)
        passed_on = [(i, inputs[place]) for i, place in self._passed_on]
        if consume:
            inputs.clear()
        for place, make in self._fresh:
            frame[place] = make()
        if profiler._is_profiler_enabled:
            self._act_recorded(frame)
        else:
            for action, dead in self.actions:
                action(frame)
                for place in dead:
                    frame[place] = None
        results = [frame[place] for place in self.layout.results]
        for i, tensor in passed_on:
            results[i] = tensor
        return results

    def shared_results(self, handed_on: Iterable[int] = ()) -> list[int]:
        """Results in memory that somebody else can see: a parameter, a constant of the program, an earlier result.

        ``handed_on``: parameters whose memory may become a result's, once (a grad_out that is a gradient, as in
        eager's ``x + y``).
        """
        taken = {place for place, _ in self.layout.constants} | set(range(len(self.layout.params))) - set(handed_on)
        shared = []
        for result, place in enumerate(self.layout.memory):
            if place in taken:
                shared.append(result)
            taken.add(place)
        return shared

    def _act_recorded(self, frame: list) -> None:
        """The steps under a profiler: a range for the program, one for each step in it."""
        with profiler.record_function(f"tvm: {self.name}"):
            for (action, dead), step in zip(self.actions, self.steps, strict=True):
                with profiler.record_function(f"tvm: {self.name}/{step.name}"):
                    action(frame)
                for place in dead:
                    frame[place] = None

    def _load(self, frame: list, inputs: Sequence[torch.Tensor]) -> None:
        """Puts the inputs into their places. That some require grad is nothing to a step, since none records it."""
        if list(map(_FORM, inputs)) != self._forms:
            self._refuse(inputs)
        frame[: len(inputs)] = inputs
        if not all(map(torch.Tensor.is_contiguous, inputs)):
            for place, tensor in enumerate(inputs):
                frame[place] = tensor.contiguous()

    def _refuse(self, inputs: Sequence[torch.Tensor]) -> None:
        if len(inputs) != len(self._forms):
            raise ValueError(f"{self.name}: wanted {len(self._forms)} inputs, got {len(inputs)}")
        for place, (tensor, form) in enumerate(zip(inputs, self._forms, strict=True)):
            if _FORM(tensor) != form:
                raise ValueError(
                    f"{self.name}: input {place} ({self.layout.params[place].name}) has shape {tuple(tensor.shape)} and"
                    f" {tensor.dtype} on {tensor.device}, wanted {tuple(form[0])} and {form[1]} on the CPU"
                )

    @torch.inference_mode(False)  # its tensors serve calls of any mode
    def _new_frame(self) -> list:
        frame: list = [None] * self.layout.size
        tensors = self.layout.arena.allocate()
        for place, value in self.layout.arena_places:
            frame[place] = tensors[value]
        for place, tensor in self.layout.constants:
            frame[place] = tensor
        for place, base, shape, strides, offset in self.layout.views:
            frame[place] = frame[base].as_strided(shape, strides, frame[base].storage_offset() + offset)
        return frame

    def source(self, kernel: str, form: str = "tvmscript") -> str:
        """A kernel named in ``steps`` as ``"tvmscript"``, ``"llvm"`` or ``"asm"``.

        ``KeyError`` if there is none of that name, ``ValueError`` for another form.
        """
        if kernel not in self.kernels:
            raise KeyError(f"no kernel {kernel!r} in {self.name}; there are {', '.join(self.kernels)}")
        return kernel_source(self.kernels[kernel], kernel, self.target, form)

    def __str__(self) -> str:
        seconds = ", ".join(f"{stage} {spent:.3f}" for stage, spent in self.timings.items())
        head = f"program {self.name}: {len(self.steps)} steps, arena {self.arena_bytes} bytes, seconds: {seconds}"
        return "\n".join([head, *(f"  {step}" for step in self.steps)])
