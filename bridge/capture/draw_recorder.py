"""Recorder of random draws: a dispatch mode under which operators run → a :class:`Draw` for each that draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bridge.base.torch_internals import TorchDispatchMode, current_graph_task_id, schema
from bridge.capture.generator_watch import unwatched
from bridge.capture.observation import Draw, Parameter
from bridge.capture.op_trace import OpTrace
from bridge.capture.passes.preserved_ops import COMPUTED_DRAWS

__all__ = ["DrawRecorder", "record_draws"]


def record_draws(run: Callable[[], Any], draws: list[Draw]) -> Any:
    """Runs ``run`` (on fake tensors), appends its random draws to ``draws`` and returns its result."""
    with DrawRecorder(draws, lambda op, reason: None):
        return run()


class DrawRecorder(TorchDispatchMode):
    """Appends a :class:`Draw` for every random operator that runs; tells what it cannot express.

    With a ``trace``, every operator is written down there. ``differentiates``: whether one ran in a backward.
    """

    def __init__(self, draws: list[Draw], complain: Callable[[str, str], None], trace: OpTrace | None = None):
        super().__init__()
        self.draws = draws
        self.complain = complain
        self.trace = trace
        self.differentiates = False
        self.in_backward = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.trace is None:
            result = func(*args, **(kwargs or {}))
        else:
            arguments = self.trace.arguments(func, args, kwargs or {})
            with unwatched():
                result = func(*args, **(kwargs or {}))
            self.trace.add(func, arguments, result)
        if current_graph_task_id() != -1:
            self.differentiates = True
            if not torch.is_grad_enabled() and not self.in_backward:
                self.in_backward = True  # said once
                reason = "runs autograd inside forward: its result is a constant"
                self.complain("torch.autograd.grad or backward", reason)
        if torch.Tag.nondeterministic_seeded in func.tags and not _draws_nothing(func, args):
            self._record(func, args, kwargs or {}, result)
        return result

    def _record(self, func, args, kwargs, result) -> None:
        if isinstance(result, tuple):  # native_dropout called by name: the mask is what was drawn
            result = result[1] if str(func) == "aten.native_dropout.default" else result[0]
        # the dispatcher drops arguments that equal their default
        defaults = [a.default_value for a in schema(func).arguments[len(args) :] if not a.kwarg_only]
        args = (*args, *(value for value in defaults if value is not None))
        if str(func) == "aten.bernoulli.p" and args[0].requires_grad:
            self.complain(str(func), "eager has no derivative of it, and fails in the backward")
            return
        rest = args[1:] if _only_filled(func) else args
        if kwargs.get("generator") is not None:
            self.complain(str(func), "a random draw from a generator of its own")
            return
        if any(isinstance(value, torch.Tensor) for value in (*rest, *kwargs.values())):
            if func not in COMPUTED_DRAWS:
                self.complain(str(func), "a random draw whose distribution is computed")
                return
            rest = [_parameter(value) if isinstance(value, torch.Tensor) else value for value in rest]
        self.draws.append(
            Draw(str(func), tuple(result.shape), result.stride(), result.dtype, tuple(rest), tuple(kwargs.items()))
        )


def _parameter(value: torch.Tensor) -> Parameter:
    return Parameter(tuple(value.shape), value.dtype, value.stride())


def _only_filled(func) -> bool:
    """Whether the operator's first tensor only says what to fill, and is no parameter of the distribution."""
    _, packet, _ = str(func).split(".")
    return packet.endswith(("_", "_like", "dropout")) or str(func) == "aten.bernoulli.p"


def _draws_nothing(func, args) -> bool:
    name = str(func)
    if name in ("aten.native_dropout.default", "aten.dropout.default"):
        return not args[2] or args[1] == 0 or args[0].numel() == 0
    # tagged, but random only when asked for dropout
    if "scaled_dot_product" in name:
        return not any(isinstance(arg, float) and arg > 0 for arg in args[3:])
    return False
