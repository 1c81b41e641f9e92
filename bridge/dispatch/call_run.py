"""Call run: the steps of a call → functions of the call's values, in the order of the steps.

The kind of a step determines whether it runs before, inside or after the autograd Function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import is_autocast_enabled, nn

from bridge.base.errors import RUN, GuardFailure, Unsupported, UnsupportedModule, is_final
from bridge.base.pytrees import picker
from bridge.base.tensor_properties import as_complex, as_parts
from bridge.base.torch_internals import copy_each, no_torch_function
from bridge.capture import Captured, leads_out
from bridge.dispatch import call_steps as steps
from bridge.dispatch.chained import ChainedGradients, begin_chains, chain_results, chains_of, take_hooks
from bridge.dispatch.eager_backward import VERSION, Held, held_apart
from bridge.dispatch.executable import Execute
from bridge.dispatch.guards import EntryGuard
from bridge.dispatch.programs import Programs
from bridge.dispatch.recompute import numbers_read
from bridge.dispatch.results import assembly, complex_places, host_inputs, relaid
from bridge.rng import Draws, swap_state

__all__ = ["Action", "CallRun", "CallValues", "outside_autocast"]


@dataclass(slots=True, init=False, eq=False)
class CallValues:
    """The values of one call.

    Attributes:
        module: the called module.
        run: the bound steps.
        inputs: the program's input tensors, from the guard.
        primals: inputs and draws.
        values: the program's results.
        saved: the tensors that autograd saves.
        held: extra tensors for a backward by eager's operators, or ``None``.
        watched: tensors that must not be written before the backward, with their version counts, or ``None``.
        beside: gradients that nodes of chained results compute, or ``None``.
        computed: the computed results for the caller, as autograd returns them.
        result: the module's return value.
        later: called before the backward runs, or ``None``.
        undo: restores the generator, or ``None`` if nothing was drawn.
    """

    module: nn.Module | None
    run: CallRun
    inputs: list[torch.Tensor]
    primals: list[torch.Tensor]
    values: list[torch.Tensor]
    saved: list[torch.Tensor]
    held: Held | None
    watched: tuple[Sequence[torch.Tensor], Sequence[int]] | None
    beside: ChainedGradients | None
    computed: Sequence[torch.Tensor]
    result: Any
    later: Callable[[], None] | None
    undo: Callable[[], None] | None


Action = Callable[[CallValues], None]


class CallRun:
    """The steps of an entry, bound to functions. Inputs exist when a call begins; autograd runs the backward.

    Attributes:
        programs: the programs for the sizes of the call.
        before: actions before the forward program.
        forward: the forward program and its actions; inside the autograd Function if something requires grad.
        after: actions on the results that autograd returned.
    """

    def __init__(self, given: Sequence[steps.CallStep], programs: Programs, guard: EntryGuard, captured: Captured):
        self.programs, execute, device_type = programs, programs.forward.run, programs.device_type
        makers: dict[type, tuple[list[Action], Callable[[Any], Action]]] = {}
        results = next(step for step in given if isinstance(step, steps.Results))
        chains = chains_of(results.outputs, results.computed) if programs.differentiable else ()
        opened, closed = complex_places(captured, results.outputs, results.computed)
        moved = host_inputs(captured)
        self.before: list[Action] = [partial(_each, "primals", opened, as_parts)] * bool(opened)
        self.before += [partial(_each, "primals", moved, lambda each: each.to(captured.device))] * bool(moved)
        self.before += [begin_chains] * bool(chains)
        self.forward: list[Action] = []
        self.after: list[Action] = [partial(_each, "computed", closed, as_complex)] * bool(closed)
        self.after += [partial(chain_results, programs, chains)] * bool(chains)
        self.after += [take_hooks] * (len(programs.differentiable) > 1)
        makers[steps.ReadNumbers] = self.before, partial(_numbers, device=torch.device(device_type))
        makers[steps.Derive] = self.before, _derive
        makers[steps.MakeDraws] = self.before, partial(_draws, module_name=captured.module_name)
        makers[steps.Forward] = self.forward, partial(_forward, execute=execute, device_type=device_type)
        makers[steps.Checks] = self.forward, _checks
        makers[steps.Relayout] = self.forward, _layout
        makers[steps.Generator] = self.forward, _generator
        makers[steps.Save] = self.forward, _save
        makers[steps.WriteBack] = self.forward, _write_back
        makers[steps.Results] = self.after, lambda step: assembly(step.outputs, step.computed, step.spec)
        makers[steps.SetAttributes] = self.after, partial(_set_attributes, guard=guard)
        for step in given:
            if type(step) in makers and not (type(step) is steps.ReadNumbers and step.counts):
                actions, make = makers[type(step)]
                act = make(step)
                actions.append(partial(_out_of_sight, act) if guard.has_default_device else act)


def _out_of_sight(act: Action, call: CallValues) -> None:
    """Runs an action outside torch's default device mode, which is for the user's factory calls."""
    with no_torch_function():
        act(call)


def _each(values: str, places: Sequence[int], change: Callable[[torch.Tensor], torch.Tensor], call: CallValues) -> None:
    """Applies ``change`` to the values at some places: complex ↔ real pairs, host → device."""
    found = list(getattr(call, values))
    for place in places:
        found[place] = change(found[place])
    setattr(call, values, found)


def _numbers(step: steps.ReadNumbers, device: torch.device) -> Action:
    check = numbers_read(step.read, device)

    def read(call: CallValues) -> None:
        check(call.inputs)

    return read


def _derive(step: steps.Derive) -> Action:
    def derive(call: CallValues) -> None:
        if (reason := leads_out(call.inputs, {*step.derived, *step.followed})) is not None:
            raise GuardFailure(RUN, "derivatives", reason)
        followed, before = [call.inputs[place] for place in step.followed], call.undo
        switched = [each for each in followed if not each.requires_grad]

        def undo() -> None:
            for each in switched:
                each.requires_grad_(False)
            if before is not None:
                before()

        for each in switched:
            each.requires_grad_()
        call.undo = undo

    return derive


def _draws(step: steps.MakeDraws, module_name: str) -> Action:
    draws = Draws(step.draws, step.masks, step.used, module_name, step.computed, step.device)
    make, undo = draws.make, draws.undo

    def draw(call: CallValues) -> None:
        call.primals = call.primals + make(call.inputs)

    def draw_to_be_undone(call: CallValues) -> None:
        call.undo = undo(call.inputs)
        call.primals = call.primals + make(call.inputs)

    return draw_to_be_undone if step.undone else draw


def _forward(step: steps.Forward, execute: Execute, device_type: str) -> Action:
    def forward(call: CallValues) -> None:
        try:
            if is_autocast_enabled(device_type):
                call.values = outside_autocast(device_type, execute, call.primals)
            else:
                call.values = execute(call.primals)
        except Exception as error:
            if is_final(error):
                raise
            failure = GuardFailure(RUN, "error in the compiled forward", f"{type(error).__name__}: {error}")
            raise failure from error

    return forward


def outside_autocast(device_type: str, execute: Callable[[list], list], inputs: list) -> list:
    """Runs compiled code with autocast off: the code contains autocast's casts already.

    Callers test whether autocast is on: without it they save this function call, three times a step.
    """
    torch.set_autocast_enabled(device_type, False)  # a context of torch.autocast takes twenty times as long
    try:
        return execute(inputs)
    finally:
        torch.set_autocast_enabled(device_type, True)


def _checks(step: steps.Checks) -> Action:
    place, checks = step.result, step.checks

    def check(call: CallValues) -> None:
        if broken := int(call.values[place]):
            raise GuardFailure(RUN, *checks[broken - 1])

    return check


def _layout(step: steps.Relayout) -> Action:
    def lay_out(call: CallValues) -> None:
        for place, _, stride in step.results:
            call.values[place] = relaid(call.values[place], stride)

    return lay_out


def _generator(step: steps.Generator) -> Action:
    def move_on(call: CallValues) -> None:
        if not swap_state(call.primals[step.before], call.values[step.after]):
            failure = GuardFailure(RUN, "random numbers of the call", "another thread has drawn them as well")
            raise failure from RuntimeError(failure.reason)  # with a cause, no new entry is compiled for the call

    return move_on


def _save(step: steps.Save) -> Action:
    """An action that collects a call's saved, held and watched tensors."""
    primals, outputs, copied, first = picker(step.primals), picker(step.outputs), step.copied, step.saved_tensors
    aliased = tuple(place for place in step.aliased if place not in copied)
    beside, left = picker(step.beside), step.left
    is_apart = bool(step.beside_copied or step.beside_followed)
    watched, made = picker(step.watched), step.watched_outputs
    is_watched, again = bool(step.watched or made), picker(step.again)

    def save(call: CallValues) -> None:
        values = call.values
        call.saved = [*primals(call.primals), *outputs(values), *values[first:]]
        for place in copied:
            call.saved[place] = call.saved[place].clone()
        for place, index in left:
            call.saved[place] = call.primals[index]
        for place in aliased:
            call.saved[place] = call.saved[place].detach()
        call.held = call.watched = None
        if is_watched:
            found = [*watched(call.primals), *[values[place].detach() for place in made]]
            if not any(each.is_inference() for each in found):  # they have no version counter
                call.watched = found, [*map(VERSION, found)]
        if step.again:
            call.later = _unwritten(again(call.primals), call.later)
        if step.beside:
            found = counted = beside(call.primals)
            token = None
            if is_apart:
                found, counted, token = held_apart(found, step.beside_copied, step.beside_followed)
            try:
                call.held = found, [*map(VERSION, counted)], token
            except RuntimeError:  # inference tensors have no version counter
                call.held = found, None, token

    return save


def _unwritten(tensors: Sequence[torch.Tensor], before: Callable[[], None] | None) -> Callable[[], None]:
    """A check before the backward: a checkpoint's tensors are unchanged. ``before``: a check that runs first."""
    then = [*map(_memory, tensors)]

    def check() -> None:
        if before is not None:
            before()
        for tensor, held in zip(tensors, then, strict=True):
            if _memory(tensor) != held:
                what = f"a tensor of shape {list(tensor.shape)}"
                reason = "eager's backward reads it in a checkpoint that it runs again, and it changed after forward"
                hint = "change it before forward, or after backward"
                raise UnsupportedModule("", [Unsupported(what, "backward", reason, hint)])

    return check


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    return 0 if tensor.is_inference() else tensor._version, tensor.untyped_storage()._cdata


def _write_back(step: steps.WriteBack) -> Action:
    ways = [(index, result, index in step.counted) for index, result, _ in step.buffers]

    def write(call: CallValues) -> None:
        alike: dict[tuple, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for index, result, counts in ways:
            tensor = call.primals[index]
            targets, sources = alike.setdefault((tensor.dtype, tensor.device), ([], []))
            targets.append(tensor.detach() if counts else tensor.data)
            sources.append(call.values[result])
        for targets, sources in alike.values():
            copy_each(targets, sources)

    return write


def _set_attributes(step: steps.SetAttributes, guard: EntryGuard) -> Action:
    def set_attributes(call: CallValues) -> None:
        kept: Sequence[Any] = ()
        if step.kept:
            call.result, kept = call.result
        guard.tree.set_attributes(call.module, kept)

    return set_attributes
