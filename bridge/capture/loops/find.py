"""Loops among recorded calls: rows -> loops whose steps are proven to be the same function of their inputs.

:mod:`autodiff.scan.prove` makes the proof; this module adapts it to recorded calls. Beside carries, constants and parts
of a tensor, a row may read a tensor that is

* *written* part by part: the same row of the step before has written it, and each step writes the next part.

The number of a row may differ from step to step: the numbers of all steps are a sequence. In the first steps autograd
may not yet track values that it tracks later, because the initial state requires no grad. The function is the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from autodiff.scan.prove import (
    FURTHEST,
    Carry,
    Constant,
    Local,
    Part,
    Producer,
    ProvenLoop,
    Rows,
    StepParts,
    step_parts,
)
from bridge.base.errors import Unsupported
from bridge.base.log import channel
from bridge.base.torch_internals import aten, is_dense
from bridge.capture.loops.row_calls import NotRolledError, RowCalls
from bridge.capture.observation import Draw, StepMasks
from bridge.capture.rows import Record, values_in

__all__ = ["FUSED", "MOST_OPERATORS", "CallLoop", "CallRows", "Role", "draw_of_steps", "dropping", "reached_from"]
__all__ += ["unrolled_rows"]

log = channel("dispatch")


Role = Local | Carry | Constant | StepParts


@dataclass
class CallLoop(ProvenLoop):
    """A proven loop.

    Attributes:
        written: row of a step -> the parts of a tensor that it writes, one per step. Its role is the part's new value.
        numbers: row of a step whose number differs between steps -> the numbers of all steps.
    """

    written: dict[int, StepParts] = field(default_factory=dict)
    numbers: dict[int, tuple[int | float, ...]] = field(default_factory=dict)

    @property
    def carried(self) -> set[Producer]:
        """The carried values, including tensors that rows write."""
        return super().carried | {Producer(row, 0) for row in self.written}

    @property
    def given(self) -> list[Any]:
        """The loop's inputs, including tensors that rows write."""
        return super().given + [parts.of for parts in self.written.values()]


class CallRows(Rows):
    """Recorded calls as rows for the proof; values are numbers."""

    def __init__(self, calls: RowCalls):
        self.calls, self.made, self.needed = calls, calls.made, calls.needed
        self.kinds, self.reads = [row.kind for row in calls.rows], [row.reads for row in calls.rows]
        self.taken = [row.part for row in calls.rows]
        self.readers = Counter(value for row in calls.rows for value in row.reads)
        self.readers.update(self.needed)

    def loop(self, start: int, period: int, steps: int) -> CallLoop:
        return CallLoop(start, period, steps)

    def part(self, value: int) -> Part | None:
        return self.calls.part(value)

    def columns(self, loop: CallLoop, index: int) -> list[Sequence[int]] | None:
        """The values that a row reads in all steps, by operand (of a write of a part, its new value), or ``None``."""
        numbers = loop.group(index)
        group = [self.calls.rows[number] for number in numbers]
        if not self._draws_alike(numbers):
            return None
        if len({repr(each.number) for each in group}) > 1:
            loop.numbers[index] = tuple(each.number for each in group)
        columns = list(zip(*(each.reads for each in group), strict=True))
        if group[0].into is None:
            return columns
        written = self._written(group, loop)
        if written is None:
            return None
        loop.written[index] = written
        return columns[1:2]

    def is_own(self, loop: CallLoop, index: int, roles: Sequence[Role]) -> bool:
        """Whether a row writes only memory that is carried or made in the step, and that no value outside shares."""
        row = self.calls.rows[loop.start + index]
        for place, of in enumerate(() if index in loop.written else row.through):
            role = roles[of]
            own = isinstance(role, Local) and role.row not in loop.taken
            if not own and not (isinstance(role, Carry) and place < row.targets):
                return False
        return True

    def is_whole(self, loop: CallLoop) -> bool:
        """Whether a loop carries a value or only draws, and autograd tracks all steps alike."""
        step = self.calls.rows[loop.start : loop.start + loop.period]
        if not super().is_whole(loop) and any(row.reads or row.makes for row in step):
            return False
        return all(self._is_followed_alike(loop, index) for index in range(loop.period))

    def _draws_alike(self, numbers: Sequence[int]) -> bool:
        """Whether rows draw nothing, or dropout masks with one metadata."""
        found = {self.calls.drawn.get(number) for number in numbers if self.calls.drawn}
        drops = self.calls.rows[numbers[0]].row.op is aten.dropout.default
        return not found - {None} or (len(found) == 1 and drops)

    def _written(self, group: Sequence[Any], loop: CallLoop) -> StepParts | None:
        """The parts that rows write, each into the tensor that the row of the step before made and only it reads."""
        first = group[0].reads[0]
        if self.calls.made[first].row >= loop.start:
            return None
        if any(later.reads[0] != before.makes[0] for before, later in pairwise(group)):
            return None
        if any(self.readers[each.makes[0]] > 1 for each in group[:-1]):
            return None
        parts = step_parts([each.into._replace(of=first) for each in group])
        return None if parts is None or abs(parts.step) != parts.extent else parts

    def _is_followed_alike(self, loop: CallLoop, index: int) -> bool:
        """Whether autograd tracks a row's results in all steps or in none, the first steps aside."""
        forms, group = self.calls.forms, [self.calls.rows[number] for number in loop.group(index)]
        last = [forms[value].requires_grad for value in group[-1].makes]
        if any(forms[value].requires_grad > now for each in group for value, now in zip(each.makes, last, strict=True)):
            return False
        return all([forms[value].requires_grad for value in each.makes] == last for each in group[FURTHEST:])


def reached_from(loop: CallLoop, calls: RowCalls) -> dict[Carry, list[Role]]:
    """The roles that autograd reaches from each carry after enough steps: constants, parts, carries' first values."""
    direct: dict[Producer, dict[Role, None]] = {}
    for index, roles in enumerate(loop.roles):
        row, found = calls.rows[loop.stop - loop.period + index], {}
        for role in (loop.taken[index],) if roles is None else roles:
            found.update(direct[Producer(role.row, role.leaf)] if isinstance(role, Local) else {role: None})
        for leaf, value in enumerate(row.makes):
            direct[Producer(index, leaf)] = found if calls.forms[value].requires_grad else {}
    reached = {carry: _closed(carry, direct) for carry in loop.carries}
    return {carry: [role for role in roles if _is_followed(role, calls)] for carry, roles in reached.items()}


def _is_followed(role: Role, calls: RowCalls) -> bool:
    """Whether autograd tracks a role's value outside of the loop; ``True`` for another loop's results, which it may."""
    match role:
        case StepParts():
            return isinstance(role.of, tuple) or calls.forms[role.of].requires_grad
        case Carry():
            return calls.forms[role.first].requires_grad
    return calls.forms[role.value].requires_grad


def _closed(carry: Carry, direct: dict[Producer, dict[Role, None]]) -> list[Role]:
    """The roles that a carry is computed from, in this step and earlier ones."""
    found: dict[Role, None] = {}
    waiting: list[Role] = [carry]
    while waiting:
        role = waiting.pop()
        if role in found:
            continue
        found[role] = None
        if isinstance(role, Carry):
            waiting += direct[Producer(role.row, role.leaf)] if role.of is None else [role.of]
    return list(found)


# Dropout masks in loops: eager's draws, call by call → one draw of all steps for each loop.
#
# A row of the draw holds the masks of one step, in eager's order, and the first step's row is first. A step multiplies
# by its masks as eager's dropout does on the host. On a GPU the draw lists eager's fused dropouts one by one, because
# the memory layout of each tensor decides which element gets which number.


_MASK = "aten.bernoulli_.float"
FUSED = "aten.native_dropout.default"


def dropping(loop: CallLoop, calls: RowCalls) -> list[int]:
    """The rows of a step that draw a mask."""
    return [index for index in range(loop.period) if loop.start + index in calls.drawn]


def draw_of_steps(loop: CallLoop, calls: RowCalls) -> Draw | None:
    """The masks of all steps of a loop as one draw; ``None`` without masks, ``NotRolledError`` if they are several."""
    drawn = [calls.drawn[loop.start + index] for index in dropping(loop, calls)]
    if not drawn:
        return None
    first, is_fused = drawn[0], drawn[0].op == FUSED
    if not is_fused and any(each.op != _MASK or not is_dense(_like(each)) for each in drawn):
        raise NotRolledError("a draw in a loop that is no mask")
    dtypes = [each.operand and each.operand.dtype if is_fused else each.dtype for each in drawn]
    if len(set(dtypes)) > 1 or len({(each.op, each.args, each.kwargs, each.device) for each in drawn}) > 1:
        raise NotRolledError("dropout of several rates or types in a step")
    counts = tuple(math.prod(each.shape) for each in drawn)
    shape = loop.steps, sum(counts)
    made = replace(first, shape=shape, stride=(shape[1], 1), dtype=torch.bool, steps=StepMasks(counts, dtypes[0]))
    if not is_fused:
        return made
    if dtypes[0] not in (torch.float32, torch.float64):
        raise NotRolledError("dropout of a half type in a step, which eager rounds once")
    places = dropping(loop, calls)
    rows = [start + place for start in range(loop.start, loop.stop, loop.period) for place in places]
    steps = replace(made.steps, dropouts=tuple(calls.drawn[row] for row in rows))
    return Draw(_MASK, shape, made.stride, torch.bool, (1 - first.args[0],), device=first.device, steps=steps)


def _like(draw: Draw) -> torch.Tensor:
    return torch.empty_strided(draw.shape, draw.stride, device="meta")


# Unrolled loops: a record → a refusal of thousands of unrolled steps.
#
# Each operator of a step is captured, lowered and planned by itself, which takes some hundredths of a second. A loop
# differs from a deep network by its weights: every step reads the same ones.


#: The most operators of a graph with unrolled steps: about five minutes of compilation.
MOST_OPERATORS = 1 << 13
#: Number of operators from which a warning is logged: about a minute.
_MANY = MOST_OPERATORS >> 2
_STEPS = 32
"""Number of readers of one parameter from which they count as steps."""
_HINT = "dispatch the cell that a step calls, or write the step so that it is found to repeat (docs/loops.md)"


def unrolled_rows(record: Record, parameters: int, forward: str) -> list[Unsupported]:
    """Refuses a record with unrolled steps and more than :data:`MOST_OPERATORS` rows; warns from a quarter of that.

    Args:
        parameters: the number of parameters, which are the record's first inputs.
        forward: the name for messages.
    """
    count = len(record.rows)
    if count <= _MANY:
        return []
    readers = Counter(number for row in record.rows for number in set(values_in((row.args, row.kwargs))))
    if all(readers[number] < _STEPS for number in range(parameters)):
        return []
    if count <= MOST_OPERATORS:
        words = "%s: a loop of %d operators is compiled step by step, which takes minutes: %s"
        log.warning(words, forward, count, _HINT)
        return []
    reason = f"{count} operators of steps that are not proven to be equal, at most {MOST_OPERATORS} are compiled"
    return [Unsupported("a long loop", forward, reason, _HINT)]
