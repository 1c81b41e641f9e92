"""Results of a replay: a program's layout → where each result of a run is found when no step of it runs on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

import torch

from bridge.compile.graphs.recorder import Form, nbytes
from bridge.compile.loop_ir.views import dense_strides
from bridge.compile.runtime.instructions import View
from bridge.compile.runtime.program import Program

__all__ = ["ReplayResults"]


class ReplayResults:
    """Where the results of a program are.

    A result lies in an input, in a constant, in memory that the run was given, or in memory of a library function's
    own: then the run is given memory for it as well, and what is recorded writes it there, or copies it at the end.

    Attributes:
        forms: of the memory that a run is given: first that of ``layout.fresh``, then that of ``copied``.
        copied: places of results that library functions allocate.
        readers: of each form, the first result that lies in it.

    Args:
        program: any, of numbers only.
        results: of a run.
    """

    def __init__(self, program: Program, results: Sequence[torch.Tensor]):
        layout = program.layout
        fresh = {made.slot: place for place, made in enumerate(layout.fresh)}
        self.forms: list[Form] = [
            (tuple(made.shape), dense_strides(made.shape), made.torch_dtype) for made in layout.fresh
        ]
        params, constants = len(layout.params), {slot for slot, _ in program.constants}
        views = {step.writes[0]: step for step in (*program.steps, *layout.views) if isinstance(step, View)}
        self.copied: list[int] = []
        self.readers = [layout.memory.index(made.slot) for made in layout.fresh]
        self._find: list[Callable[[Sequence, Sequence], torch.Tensor]] = []
        memory: list[int | None] = []
        for place, (slot, base, seen) in enumerate(zip(layout.results, layout.memory, results, strict=True)):
            if base in constants:
                self._find.append(_constant(seen))
                memory.append(None)
                continue
            if base not in fresh and base >= params:
                fresh[slot] = len(self.forms)
                self.forms.append((tuple(seen.shape), _dense_in_its_order(seen), seen.dtype))
                self.copied.append(place)
                self.readers.append(place)
                base = slot
            view = views.get(slot) if slot != base else None
            self._find.append(_found(fresh.get(base), base, view))
            memory.append(fresh.get(base) if view is None else None)
        # at once, in the place of those that are no given memory as well: they are few
        self._pick = itemgetter(*[at or 0 for at in memory]) if self.forms and len(memory) > 1 else None
        self._others = [place for place, at in enumerate(memory) if at is None]

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that a run is given."""
        return sum(map(nbytes, self.forms))

    def __call__(self, inputs: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results of a run on these inputs in this memory."""
        if self._pick is None:
            return [find(inputs, fresh) for find in self._find]
        results = list(self._pick(fresh))
        for place in self._others:
            results[place] = self._find[place](inputs, fresh)
        return results


def _dense_in_its_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides with the axes in the order in which they lie, and nothing in between."""
    if tensor.is_contiguous():
        return dense_strides(tensor.shape)
    return torch.empty_like(tensor, device="meta").stride()


def _constant(tensor: torch.Tensor) -> Callable[[Sequence, Sequence], torch.Tensor]:
    return lambda inputs, fresh: tensor


def _found(place: int | None, slot: int, view: View | None) -> Callable[[Sequence, Sequence], torch.Tensor]:
    """What finds an input, given memory, or a view of one."""
    if view is None:
        return (lambda inputs, fresh: inputs[slot]) if place is None else (lambda inputs, fresh: fresh[place])
    shape, strides, offset = view.shape, view.strides, view.offset

    def find(inputs: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor]) -> torch.Tensor:
        base = inputs[slot].contiguous() if place is None else fresh[place]
        return base.as_strided(shape, strides, base.storage_offset() + offset)

    return find
