"""Least squares for tracing: ``torch.linalg.lstsq`` → its solution, a whole operator.

How many residuals there are depends on the rank, which is in the numbers; the solution's shape does not. Who
reads the other fields gets torch's function, which is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from bridge.base.torch_internals import aten, pytree
from bridge.capture.whole_functions import HANDLERS, WholeFunction, define_whole

__all__: list[str] = []


def _solved(input, other, rcond, driver):
    return aten.linalg_lstsq.default(input, other, rcond, driver=driver)[0]


def _solution(input, other, rcond, driver):
    batch = torch.broadcast_shapes(input.shape[:-2], other.shape[: input.dim() - 2])
    return other.new_empty((*batch, input.shape[-1], *other.shape[input.dim() - 1 :]))


_solve = define_whole(
    "lstsq_solution(Tensor input, Tensor other, float? rcond, str? driver) -> Tensor",
    WholeFunction(_solved),
    _solution,
)


_FIELDS = ("solution", "residuals", "rank", "singular_values")


class LeastSquares:
    """What ``torch.linalg.lstsq`` returns; fields other than the solution are computed where they are read."""

    def __init__(self, solution: torch.Tensor, everything: Callable[[], tuple] | None):
        self._solution, self._everything = solution, everything

    def __getitem__(self, index: Any) -> Any:
        return self._solution if index in (0, -len(_FIELDS)) else self._everything()[index]

    def __getattr__(self, name: str) -> torch.Tensor:
        if name not in _FIELDS:
            raise AttributeError(f"the result of lstsq has no {name}")
        return self[_FIELDS.index(name)]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._everything())

    def __len__(self) -> int:
        return len(_FIELDS)


def _traced(A, B=None, rcond=None, *, b=None, driver=None) -> LeastSquares:
    other = b if B is None else B
    return LeastSquares(
        _solve(A, other, rcond, driver), partial(aten.linalg_lstsq.default, A, other, rcond, driver=driver)
    )


pytree.register_pytree_node(  # who watches the call sees a tensor in its result
    LeastSquares,
    lambda found: ([found[0]], found._everything),
    lambda leaves, everything: LeastSquares(*leaves, everything),
)
HANDLERS[torch.linalg.lstsq] = _traced
