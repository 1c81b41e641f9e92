"""Loops of recorded calls: what autograd reaches from a step's carries, the dropout masks of its steps; loops that stay
unrolled."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import torch

from autodiff.scan.prove import Carry, Local, Producer, StepParts
from bridge.base.errors import Unsupported
from bridge.base.log import channel
from bridge.base.torch_internals import is_dense
from bridge.capture.loops.row_calls import CallLoop, NotRolledError, Role, RowCalls
from bridge.capture.observation import Draw, StepMasks
from bridge.capture.rows import Record, values_in

__all__ = ["FUSED", "MOST_OPERATORS", "draw_of_steps", "draws_by_itself", "dropping", "reached_from", "unrolled_rows"]

log = channel("dispatch")


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


# Dropout masks in loops: eager's draws, call by call → one draw of all steps for each loop. Behind a draw with computed
# parameters, or in a step that has one, each step draws by itself.
#
# A row of the draw holds the masks of one step, in eager's order, and the first step's row is first. A step multiplies
# by its masks as eager's dropout does on the host. On a GPU the draw lists eager's fused dropouts one by one, because
# the memory layout of each tensor decides which element gets which number.


_MASK = "aten.bernoulli_.float"
FUSED = "aten.native_dropout.default"


def dropping(loop: CallLoop, calls: RowCalls) -> list[int]:
    """The rows of a step that draw a mask."""
    return [index for index in range(loop.period) if loop.start + index in calls.drawn]


def draws_by_itself(loop: CallLoop, calls: RowCalls) -> bool:
    """Whether a step draws from the generator's state, as all draws do from the first one with a computed parameter."""
    return any(draw.is_computed for row, draw in calls.drawn.items() if row < loop.stop)


def draw_of_steps(loop: CallLoop, calls: RowCalls) -> Draw | None:
    """The masks of all steps of a loop as one draw; ``None`` if a step draws nothing, or draws by itself."""
    drawn = [calls.drawn[loop.start + index] for index in dropping(loop, calls)]
    if not drawn or draws_by_itself(loop, calls):
        return None
    first, is_fused = drawn[0], drawn[0].op == FUSED
    if not is_fused and any(each.op != _MASK or not is_dense(_like(each)) for each in drawn):
        raise NotRolledError("a draw in a loop that is no mask")
    dtypes = [each.operand and each.operand.dtype if is_fused else each.dtype for each in drawn]
    if len(set(dtypes)) > 1 or len({(each.op, each.kwargs, each.device) for each in drawn}) > 1:
        raise NotRolledError("dropout of several types in a step")
    counts = tuple(math.prod(each.shape) for each in drawn)
    kept = tuple(1 - each.args[0] if is_fused else each.args[0] for each in drawn)
    shape, steps = (loop.steps, sum(counts)), StepMasks(counts, kept, dtypes[0])
    made = replace(first, shape=shape, stride=(shape[1], 1), dtype=torch.bool, steps=steps)
    if not is_fused:
        return made
    if dtypes[0] not in (torch.float32, torch.float64):
        raise NotRolledError("dropout of a half type in a step, which eager rounds once")
    places = dropping(loop, calls)
    rows = [start + place for start in range(loop.start, loop.stop, loop.period) for place in places]
    steps = replace(steps, dropouts=tuple(calls.drawn[row] for row in rows))
    return Draw(_MASK, shape, made.stride, torch.bool, kept[:1], device=first.device, steps=steps)


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
