"""Replay: recorded calls and their loops -> a forward that makes these calls, one step of each loop in place of all.

What a step is given and gives is marked (:mod:`bridge.capture.loops.operators`). What is read of a loop afterwards is
read from the last carries, or from tensors with the steps in front. On tensors of the layouts that were recorded it
computes what the recorded forward did, with the meaning that the marks have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from bridge.base.torch_internals import pytree
from bridge.capture.loops.alive import alive_rows
from bridge.capture.loops.calls import COMPARING, CREATING, Call, Calls, Made, Value, filled, values_in
from bridge.capture.loops.find import Carry, Constant, Local, Loop, Parts, Role, Written
from bridge.capture.loops.masks import all_steps, draws_of, dropped, dropping
from bridge.capture.loops.operators import FIRST, LAST, PART, STEPS
from bridge.capture.loops.parts import in_order, moved, narrowed, put, take

__all__ = ["Replay", "attribute_of", "sources_of", "tensors_in"]

_JOINS = ("stack", "cat", "concat", "concatenate")


class Replay:
    """The forward of a module whose calls were recorded.

    Attributes:
        calls, loops: what was recorded, and what was found in it.
        draws: what it draws, in order.
    """

    def __init__(self, calls: Calls, loops: Sequence[Loop]):
        self.calls, self.loops = calls, loops
        self.draws = draws_of(calls, loops)
        self._called = [alive or row in calls.drawn for row, alive in enumerate(alive_rows(calls))]
        self._ys = [self._leaving(number) for number in range(len(loops))]

    @property
    def length(self) -> int:
        """How many calls it makes."""
        left_out = sum(loop.period * (loop.steps - 1) for loop in self.loops)
        return len(self.calls.rows) - left_out

    def place(self, value: int) -> tuple[int, int, Made] | None:
        """The loop that makes a value: its number, the step, and which result of the step it is."""
        row, leaf = self.calls.made[value]
        for number, loop in enumerate(self.loops):
            if loop.start <= row < loop.stop:
                step, index = divmod(row - loop.start, loop.period)
                return number, step, Made(index, leaf)
        return None

    def _leaving(self, number: int) -> list[Made]:
        """The results of a step whose values, of some step, are read after the loop."""
        found: dict[Made, None] = {}
        for other, loop in enumerate(self.loops):
            for parts in loop.parts:
                if isinstance(parts.of, tuple) and parts.of[0] == number:
                    found.setdefault(Made(*parts.of[1:]))
            if other == number:
                continue
            given = [carry.first for carry in loop.carries]
            given += [role.value for roles in loop.roles for role in roles or () if isinstance(role, Constant)]
            given += [parts.of for parts in loop.parts if isinstance(parts.of, int)]
            given += [written.first for written in loop.written.values()]
            self._note(given, number, found)
        for row in self._straight():
            self._note(row.reads, number, found)
        self._note(values_in(self.calls.results), number, found)
        return list(found)

    def _note(self, values: Sequence[int], number: int, found: dict[Made, None]) -> None:
        for value in values:
            place = self.place(value)
            if place is not None and place[0] == number and not self.is_last(place):
                found.setdefault(place[2])

    def is_last(self, place: tuple[int, int, Made]) -> bool:
        """Whether a value of a loop is a carry, or what was written, after the last step."""
        loop = self.loops[place[0]]
        carried = any((carry.row, carry.leaf) == place[2] and carry.of is None for carry in loop.carries)
        return place[1] == loop.steps - 1 and (carried or place[2].row in loop.written)

    def _straight(self) -> list[Call]:
        inside = {row for loop in self.loops for row in range(loop.start, loop.stop)}
        return [row for number, row in enumerate(self.calls.rows) if number not in inside and self.is_called(number)]

    def is_called(self, row: int) -> bool:
        """Whether the results need a row, or it draws."""
        return self._called[row]

    def joined(self, row: Call) -> tuple[bool, int, list[list[int]]] | None:
        """A call of ``stack`` or ``cat`` of adjacent steps' results: whether it stacks, along which dimension, and the
        values, those of adjacent steps together; ``None`` for other calls."""
        kind, values = self.calls.kinds[row.kind], row.reads
        if kind.name not in _JOINS or not kind.args or not isinstance(kind.args[0], list | tuple):
            return None
        groups = list(self._groups(values))
        if len(groups) == len(values) or len({self.calls.forms[value].shape for value in values}) > 1:
            return None
        rank = len(self.calls.forms[values[0]].shape)
        given, stacks = kind.args[1] if len(kind.args) > 1 else kind.kwargs.get("dim", 0), kind.name == "stack"
        return stacks, given % (rank + 1 if stacks else rank), groups

    def _groups(self, values: Sequence[int]) -> list[list[int]]:
        """Values in a row of which each is of the step after (or before) that of the one before."""
        groups: list[list[int]] = []
        places = [self.place(value) for value in values]
        for index, (value, place) in enumerate(zip(values, places, strict=True)):
            before = places[index - 1] if index else None
            adjacent = None not in (place, before) and place[::2] == before[::2] and abs(place[1] - before[1]) == 1
            if adjacent and len(groups[-1]) > 1:
                adjacent = place[1] - before[1] == before[1] - places[index - 2][1]
            if adjacent:
                groups[-1].append(value)
            else:
                groups.append([value])
        return groups

    def ys(self, number: int) -> list[Made]:
        """The results of a step that leave the loop for all steps."""
        return self._ys[number]

    def of(self, module: nn.Module) -> Callable[..., Any]:
        """As the forward of the module: it takes the arguments of the recorded call."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            return _Run(self, module, args, kwargs).result()

        return forward


class _Run:
    """One call of a replayed forward."""

    def __init__(self, replay: Replay, module: nn.Module, args: tuple, kwargs: dict[str, Any]):
        self.replay, self.calls, self.module = replay, replay.calls, module
        self.arguments = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self.tensors: dict[int, torch.Tensor] = {}
        self.last: list[dict[Made, torch.Tensor]] = []
        self.whole: list[dict[Made, torch.Tensor]] = []
        self.reverse: list[bool] = []

    def result(self) -> Any:
        begins = {loop.start: loop for loop in self.replay.loops}
        row = 0
        while row < len(self.calls.rows):
            if row in begins:
                self.loop(begins[row])
                row = begins[row].stop
            else:
                if self.replay.is_called(row):
                    self.call(self.calls.rows[row])
                row += 1
        leaves = [self.tensor(leaf.number) if type(leaf) is Value else leaf for leaf in self.calls.results]
        return pytree.tree_unflatten(leaves, self.calls.spec)

    def tensor(self, value: int) -> torch.Tensor:
        """The tensor of a value; of a step's, a copy that is made once."""
        if value not in self.tensors:
            self.tensors[value] = self._found(value)
        return self.tensors[value]

    def _found(self, value: int) -> torch.Tensor:
        row, leaf = self.calls.made[value]
        if row < 0:
            source = self.calls.inputs[leaf]
            return self.arguments[source] if isinstance(source, int) else attribute_of(self.module, source)
        place = self.replay.place(value)
        if place is None:
            part = self.calls.part(value)
            return take(self.tensor(part.of), part)
        number, step, made = place
        loop = self.replay.loops[number]
        if step == loop.steps - 1 and made in self.last[number]:
            return self.last[number][made]
        return self.whole[number][made].select(0, self._position(number, step)).clone()

    def _position(self, number: int, step: int) -> int:
        """Where a step of a loop lies in its tensors."""
        return self.replay.loops[number].steps - 1 - step if self.reverse[number] else step

    def call(self, row: Call) -> None:
        """Makes a call from outside of the loops; a part of a tensor is not taken before it is read."""
        if self.calls.part(row.makes[0]) is not None:
            return
        joined = self._joined(row)
        result = self._again(row, [self.tensor(value) for value in row.reads]) if joined is None else joined
        self.tensors.update(zip(row.makes, tensors_in(result), strict=True))

    def _again(self, row: Call, tensors: Sequence[torch.Tensor]) -> Any:
        if row.part is not None:  # rows of one kind may take parts from different places
            return take(tensors[0], row.part)
        if row.into is not None:
            return put(*tensors, row.into)
        form = self.calls.forms[row.makes[0]]
        if self.calls.kinds[row.kind].func is torch.Tensor.new_zeros and not form.requires_grad:
            return torch.zeros(form.shape, dtype=form.dtype, device=form.device)  # of whatever length the tensor is
        return self._called(row, tensors, row.number)

    def _called(self, row: Call, tensors: Sequence[torch.Tensor], number: Any) -> Any:
        kind, given = self.calls.kinds[row.kind], iter(tensors)
        args = filled(kind.args, given, number)
        return kind.func(*args, **filled(kind.kwargs, given, number))

    def _with_numbers(self, row: Call, tensors: Sequence[torch.Tensor], number: torch.Tensor) -> torch.Tensor:
        """A call of the step with a tensor in the place of its number."""
        if self.calls.kinds[row.kind].name in CREATING:
            return number.expand(self.calls.forms[row.makes[0]].shape).clone(memory_format=torch.contiguous_format)
        return self._called(row, tensors, number)

    def _joined(self, row: Call) -> torch.Tensor | None:
        """``stack`` or ``cat`` of a list of values, those of adjacent steps as one tensor; ``None`` for other calls."""
        joined = self.replay.joined(row)
        if joined is None:
            return None
        stacks, dim, groups = joined
        pieces = [self._piece(group, dim, stacks) for group in groups]
        return torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)

    def _piece(self, values: Sequence[int], dim: int, stacks: bool) -> torch.Tensor:
        if len(values) == 1:
            return self.tensor(values[0]).unsqueeze(dim) if stacks else self.tensor(values[0])
        steps = moved(self._steps(values), dim)
        return steps if stacks else steps.flatten(dim, dim + 1)

    def _steps(self, values: Sequence[int]) -> torch.Tensor:
        """Values of adjacent steps, with the steps in front."""
        number, first, made = self.replay.place(values[0])
        _, last, _ = self.replay.place(values[-1])
        begin, end = self._position(number, first), self._position(number, last)
        whole = narrowed(self.whole[number][made], 0, min(begin, end), len(values))
        return whole.flip(0) if end < begin else whole

    def loop(self, loop: Loop) -> None:
        """Makes the calls of one step, with marks around them."""
        number = len(self.last)
        falling = [self._falls(parts) for parts in loop.parts]
        reverse = bool(falling) and all(falling)
        whole = {each: self._in_front(each, loop.steps, reverse) for each in loop.parts}
        parts = {each: PART(tensor, number, place) for place, (each, tensor) in enumerate(whole.items())}
        numbers = {
            index: PART(self._numbers(loop, index, reverse), number, place)
            for place, index in enumerate(loop.numbers, start=len(parts))
        }
        masks = self._masks(loop, number, len(parts) + len(numbers), reverse)
        sources = sources_of(loop, self.calls)

        def source(role: Role) -> torch.Tensor:
            if isinstance(role, Parts):
                return whole[role]
            return self.tensor(role.first if isinstance(role, Carry) else role.value)

        first = {}
        for place, carry in enumerate(loop.carries):
            reached = [source(role) for role in sources[carry]]
            reached = [tensor for tensor in reached if tensor.requires_grad]
            first[carry] = FIRST(self.tensor(carry.first), reached, number, place, loop.steps, reverse)
        made: dict[Made, torch.Tensor] = {}

        def tensor(role: Role) -> torch.Tensor:
            if isinstance(role, Local):
                return made[Made(role.row, role.leaf)]
            if isinstance(role, Constant):
                return self.tensor(role.value)
            return first[role] if isinstance(role, Carry) else parts[role]

        for index, roles in enumerate(loop.roles):
            row = self.calls.rows[loop.start + index]
            if index in loop.dead:
                continue
            if roles is None:
                made[Made(index, 0)] = parts[loop.taken[index]]
                continue
            read = [tensor(role) for role in roles]
            if index in loop.written:
                made[Made(index, 0)] = read[0]
                continue
            if index in masks:
                made[Made(index, 0)] = dropped(read[0], masks[index], self.calls.drawn[loop.start + index])
                continue
            numbered = index in numbers
            result = self._with_numbers(row, read, numbers[index]) if numbered else self._again(row, read)
            made.update((Made(index, leaf), each) for leaf, each in enumerate(tensors_in(result)))
        self.reverse.append(reverse)
        self._finish(loop, number, first, made)

    def _masks(self, loop: Loop, number: int, place: int, reverse: bool) -> dict[int, torch.Tensor]:
        """The masks that a step draws, by the rows that drop with them; drawn for all steps at once."""
        draw = all_steps(loop, self.calls)
        if draw is None:
            return {}
        whole = torch.empty(draw.shape, dtype=torch.bool, device=draw.device).bernoulli_(*draw.args)
        if len(loop.dead) == loop.period:
            return {}
        step = PART(whole.flip(0) if reverse else whole, number, place)
        return dict(zip(dropping(loop, self.calls), step.split(draw.steps.counts), strict=True))

    def _numbers(self, loop: Loop, index: int, reverse: bool) -> torch.Tensor:
        """The numbers of a row in all steps."""
        numbers, row = loop.numbers[index], self.calls.rows[loop.start + index]
        compared = self.calls.kinds[row.kind].name in COMPARING
        form = self.calls.forms[row.reads[0] if compared else row.makes[0]]
        return torch.tensor(numbers[::-1] if reverse else numbers, dtype=form.dtype, device=form.device)

    def _finish(self, loop: Loop, number: int, first: dict, made: dict[Made, torch.Tensor]) -> None:
        def after(carry: Carry) -> torch.Tensor:
            return made[Made(carry.row, carry.leaf)] if carry.of is None else first[carry.of]

        self.last.append({})
        self.whole.append({})
        for place, carry in enumerate(loop.carries):
            last = LAST(after(carry), number, place)
            if carry.of is None:
                self.last[number].setdefault(Made(carry.row, carry.leaf), last)
        ys = self.replay.ys(number)
        for place, each in enumerate(ys):
            self.whole[number][each] = STEPS(made[each], number, place, loop.steps)
        for place, (index, written) in enumerate(loop.written.items(), start=len(ys)):
            parts = STEPS(made[Made(index, 0)], number, place, loop.steps)
            self.last[number][Made(index, 0)] = self._written(written, parts, self.reverse[number])

    def _written(self, written: Written, parts: torch.Tensor, reverse: bool) -> torch.Tensor:
        """A tensor after the loop that writes its parts; these with the steps in front."""
        if (written.step < 0) != reverse:
            parts = parts.flip(0)
        value = moved(parts, written.dim)
        if not written.squeezed:
            value = value.flatten(written.dim, written.dim + 1)
        extent, before = value.shape[written.dim], self.calls.forms[written.first]
        begin = written.begin if written.step > 0 else written.begin + written.extent - extent
        if extent < before.shape[written.dim] or not before.is_contiguous:
            return torch.slice_scatter(self.tensor(written.first), value, written.dim, begin, begin + extent)
        return value.clone(memory_format=torch.contiguous_format)

    def _falls(self, parts: Parts) -> bool:
        """Whether later parts lie before earlier ones."""
        turned = isinstance(parts.of, tuple) and self.reverse[parts.of[0]]
        return (parts.step < 0) != turned

    def _in_front(self, parts: Parts, steps: int, reverse: bool) -> torch.Tensor:
        """A tensor with all parts in front; the last one first where the loop is ``reverse``."""
        end, apart = parts.first + parts.step * (steps - 1), abs(parts.step)
        if isinstance(parts.of, tuple):
            number, *made = parts.of
            begin = min(self._position(number, parts.first), self._position(number, end))
            whole = self.whole[number][Made(*made)][begin : begin + apart * (steps - 1) + 1 : apart]
        else:
            reached = apart * (steps - 1) + parts.extent
            whole = narrowed(self.tensor(parts.of), parts.dim, min(parts.first, end), reached)
            if apart == parts.extent and not parts.squeezed:
                whole = whole.unflatten(parts.dim, (steps, parts.extent))
            elif apart != parts.extent:  # gaps, or windows that overlap
                whole = whole.unfold(parts.dim, parts.extent, apart)
                whole = whole.squeeze(-1) if parts.squeezed else whole.movedim(-1, parts.dim + 1)
            whole = in_order(whole, [parts.dim, *(dim for dim in range(whole.dim()) if dim != parts.dim)])
        return whole.flip(0) if self._falls(parts) != reverse else whole


def sources_of(loop: Loop, calls: Calls) -> dict[Carry, list[Role]]:
    """What autograd reaches from each carry after enough steps: constants, parts, carries' first values."""
    direct: dict[Made, dict[Role, None]] = {}
    for index, roles in enumerate(loop.roles):
        row, found = calls.rows[loop.stop - loop.period + index], {}
        for role in (loop.taken[index],) if roles is None else roles:
            found.update(direct[Made(role.row, role.leaf)] if isinstance(role, Local) else {role: None})
        for leaf, value in enumerate(row.makes):
            direct[Made(index, leaf)] = found if calls.forms[value].requires_grad else {}
    return {carry: _closed(carry, direct) for carry in loop.carries}


def _closed(carry: Carry, direct: dict[Made, dict[Role, None]]) -> list[Role]:
    """What a carry is made of, in this step and those before."""
    found: dict[Role, None] = {}
    waiting: list[Role] = [carry]
    while waiting:
        role = waiting.pop()
        if role in found:
            continue
        found[role] = None
        if isinstance(role, Carry):
            waiting += direct[Made(role.row, role.leaf)] if role.of is None else [role.of]
    return list(found)


def attribute_of(module: nn.Module, path: str) -> torch.Tensor:
    owner, _, name = path.rpartition(".")
    return getattr(module.get_submodule(owner), name)


def tensors_in(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
