"""Loops of any length: a folded form whose integers follow from one size -> a forward for all sizes.

It makes the calls that :class:`bridge.capture.loops.replay.Replay` makes, with torch's symbol in the place of the size
where it is traced for all of them. Whether a module's forward is that one for a given size, a recording tells
(:meth:`bridge.capture.loops.folded.OfAnyLength.holds`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bridge.base.torch_internals import pytree
from bridge.capture.loops.calls import Part, filled
from bridge.capture.loops.folded import FoldedCall, FoldedJoin, FoldedLoop, OfAnyLength, Source
from bridge.capture.loops.operators import FIRST, LAST, PART, STEPS
from bridge.capture.loops.parts import in_order, moved, narrowed, take
from bridge.capture.loops.replay import attribute_of, tensors_in

__all__ = ["ReplayOfAnyLength"]


@dataclass(frozen=True, eq=False)
class ReplayOfAnyLength:
    """The forward of a module for all sizes.

    Attributes:
        form: what it does, and what eager returns.
        leaf, dimension: where the size is read, a leaf of the arguments and one of its dimensions.
        proven: sizes for which a recording has told that the module's forward is this one.
    """

    form: OfAnyLength
    leaf: int
    dimension: int
    proven: set[int]

    def prove(self, form: Any, size: int) -> bool:
        """Whether the forward of a size is this one, as its recording tells; noted if so."""
        if self.form.holds(form, size):
            self.proven.add(size)
        return size in self.proven

    def of(self, module: nn.Module) -> Callable[..., Any]:
        """As the forward of the module."""

        @functools.wraps(module.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves = pytree.tree_leaves((args, kwargs))
            form, *_ = self.form.at(leaves[self.leaf].shape[self.dimension])
            return _Run(form, module, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]).result()

        return forward


class _Run:
    """One call of such a forward."""

    def __init__(self, form: tuple, module: nn.Module, arguments: list[torch.Tensor]):
        self.made, self.results, self.spec, inputs = form
        self.inputs = [
            arguments[source] if isinstance(source, int) else attribute_of(module, source) for source in inputs
        ]
        self.tensors: dict[Source, torch.Tensor] = {}
        self.done: list[list[torch.Tensor]] = []
        self.steps: list[Any] = []
        self.reverse: list[bool] = []
        self.last: list[dict[tuple[int, int], torch.Tensor]] = []
        self.whole: list[dict[tuple[int, int], torch.Tensor]] = []

    def result(self) -> Any:
        for each in self.made:
            match each:
                case FoldedLoop():
                    self.done.append([])
                    self._loop(each)
                case FoldedJoin():
                    self.done.append([self._joined(each)])
                case FoldedCall():
                    self.done.append(self._call(each, [self.tensor(source) for source in each.reads]))
        leaves = [self.tensor(leaf) if len(leaf) > 1 else leaf[0] for leaf in self.results]
        return pytree.tree_unflatten(leaves, self.spec)

    def tensor(self, source: Source) -> torch.Tensor:
        """Of a step, or of a part, one that is made once."""
        try:
            known = self.tensors.get(source)
        except TypeError:  # torch's symbols in it have no hash
            return self._found(*source)
        if known is None:
            known = self.tensors[source] = self._found(*source)
        return known

    def _found(self, kind: str, *rest: Any) -> torch.Tensor:
        match kind:
            case "input":
                return self.inputs[rest[0]]
            case "made":
                return self.done[rest[0]][rest[1]]
            case "part":
                return take(self.tensor(rest[0]), Part(0, *rest[1:]))
            case "last":
                return self.last[rest[0]][rest[1:]]
        number, row, leaf, step = rest
        return self.whole[number][row, leaf].select(0, self._position(number, step)).clone()

    def _position(self, number: int, step: Any) -> Any:
        """Where a step of a loop lies in its tensors."""
        return self.steps[number] - 1 - step if self.reverse[number] else step

    def _call(self, call: FoldedCall, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if call.part is not None:
            return [take(tensors[0], Part(0, *call.part))]
        shape, _, dtype, device, requires_grad = call.forms[0]
        if call.func is torch.Tensor.new_zeros and not requires_grad:
            return [torch.zeros(shape, dtype=dtype, device=device)]
        given = iter(tensors)
        args = filled(call.args, given, call.number)
        return tensors_in(call.func(*args, **filled(call.kwargs, given, call.number)))

    def _joined(self, join: FoldedJoin) -> torch.Tensor:
        pieces = [self._piece(source, join) for source in join.pieces]
        if len(pieces) > 1:
            return torch.cat(pieces, join.dim)
        return pieces[0].clone(memory_format=torch.contiguous_format)

    def _piece(self, source: Source, join: FoldedJoin) -> torch.Tensor:
        if source[0] != "steps":
            return self.tensor(source).unsqueeze(join.dim) if join.stacks else self.tensor(source)
        _, number, row, leaf, *ends = source
        begin, end = (self._position(number, step) for step in ends)
        falls = end < begin
        begin, end = (end, begin) if falls else (begin, end)
        whole = narrowed(self.whole[number][row, leaf], 0, begin, end - begin + 1)
        steps = moved(whole.flip(0) if falls else whole, join.dim)
        return steps if join.stacks else steps.flatten(join.dim, join.dim + 1)

    def _loop(self, loop: FoldedLoop) -> None:
        """Makes the calls of one step, with marks around them."""
        number = len(self.last)
        falling = [self._falls(part) for part in loop.parts]
        reverse = bool(falling) and all(falling)
        whole = [self._in_front(part, loop.steps, reverse) for part in loop.parts]
        parts = [PART(tensor, number, place) for place, tensor in enumerate(whole)]

        def source(role: tuple) -> torch.Tensor:
            if role[0] == "part of":
                return whole[role[1]]
            return self.tensor(loop.carries[role[1]][2] if role[0] == "carry" else role)

        first = []
        for place, (carry, roles) in enumerate(zip(loop.carries, loop.reached, strict=True)):
            reached = [tensor for tensor in map(source, roles) if tensor.requires_grad]
            first.append(FIRST(self.tensor(carry[2]), reached, number, place, loop.steps, reverse))
        made: dict[tuple[int, int], torch.Tensor] = {}

        def tensor(role: tuple) -> torch.Tensor:
            match role:
                case "local", row, leaf:
                    return made[row, leaf]
                case "carry", place:
                    return first[place]
                case "part of", place:
                    return parts[place]
            return self.tensor(role)

        for index, row in enumerate(loop.rows):
            if isinstance(row, FoldedCall):
                results = self._call(row, [tensor(role) for role in row.reads])
                made.update(((index, leaf), each) for leaf, each in enumerate(results))
            elif row is not None:
                made[index, 0] = parts[row]
        self.steps.append(loop.steps)
        self.reverse.append(reverse)
        self.last.append({})
        for place, (row, leaf, _, before) in enumerate(loop.carries):
            last = LAST(made[row, leaf] if before is None else first[before], number, place)
            if before is None:
                self.last[number].setdefault((row, leaf), last)
        self.whole.append({y: STEPS(made[y], number, place, loop.steps) for place, y in enumerate(loop.ys)})

    def _falls(self, part: tuple) -> bool:
        """Whether later parts lie before earlier ones."""
        of, _, _, step, *_ = part
        return (step < 0) != (of[0] == "of loop" and self.reverse[of[1]])

    def _in_front(self, part: tuple, steps: Any, reverse: bool) -> torch.Tensor:
        """A tensor with all parts in front; the last one first where the loop is ``reverse``."""
        of, dim, first, step, extent, squeezed = part
        end, apart = first + step * (steps - 1), abs(step)
        if of[0] == "of loop":
            begin = min(self._position(of[1], first), self._position(of[1], end))
            whole = self.whole[of[1]][of[2:]][begin : begin + apart * (steps - 1) + 1 : apart]
        else:
            reached = apart * (steps - 1) + extent
            whole = narrowed(self.tensor(of), dim, min(first, end), reached)
            if apart == extent and not squeezed:
                whole = whole.unflatten(dim, (steps, extent))
            elif apart != extent:  # gaps, or windows that overlap
                whole = whole.unfold(dim, extent, apart)
                whole = whole.squeeze(-1) if squeezed else whole.movedim(-1, dim + 1)
            whole = in_order(whole, [dim, *(each for each in range(whole.dim()) if each != dim)])
        return whole.flip(0) if self._falls(part) != reverse else whole
