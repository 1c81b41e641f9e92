"""An entry: one compiled call of one module; inputs from its guard → the module's result.

A call runs in this order: random draws, the programs (through autograd where something requires grad), new values of
buffers written back, the result put together. If the forward program raises, nothing is written yet, the draws are
undone, and the call is eager's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from bridge.base.guard_failure import GuardFailure
from bridge.base.interrupts import raise_deferred
from bridge.base.torch_internals import pytree
from bridge.capture import NumberPlace, Reading, one_capture_at_a_time
from bridge.compile import Backend, Program
from bridge.dispatch.autograd import apply
from bridge.dispatch.guards import Guard
from bridge.dispatch.number_inputs import as_called, lower_with_numbers
from bridge.dispatch.programs import Programs
from bridge.dispatch.results import assembly
from bridge.lowering import LoweredCall, lower_once
from bridge.rng import Draws, undo_draws
from bridge.state import PythonState

__all__ = ["Entry", "compile_entry"]


class Entry:
    """A call of one module that runs in TVM.

    Attributes:
        lowered: every stage of the lowering; shared with entries of equal calls (:mod:`bridge.lowering.reuse`).
        programs: its forward and its backwards.
        compile_seconds: from capture to the compiled programs.
        hits: calls that this entry ran.
        partition, backend: what it was compiled with.
        worth: a step of it beside one of eager, where the work is small (:mod:`bridge.dispatch.worth`).
        cause: in what the call that it was compiled for differed from the earlier entries; ``None``: added by hand.
    """

    partition: Any = None
    backend: Backend
    cause: str | None = None
    worth: Any = None

    def __init__(self, guard: Guard | None, lowered: LoweredCall, backend: Backend):
        started = time.perf_counter()
        captured, imported = lowered.captured, lowered.imported
        self.guard = guard
        self.lowered = lowered
        self.hits = 0
        self.last_used = 0
        self._draws = Draws(
            captured.draws,
            masks=imported.dropout_draws,
            used=imported.input_draws + imported.dropout_draws,
            module_name=captured.module_name,
        )
        self.programs = Programs(lowered, backend)
        self._may_undo = len(self._draws) > 0 and self.programs.can_fail  # reading the state takes 4 us
        self._wanted = lowered.wanted
        self._is_differentiable = bool(lowered.differentiable)
        self._result = assembly(captured.outputs, imported.output_of, captured.observation.out_spec)
        self.compile_seconds = time.perf_counter() - started + lowered.seconds

    @property
    def forward(self) -> Program:
        """The forward program."""
        return self.programs.forward

    @property
    def backward(self) -> Program | None:
        """The backward program for grad_outs of all differentiable outputs, or ``None``."""
        return self.programs.backward

    @property
    def readings(self) -> tuple[Reading, ...]:
        """Numbers that forward read: the entry is the branch of calls that read the same."""
        return self.lowered.captured.readings

    @property
    def plan(self) -> Any:
        """What is saved for the backward and why, or ``None``."""
        return self.lowered.plan

    def __repr__(self) -> str:
        captured = self.lowered.captured
        shapes = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in captured.arguments)
        kind = "training" if self.backward else "forward only"
        slower = f", {self.worth}" if self.worth is not None and self.worth.is_slower else ""
        head = f"Entry({captured.module_name}({shapes}), {kind}"
        return f"{head}, {self.hits} hits, {self.compile_seconds:.2f} s{slower})"

    def __call__(self, inputs: list[torch.Tensor]) -> Any:
        """Runs the call on the tensors that the guard returned; same result as the module's forward.

        Raises:
            GuardFailure: the forward program raised: the call is eager's. Nothing is changed, the generator included.
        """
        self.hits += 1  # a checkpoint may leave off once it has what the backward needs
        state = torch.default_generator.get_state() if self._may_undo else None
        try:
            primals = inputs + self._draws.make()
            if self._is_differentiable:
                computed = apply(self.programs, primals, *[inputs[index] for index in self._wanted])
            else:
                with torch.no_grad():
                    computed = self.programs.run_forward(primals)
                    self.programs.write_back(primals, computed)
        except GuardFailure:
            self.hits -= 1
            if state is not None:
                undo_draws(state, self._draws.make)
            raise
        return self._result(computed, inputs)


def compile_entry(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    partition: Any,
    backend: Backend,
    numbers: tuple[Entry, Mapping[NumberPlace, Any]] | None = None,
) -> Entry | None:
    """Captures, lowers and compiles ``module(*args, **kwargs)`` in the current mode; the module is not changed.

    Args:
        numbers: an entry that the call differs from by these numbers, with the values that it was compiled for: the
            new entry takes them as inputs. ``None`` is returned if that is not exact.

    Raises:
        UnsupportedModule, CompilationError: as :func:`bridge.lower`.
    """
    gradients = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    # to the code that is compiled, inference mode is the same as no_grad
    with torch.inference_mode(False), torch.set_grad_enabled(gradients), one_capture_at_a_time():
        if not gradients:
            args, kwargs = pytree.tree_map_only(torch.Tensor, _outside_inference, (args, kwargs))
        entry = _compile_entry(module, args, kwargs, partition, backend, numbers)
    if entry is None:
        return None
    entry.partition, entry.backend = partition, backend
    return entry


def _outside_inference(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or one of the same layout and numbers that was not made in inference mode."""
    if not tensor.is_inference():
        return tensor
    storage = tensor.untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _compile_entry(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    partition: Any,
    backend: Backend,
    numbers: tuple[Entry, Mapping[NumberPlace, Any]] | None,
) -> Entry | None:
    started = time.perf_counter()
    before = PythonState(module)
    how = {"grad": torch.is_grad_enabled(), "partition": partition}
    try:
        if numbers is None:
            places, lowered = (), lower_once(module, args, kwargs, **how)
            captured = lowered.captured
        else:
            known, changed = numbers
            found = lower_with_numbers(module, args, kwargs, changed, known.lowered, known.guard.numbers, **how)
            if found is None or found[0].captured.readings:  # a number that Python reads decides by its value
                before.restore()
                return None
            lowered, places = found
            captured = as_called(lowered.captured, args, kwargs, len(places))
        arguments = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        entry = Entry(Guard(module, captured, arguments, places), lowered, backend)
        raise_deferred()
        entry.compile_seconds = time.perf_counter() - started  # less than ``lowered`` took, where it was reused
        return entry
    except BaseException:
        before.restore()
        raise
