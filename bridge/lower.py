"""``lower(module, sample)``: a module's call → the forward and backward functions to compile, stage by stage.

    captured    the sample call as a functional ATen graph           bridge.capture
    imported    ATen → Relax, with training semantics                bridge.aten
    masked      dropout becomes a product with a mask input          autodiff.mask_dropout
    rolled      steps of a loop become a scan, where there are any   autodiff.scan, partition.scans
    spelled     LayerNorm & co. become differentiable operators      autodiff.spell_out
    forward     layout propagation, simplification, unique names     autodiff.clean
    in blocks   logits that only one loss reads, in blocks of rows   autodiff.row_blocks
    biased      on a GPU, bias epilogues of products                 autodiff.fuse_bias_epilogues
    joint       grad_outs in, gradients out                          autodiff.differentiate
    cleaned     ZappLike, ZeroZapp, OneZapp, CSE, DCE                autodiff.clean_joint
    split       a forward with saved tensors, a backward, the Plan   partition

:mod:`bridge.lowering.pipeline` runs them in this order and keeps each stage's IR. ``print(lowered)`` lists the stages,
``print(lowered["joint"])`` shows one, ``print(lowered.diff("joint", "cleaned"))`` the changes of a pass.
``lowered["joint"].run(lowered.inputs("joint"))`` evaluates a stage; ``lowered.check()`` compares all with autograd.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bridge.base.devices import default_device_of_forward, working_for
from bridge.base.log import Stopwatch
from bridge.base.modes import ambient_autocast
from bridge.base.threads import interrupts_deferred
from bridge.capture import after_pre_hooks, capture, dynamic_dims, in_attempts, normalize_sample
from bridge.guards import undo
from bridge.lowering import DEFAULT_PARTITION, LoweredCall, Sample, lower_captured
from bridge.state import SampleCall
from partition import Strategy

if TYPE_CHECKING:
    from bridge.verify import Check

__all__ = ["Lowered", "lower"]


@dataclass(repr=False)
class Lowered(LoweredCall):
    """The result of :func:`lower`: every stage, and methods that rerun the sample.

    Example:
        >>> lowered = lower(nn.Linear(3, 2), torch.ones(5, 3))
        >>> lowered.check().ok
        True
    """

    @classmethod
    def of(cls, call: LoweredCall, sample: Sample, seconds: float) -> Lowered:
        """A lowered call + its sample + ``seconds`` of capture and lowering → a ``Lowered``."""
        made = {field.name: getattr(call, field.name) for field in fields(call)}
        return cls(**{**made, "sample": sample, "seconds": seconds})

    def inputs(self, stage: str = "forward", *, seed: int = 0) -> list[torch.Tensor]:
        """The sample → the arguments of ``self[stage].run``: see :func:`bridge.verify.inputs.stage_inputs`."""
        from bridge.verify import stage_inputs

        return stage_inputs(self, stage, seed=seed)

    def check(self, dtype: torch.dtype | None = None, *, seed: int = 0) -> Check:
        """Compares every stage with autograd, names the first deviation: see :func:`bridge.verify.check.check`."""
        from bridge.verify import check  # a late import: ``import bridge`` is quicker without

        return check(self, dtype=dtype, seed=seed)

    def save_repro(self, directory: str | Path, *, stage: str | None = None, seed: int = 0) -> Path:
        """Writes a script that rebuilds a deviating stage: see :func:`bridge.verify.repro.save_repro`."""
        from bridge.verify import save_repro

        return save_repro(self, directory, stage=stage, seed=seed)


@interrupts_deferred()
@default_device_of_forward()
def lower(
    module: nn.Module,
    sample_input: Any,
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    partition: str | Strategy = DEFAULT_PARTITION,
    dynamic_shapes: Any = None,
) -> Lowered:
    """Implements :func:`bridge.lower`."""
    sample = SampleCall(module, *normalize_sample(module, sample_input, sample_kwargs))
    with after_pre_hooks(sample) as given, undo(module, always=True):
        watch = Stopwatch()
        dims, grad = dynamic_dims(given, dynamic_shapes), torch.is_grad_enabled()

        def lowered() -> LoweredCall:
            captured = capture(replace(given, dims=dims))
            return lower_captured(captured, grad=grad, partition=partition, capture_seconds=watch.seconds)

        call = in_attempts(lowered)
        captured = call.captured
        training = {path: child.training for path, child in module.named_modules()}
        with working_for(captured.device):
            autocast = ambient_autocast()
        sample = Sample(module, given.args, given.kwargs, partition, training, autocast, relower=lower)
        return Lowered.of(call, sample, watch.seconds)
