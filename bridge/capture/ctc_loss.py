"""CTC loss for tracing: ``F.ctc_loss`` → ``tvm_dispatch::ctc_loss``, whose result has a shape that no number decides.

torch's own operators return the forward probabilities too, whose shape is in the lengths; so neither a fake run nor
``torch.export`` gets past them. The operator here is the whole loss, reduction included, computed by torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from bridge.base.modes import ambient_autocast
from bridge.base.torch_internals import aten

__all__ = ["CTC_LOSSES", "OUR_DERIVATIVES", "WholeCTCLoss"]

_library = torch.library.Library("tvm_dispatch", "FRAGMENT")

OUR_DERIVATIVES = "GeneratedBackwardFor_tvm_dispatch_ctc_loss"
"""How torch names the derivatives that are registered below; the graph holds what they are derivatives of."""

CTC_LOSSES: dict[Any, Any] = {}
"""Our operators, for lengths that are tensors and that are numbers → torch's of the same arguments."""


def _like_result(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity):
    is_each = reduction == _REDUCTIONS["none"] and log_probs.dim() == 3
    return log_probs.new_empty(log_probs.shape[1:2] if is_each else ())


_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def _define(name: str, lengths: str, computed: Any) -> None:
    """Defines one of our operators with torch's kernel and derivative, and registers it in :data:`CTC_LOSSES`."""
    given = f"Tensor log_probs, Tensor targets, {lengths} input_lengths, {lengths} target_lengths"
    _library.define(f"{name}({given}, int blank, int reduction, bool zero_infinity) -> Tensor")

    def kernel(*args):
        return computed(*args)

    def keep(ctx, inputs, output):
        ctx.save_for_backward(*[each for each in inputs if isinstance(each, torch.Tensor)])
        ctx.others = [None if isinstance(each, torch.Tensor) else each for each in inputs]

    def backward(ctx, grad):
        saved = iter(ctx.saved_tensors)
        log_probs, *others = [next(saved) if each is None else each for each in ctx.others]
        with torch.enable_grad():
            log_probs = log_probs.detach().requires_grad_()
            (found,) = torch.autograd.grad(computed(log_probs, *others), log_probs, grad)
        return found, *[None] * len(others)

    _library.impl(name, kernel, "CompositeExplicitAutograd")
    _library.impl(name, _like_result, "Meta")
    torch.library.register_autograd(f"tvm_dispatch::{name}", backward, setup_context=keep, lib=_library)
    CTC_LOSSES[getattr(torch.ops.tvm_dispatch, name).default] = computed


_define("ctc_loss", "Tensor", aten.ctc_loss.Tensor)
_define("ctc_loss_of_lists", "int[]", aten.ctc_loss.IntList)


class WholeCTCLoss(TorchFunctionMode):
    """While forward is traced, or runs on fake tensors: ``F.ctc_loss`` and ``torch.ctc_loss`` are our operator."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.ctc_loss or func is torch.ctc_loss:
            return _traced(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


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
        return torch.ops.tvm_dispatch.ctc_loss(log_probs, targets, *lengths, *options)
    return torch.ops.tvm_dispatch.ctc_loss_of_lists(log_probs, targets, *map(list, lengths), *options)
