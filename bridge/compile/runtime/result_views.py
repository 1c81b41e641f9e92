"""Views of results: steps at a program's end → right behind the steps that compute what they show.

Who waits for a result, as for one gradient of many, waits for no more than that.
"""

from __future__ import annotations

from collections.abc import Sequence

from bridge.compile.runtime.loop_step import Instruction

__all__ = ["brought_forward"]


def brought_forward(steps: Sequence[Instruction], first: int) -> tuple[list[Instruction], dict[int, int]]:
    """The steps, and by the place of one in front of ``first``, and by that, where it is now. From there on, all are
    views."""
    written = {slot: index for index, step in enumerate(steps[:first]) for slot in step.writes}
    behind: dict[int, list[Instruction]] = {}
    for view in steps[first:]:
        behind.setdefault(written.get(view.reads[0], -1), []).append(view)
    found, places = [*behind.get(-1, ())], {}
    for index, step in enumerate(steps[:first]):
        places[index] = len(found)
        found += [step, *behind.get(index, ())]
    places[first] = len(found)
    return found, places
