"""Profitability of a small entry: an entry and its call → seconds of a dispatched and an eager step; a warning.

A call costs tens of microseconds before any kernel runs: the guard, an ``autograd.Function``, a launch per step. Fused
kernels regain that, unless eager itself takes no longer. The user decides whether to dispatch: the timing changes no
call.

"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autodiff.extents import sample_of
from bridge.base.devices import HOST
from bridge.base.errors import GuardFailure, swallowed
from bridge.base.generators import default_generator, states_put_back
from bridge.base.threads import is_alone
from bridge.base.torch_internals import COMPILED_CALL, VF, has_global_hooks, has_saved_tensors_hooks
from bridge.dispatch.entry import Entry
from bridge.guards import ABSENT, undo
from bridge.state import SampleCall, generators_put_back
from bridge.trials import Pace, chosen, losses_of, shortest

__all__ = ["TOO_SMALL", "Profitability", "measure_profitability"]

_OURS, _EAGER = "dispatched", "eager"
TOO_SMALL = "Dispatch a larger module around it, or leave it to eager"

#: Number of elements that a call reads and makes, above which the overhead of a call does not matter.
_SMALL = 1 << 18
_STEPS = 64
_PACE = Pace(fewest=6, most=6, warm_up=2)
#: Eager wins clearly if it takes less than this share of the dispatched time.
_CLEARLY = 1 / 1.2


@dataclass(frozen=True)
class Profitability:
    """Seconds of a step (forward, and backward if there is one), the quickest of a few: dispatched and eager."""

    ours: float
    eager: float

    @property
    def is_slower(self) -> bool:
        """Whether eager is clearly quicker."""
        return chosen({_OURS: self.ours, _EAGER: self.eager}, (_OURS, _EAGER), _CLEARLY) == _EAGER

    def __str__(self) -> str:
        return f"eager is quicker: {1e6 * self.ours:.0f} us dispatched, {1e6 * self.eager:.0f} us eager"


def _backward(result: Any, wanted: Sequence[torch.Tensor]) -> None:
    """The gradients of ``wanted``, which are dropped."""
    outputs = losses_of(result)
    if wanted and outputs:
        torch.autograd.grad(outputs, wanted, list(map(VF.ones_like, outputs)), allow_unused=True)


def measure_profitability(entry: Entry, call: SampleCall) -> Profitability | None:
    """Times the call dispatched and eager; ``None`` if its work is not small, it raises, or it has side effects.

    Generators and the module's Python state are restored, no ``grad`` changes. Not timed: calls that write buffers,
    set attributes or an argument's ``requires_grad``, calls with collectives (other processes would have to time them
    too), calls that run the user's Python code or fill a function's cache, tensors with hooks, and calls in a
    checkpoint, which counts saved tensors.
    """
    captured, module = entry.lowered.captured, call.module
    if captured.sizes.scope is not None:  # the sample's size is one of many
        return None
    if captured.device != HOST:  # a launch returns before its kernel has run
        return None
    if (
        not _is_small(entry)
        or captured.mutated
        or captured.given.followed
        or captured.group
        or captured.runs_python
        or captured.state.kept
        or has_global_hooks()
        or has_saved_tensors_hooks()
    ):
        return None
    if any(vars(child).get(COMPILED_CALL) is not None for child in module.modules() if child is not module):
        return None  # eager would run dispatched submodules and count their hits
    fills = any(getattr(each, "made", ABSENT) is not ABSENT for each in entry.guard.reads.items.values())
    if entry.guard.reads.says or fills:
        return None
    if captured.draws and not is_alone():  # another thread's draws would be repeated
        return None
    with entry.guard.trial():
        return _measured(entry, call)


def _measured(entry: Entry, call: SampleCall) -> Profitability | None:
    module = call.module
    try:
        inputs = entry.guard.match(call)
    except GuardFailure:
        return None
    wanted = [inputs[index] for index in entry.lowered.wanted]
    drawn = {default_generator(draw.device) for draw in entry.lowered.captured.draws}
    if any(tensor.grad_fn is not None or tensor._backward_hooks for tensor in wanted):
        return None
    try:
        with undo(module, always=True), states_put_back(drawn), generators_put_back():
            steps = {_OURS: lambda: entry(list(inputs), module), _EAGER: call.forward}
            runs = {name: lambda step=step: _backward(step(), wanted) for name, step in steps.items()}
            seconds = shortest(_PACE.rounds(runs))
    except Exception as error:  # noqa: BLE001 - eager's own error, which the call itself will raise
        swallowed(error)
        return None
    finally:
        entry.hits = 0
    return Profitability(seconds[_OURS], seconds[_EAGER])


def _is_small(entry: Entry) -> bool:
    programs = [program for program in (entry.forward, entry.backward) if program is not None]
    numbers = sum(sample_of(value.numel) for program in programs for value in program.layout.params)
    arena = sum(program.arena_bytes for program in programs)
    return numbers <= _SMALL and arena <= 4 * _SMALL and sum(len(program.steps) for program in programs) <= _STEPS
