"""Draws of a traced graph, replayed: inputs of the imported function → what eager draws at each node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from bridge.aten import described_draw
from bridge.capture import Draw
from bridge.library import FUNCTIONS

__all__ = ["Drawn"]


class Drawn:
    """The draws of one run.

    Args:
        draws: what eager draws, in order.
        given: of those that are made before the program, the tensor by index; of placed ones the generator's state; of
            the first computed one as well, from which it and those after it are made (:mod:`bridge.aten.draws`).
    """

    def __init__(self, draws: Sequence[Draw], given: Mapping[int, torch.Tensor]):
        self._draws, self._given = draws, given
        self._next = next((index for index, draw in enumerate(draws) if draw.is_computed), len(draws))
        self._first, self._state = self._next, given.get(self._next)

    def at(self, index: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """A draw, with these parameters if it is computed; ``None`` if it is no input of the function."""
        if index < self._first:
            return self._given.get(index)
        for unused in range(self._next, index):
            self._make(unused, ())
        self._next = index + 1
        return self._make(index, tensors)

    def _make(self, index: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        draw = self._draws[index]
        description, _ = described_draw(draw)
        made, self._state = FUNCTIONS["draw"](draw.op, description, self._state, *tensors)
        return made
