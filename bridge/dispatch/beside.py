"""Gradients beside a call's own node: of its inputs, what nodes of chained results compute in a pass of autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bridge.base.torch_internals import current_graph_task_id

__all__ = ["ChainedGradients"]


class ChainedGradients:
    """Gradients of a call's inputs that later nodes of the call have computed, in one pass of autograd."""

    def __init__(self) -> None:
        self._pass = -1
        self._gradients: dict[int, torch.Tensor] = {}

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        if (now := current_graph_task_id()) != self._pass:
            self._pass, self._gradients = now, {}
        for place, gradient in enumerate(gradients):
            if gradient is not None:
                known = self._gradients.get(place)
                self._gradients[place] = gradient if known is None else known + gradient

    @property
    def is_empty(self) -> bool:
        return not self._gradients or current_graph_task_id() != self._pass

    def taken(self, gradients: Sequence[torch.Tensor | None], places: Sequence[int]) -> list[torch.Tensor | None]:
        """The gradients of the wanted inputs at these places, with what is beside them; that is gone then."""
        found = list(gradients)
        for index, place in enumerate(places if not self.is_empty else ()):
            more = self._gradients.pop(place, None)
            if more is not None:
                found[index] = more if found[index] is None else found[index] + more
        return found
