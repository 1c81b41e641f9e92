"""Programs: a flat list of steps over torch tensors, bound and callable: ``program(inputs) -> results``.

A run works on *registers*: a list with a slot for every tensor the steps touch. Slots of intermediates and constants
are filled once, when the registers are made, with tensors in an arena of their own; slots of inputs, results and views
of those are filled during a call and emptied after it. Registers wait in a free-list between calls, so concurrent and
re-entrant calls never share them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter

import torch
from torch.autograd import profiler
from tvm.tirx import PrimFunc

from bridge.base.tensor_properties import Checks, is_nested, tensor_checks
from bridge.base.torch_internals import empty_strided
from bridge.compile.backend import Backend
from bridge.compile.loop_ir.graph import Value
from bridge.compile.loop_ir.views import dense_strides
from bridge.compile.runtime.arena import ArenaPlan
from bridge.compile.runtime.contents import Contents
from bridge.library import NEVER_RAISE

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
#: Ways that fitting inputs may look: some require grad, or are parameters, or belong to inference mode.
_MAX_FITTING = 4
Step = KernelStep | LibraryStep | ViewStep
Action = Callable[[list], None]
"""A step as a function of the registers."""


@dataclass(frozen=True)
class Layout:
    """Slots of the registers.

    ``views``: (slot, base slot, shape, strides, offset) of arena and constant tensors. ``memory``: of each result,
    the slot of the tensor whose memory it is, or is a view of.
    """

    size: int
    params: tuple[Value, ...]
    constants: tuple[tuple[int, torch.Tensor], ...]
    arena: ArenaPlan
    arena_slots: tuple[tuple[int, Value], ...]
    views: tuple[tuple[int, int, tuple[int, ...], tuple[int, ...], int], ...]
    fresh: tuple[tuple[int, tuple[int, ...], torch.dtype], ...]
    results: tuple[int, ...]
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
    actions: tuple[tuple[Action, tuple[int, ...]], ...] = field(repr=False)  # with the slots last used by each
    layout: Layout = field(repr=False)
    kernels: Mapping[str, PrimFunc] = field(repr=False)
    backend: Backend = field(repr=False)
    results: tuple[str, ...] = field(default=(), repr=False)
    variables: tuple[str, ...] = field(default=(), repr=False)
    code: tuple[object, ...] = field(default=(), repr=False)  # the kernels' machine code, which lives as long as this
    _idle: list[tuple[list, list]] = field(default_factory=list, repr=False)
    _fitting: list[Checks] = field(default_factory=list, repr=False)  # inputs that look like these fit, and are dense

    def __post_init__(self) -> None:
        layout = self.layout
        self._forms = [(torch.Size(v.shape), getattr(torch, v.dtype), True) for v in layout.params]
        self._fresh = [
            (slot, partial(empty_strided, shape, dense_strides(shape), dtype)) for slot, shape, dtype in layout.fresh
        ]
        self._passed_on = [(i, slot) for i, slot in enumerate(layout.results) if slot < len(layout.params)]

    @property
    def can_fail(self) -> bool:
        """Whether some step may raise because of the numbers it is given, such as an index out of range."""
        return any(isinstance(step, LibraryStep) and step.name not in NEVER_RAISE for step in self.steps)

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
            registers, between_calls = self._idle.pop()
        except IndexError:
            registers = self._new_registers()
            between_calls = registers.copy()
        try:
            if not torch.is_grad_enabled():
                return self._run(registers, inputs, consume)
            with torch.no_grad():
                return self._run(registers, inputs, consume)
        finally:
            registers[:] = between_calls
            self._idle.append((registers, between_calls))

    def _run(self, registers: list, inputs: Sequence[torch.Tensor], consume: bool) -> list[torch.Tensor]:
        torch.get_num_threads()  # a new thread's OpenMP setting becomes torch's when torch is first asked in it
        self._load(registers, inputs)
        passed_on = [(i, inputs[slot]) for i, slot in self._passed_on]
        if consume:
            inputs.clear()
        for slot, make in self._fresh:
            registers[slot] = make()
        if profiler._is_profiler_enabled:
            self._act_recorded(registers)
        else:
            for action, last_used in self.actions:
                action(registers)
                for slot in last_used:
                    registers[slot] = None
        results = [registers[slot] for slot in self.layout.results]
        for i, tensor in passed_on:
            results[i] = tensor
        return results

    def shared_results(self, handed_on: Iterable[int] = ()) -> list[int]:
        """Results in memory that somebody else can see: a parameter, a constant of the program, an earlier result.

        ``handed_on``: parameters whose memory may become a result's, once (a grad_out that is a gradient, as in
        eager's ``x + y``).
        """
        taken = {slot for slot, _ in self.layout.constants} | set(range(len(self.layout.params))) - set(handed_on)
        shared = []
        for result, slot in enumerate(self.layout.memory):
            if slot in taken:
                shared.append(result)
            taken.add(slot)
        return shared

    def _act_recorded(self, registers: list) -> None:
        """The steps under a profiler: a range for the program, one for each step in it."""
        with profiler.record_function(f"tvm: {self.name}"):
            for (action, last_used), step in zip(self.actions, self.steps, strict=True):
                with profiler.record_function(f"tvm: {self.name}/{step.name}"):
                    action(registers)
                for slot in last_used:
                    registers[slot] = None

    def _load(self, registers: list, inputs: Sequence[torch.Tensor]) -> None:
        """Puts the inputs into their slots, dense. That some require grad does not matter: no step records it."""
        if any(map(is_nested, inputs)) or not any(alike(inputs) for alike in self._fitting):
            if list(map(_FORM, inputs)) != self._forms:
                self._reject(inputs)
            if not all(map(torch.Tensor.is_contiguous, inputs)):
                inputs = [tensor.contiguous() for tensor in inputs]
            elif len(self._fitting) < _MAX_FITTING:
                self._fitting.append(tensor_checks(inputs))
        registers[: len(inputs)] = inputs

    def _reject(self, inputs: Sequence[torch.Tensor]) -> None:
        if len(inputs) != len(self._forms):
            raise ValueError(f"{self.name}: wanted {len(self._forms)} inputs, got {len(inputs)}")
        for slot, (tensor, form) in enumerate(zip(inputs, self._forms, strict=True)):
            if _FORM(tensor) != form:
                raise ValueError(
                    f"{self.name}: input {slot} ({self.layout.params[slot].name}) has shape {tuple(tensor.shape)} and"
                    f" {tensor.dtype} on {tensor.device}, wanted {tuple(form[0])} and {form[1]} on the CPU"
                )

    @torch.inference_mode(False)  # its tensors serve calls of any mode
    def _new_registers(self) -> list:
        registers: list = [None] * self.layout.size
        tensors = self.layout.arena.allocate()
        for slot, value in self.layout.arena_slots:
            registers[slot] = tensors[value]
        for slot, tensor in self.layout.constants:
            registers[slot] = tensor
        for slot, base, shape, strides, offset in self.layout.views:
            registers[slot] = registers[base].as_strided(shape, strides, registers[base].storage_offset() + offset)
        return registers

    def source(self, kernel: str, form: str = "tvmscript") -> str:
        """A kernel named in ``steps`` as ``"tvmscript"``, ``"llvm"`` or ``"asm"``.

        ``KeyError`` if there is none of that name, ``ValueError`` for another form.
        """
        if kernel not in self.kernels:
            raise KeyError(f"no kernel {kernel!r} in {self.name}; there are {', '.join(self.kernels)}")
        return self.backend.source(self.kernels[kernel], kernel, form)

    def __str__(self) -> str:
        seconds = ", ".join(f"{stage} {spent:.3f}" for stage, spent in self.timings.items())
        head = f"program {self.name}: {len(self.steps)} steps, arena {self.arena_bytes} bytes, seconds: {seconds}"
        return "\n".join([head, *(f"  {step}" for step in self.steps)])
