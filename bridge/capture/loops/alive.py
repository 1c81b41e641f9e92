"""Live rows: recorded calls and their loops -> loops of whose rows each is needed in all steps, or in none.

What nobody reads has no gradient in eager. In a loop it would have the gradient zero in the steps in which nobody reads
it, and zero times an infinite factor is not a number. So the last steps, in which fewer rows are needed (a state that
no step comes after), are no part of the loop, and rows that are needed in no step are not called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bridge.capture.loops.find import LEAST_STEPS, Loop
from bridge.capture.loops.row_calls import Calls, NotRolledError

__all__ = ["alive_rows", "evenly_alive"]


def evenly_alive(calls: Calls, loops: Sequence[Loop]) -> list[Loop]:
    """The loops, some without their last steps.

    ``NotRolledError`` if rows are needed in other steps than the first ones, or if steps that would be left out are
    read by another loop.
    """
    alive = alive_rows(calls)
    return [_even(loop, number, loops, alive) for number, loop in enumerate(loops)]


def alive_rows(calls: Calls) -> list[bool]:
    """Of each row, whether the results need it."""
    needed = calls.needed
    alive = [False] * len(calls.rows)
    for number in range(len(calls.rows) - 1, -1, -1):
        row = calls.rows[number]
        if number in calls.effects or not needed.isdisjoint(row.makes):
            alive[number] = True
            needed.update(row.reads)
    return alive


def _even(loop: Loop, number: int, loops: Sequence[Loop], alive: Sequence[bool]) -> Loop:
    period = loop.period
    steps = [tuple(alive[begin : begin + period]) for begin in range(loop.start, loop.stop, period)]
    count = next((count for count, each in enumerate(steps) if each != steps[0]), len(steps))
    if count == len(steps):
        return _without_dead(loop, steps[0])
    read = any(isinstance(parts.of, tuple) and parts.of[0] == number for each in loops for parts in each.parts)
    if count < LEAST_STEPS or read:
        raise NotRolledError(f"what the results need of a step differs after step {count} of {len(steps)}")
    numbers = {row: numbers[:count] for row, numbers in loop.numbers.items()}
    return _without_dead(replace(loop, steps=count, numbers=numbers), steps[0])


def _without_dead(loop: Loop, alive: Sequence[bool]) -> Loop:
    """The loop without the rows that the results need in no step, and without what these alone read."""
    if all(alive):
        return loop
    of_alive = [{row: each for row, each in given.items() if alive[row]} for given in (loop.taken, loop.written)]
    numbers = {row: each for row, each in loop.numbers.items() if alive[row]}
    roles = [each if alive[row] else [] for row, each in enumerate(loop.roles)]
    dead = frozenset(row for row, is_alive in enumerate(alive) if not is_alive)
    left = replace(loop, roles=roles, taken=of_alive[0], written=of_alive[1], numbers=numbers, dead=dead)
    if any(alive) and not left.carries:
        raise NotRolledError("what the results need of a step does not depend on the step before")
    return left
