"""CTC loss for tracing: ``F.ctc_loss`` → ``tvm_dispatch::ctc_loss``, whose result has a shape that no number decides.

torch's own operators return the forward probabilities too, whose shape is in the lengths. The operator here is the
whole loss, reduction included, computed by torch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bridge.base.modes import ambient_autocast
from bridge.base.torch_internals import aten
from bridge.capture.whole_functions import HANDLERS, WholeFunction, define_whole

__all__: list[str] = []

_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def _like_result(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity):
    is_each = reduction == _REDUCTIONS["none"] and log_probs.dim() == 3
    return log_probs.new_empty(log_probs.shape[1:2] if is_each else ())


def _define(name: str, lengths: str, computed: WholeFunction):
    given = f"Tensor log_probs, Tensor targets, {lengths} input_lengths, {lengths} target_lengths"
    schema = f"{name}({given}, int blank, int reduction, bool zero_infinity) -> Tensor"
    return define_whole(schema, computed, _like_result)


_of_tensors = _define("ctc_loss", "Tensor", WholeFunction(aten.ctc_loss.Tensor))
_of_lists = _define("ctc_loss_of_lists", "int[]", WholeFunction(aten.ctc_loss.IntList))


def _traced(
    func, log_probs, targets, input_lengths, target_lengths, blank=0, reduction="mean", zero_infinity=False
) -> torch.Tensor:
    lengths = input_lengths, target_lengths
    reduction = _REDUCTIONS.get(reduction, reduction)
    if reduction not in _REDUCTIONS.values():
        return func(log_probs, targets, *lengths, blank, reduction, zero_infinity)  # eager's error
    if ambient_autocast() is not None and log_probs.dtype != torch.float64:
        log_probs = log_probs.float()  # as eager's operator does
    options = (blank, reduction, bool(zero_infinity))
    if all(isinstance(each, torch.Tensor) for each in lengths):
        return _of_tensors(log_probs, targets, *lengths, *options)
    return _of_lists(log_probs, targets, *map(list, lengths), *options)


HANDLERS[F.ctc_loss] = lambda *args, **kwargs: _traced(F.ctc_loss, *args, **kwargs)
HANDLERS[torch.ctc_loss] = lambda *args, **kwargs: _traced(torch.ctc_loss, *args, **kwargs)
