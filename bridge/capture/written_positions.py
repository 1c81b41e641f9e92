"""Written positions for tracing: ``torch.as_strided_scatter`` of a contiguous tensor → a whole operator.

torch's derivative of it passes the gradient on where the source was written, too. Functionalization makes the same
operator of writes, whose derivative is right in eager, so forward's own call is told apart here, and gets eager's.
"""

from __future__ import annotations

from functools import partial

import torch

from bridge.base.torch_internals import aten
from bridge.capture.whole_functions import HANDLERS, WholeFunction, define_whole

__all__: list[str] = []

_written = define_whole(
    "as_strided_scatter(Tensor input, Tensor src, int[] size, int[] stride, int storage_offset) -> Tensor",
    WholeFunction(aten.as_strided_scatter.default),
    lambda input, *_: torch.empty_like(input),
)


def _traced(function, input, src, size, stride, storage_offset=None):
    """Places count from the start of a contiguous input's memory, which every copy of it has as well."""
    if input.storage_offset() or not input.is_contiguous() or input.is_conj() or input.is_neg():
        return function(input, src, size, stride, storage_offset)
    return _written(input, src, size, stride, storage_offset or 0)


for _function in (torch.as_strided_scatter, torch.Tensor.as_strided_scatter):
    HANDLERS[_function] = partial(_traced, _function)
