"""The compiled product: a flat list of steps over torch tensors.

A run works on a *frame*: one list with a place for every tensor the steps touch. Places of intermediates and constants
are filled once, when the frame is made, with tensors in the frame's own arena; places of inputs, results and views of
those are filled during a call and emptied after it. Frames are kept in a free-list, so concurrent and re-entrant calls
never share one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from tvm.target import Target
from tvm.tirx import PrimFunc

from bridge.compile.arena import ArenaPlan
from bridge.compile.contents import Contents
from bridge.compile.graph import Value
from bridge.compile.source import kernel_source

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


Step = KernelStep | LibraryStep | ViewStep
Action = Callable[[list], None]
"""A step as a function of the frame."""


@dataclass(frozen=True)
class Layout:
    """Places of a frame. ``views``: (place, base place, shape, strides, offset) of arena and constant tensors."""

    size: int
    params: tuple[Value, ...]
    constants: tuple[tuple[int, torch.Tensor], ...]
    arena: ArenaPlan
    arena_places: tuple[tuple[int, Value], ...]
    views: tuple[tuple[int, int, tuple[int, ...], tuple[int, ...], int], ...]
    fresh: tuple[tuple[int, tuple[int, ...], torch.dtype], ...]
    results: tuple[int, ...]
    kept: frozenset[int]


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
    _frames: list[list] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self._expected = [(tuple(v.shape), getattr(torch, v.dtype)) for v in self.layout.params]
        self._transient = [place for place in range(self.layout.size) if place not in self.layout.kept]

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
        or an element type of the inputs is not what the program was compiled for.
        """
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = self._new_frame()
        try:
            with torch.no_grad():
                self._load(frame, inputs)
                passed_on = {place: inputs[place] for place in self.layout.results if place < len(inputs)}
                if consume:
                    inputs.clear()
                for place, shape, dtype in self.layout.fresh:
                    frame[place] = torch.empty(shape, dtype=dtype)
                for action, dead in self.actions:
                    action(frame)
                    for place in dead:
                        frame[place] = None
                return [passed_on.get(place, frame[place]) for place in self.layout.results]
        finally:
            for place in self._transient:
                frame[place] = None
            self._frames.append(frame)

    def _load(self, frame: list, inputs: Sequence[torch.Tensor]) -> None:
        if len(inputs) != len(self._expected):
            raise ValueError(f"{self.name}: wanted {len(self._expected)} inputs, got {len(inputs)}")
        for place, (tensor, (shape, dtype)) in enumerate(zip(inputs, self._expected, strict=True)):
            if tensor.shape != shape or tensor.dtype is not dtype:
                raise ValueError(
                    f"{self.name}: input {place} ({self.layout.params[place].name}) has shape {tuple(tensor.shape)} and"
                    f" {tensor.dtype}, wanted {shape} and {dtype}"
                )
            if not tensor.is_contiguous():
                tensor = tensor.contiguous()
            frame[place] = tensor.detach() if tensor.requires_grad else tensor

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
