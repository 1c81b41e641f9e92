"""Replay: runs a reproducer that :func:`bridge.verify.repro.save_repro` wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tvm

import autodiff
from autodiff.ir import Function
from bridge.base.devices import HOST, devices_of
from bridge.lowering import cleaned_and_named
from bridge.reference import interpret
from bridge.verify.compare import deviation, largest
from bridge.verify.culprit import compiled_on
from partition import partition

__all__ = ["Replay", "replay"]


@dataclass(frozen=True)
class Replay:
    """What a reproducer found; ``print`` it.

    Attributes:
        stage: the stage.
        as_saved, rebuilt: largest deviation from autograd of the saved stage, and of the one that the installed code
            makes of the same input.
        allowed: the deviation that rounding explains.
    """

    stage: str
    as_saved: float
    rebuilt: float
    allowed: float

    @property
    def deviates(self) -> bool:
        """Whether the rebuilt stage deviates by more than rounding."""
        return self.rebuilt > self.allowed

    def __str__(self) -> str:
        limit = f"rounding explains {self.allowed:.0e}"
        return (
            f"stage '{self.stage}' as saved: off by {self.as_saved:.1e} ({limit})\n"
            f"stage '{self.stage}' rebuilt now: off by {self.rebuilt:.1e}: "
            f"{'deviates' if self.deviates else 'agrees with autograd'}"
        )


def replay(directory: Path) -> Replay:
    """Runs the stage as it was saved, and rebuilt from its input, on the saved tensors."""
    record = json.loads((directory / "stage.json").read_text(encoding="utf-8"))
    tensors = torch.load(directory / "tensors.pt", weights_only=True)
    loaded = {name: tvm.ir.load_json(record[name]) for name in ("before", "after", "forward") if name in record}
    offs = []
    for rebuilt in (False, True):
        with torch.no_grad():
            found = _run(record, loaded, tensors["inputs"], rebuilt)
        offs.append(_worst(found, tensors))
    return Replay(record["stage"], *offs, record["allowed"])


def _worst(found: Sequence[torch.Tensor], tensors: dict[str, list[torch.Tensor]]) -> float:
    results, gradients = tensors["results"], tensors["gradients"]
    pairs = zip(found, [*results, *gradients], strict=False)  # a split forward has captures behind its results
    scales = [largest(results)] * len(results) + [largest(gradients)] * len(gradients)
    offs = [deviation(mine, wanted, scale=scale) for (mine, wanted), scale in zip(pairs, scales, strict=True)]
    return max(offs, default=0.0)


def _run(
    record: dict[str, Any], loaded: dict[str, Function], inputs: list[torch.Tensor], rebuilt: bool
) -> list[torch.Tensor]:
    stage = record["stage"]
    if stage.startswith("compiled"):  # compiling is what the stage does: as saved, it is run operator by operator
        function = loaded["after"]
        if not rebuilt:
            return interpret(function, inputs).results
        devices = [device for device in devices_of(inputs) if device != HOST]
        return compiled_on(devices[0] if devices else HOST, function, "repro")(inputs)
    if stage.startswith("split"):
        return _run_split(record, loaded, inputs, rebuilt)
    function = _REBUILD[stage](record, loaded["before"]) if rebuilt else loaded["after"]
    return interpret(function, inputs).results


_REBUILD = {
    "masked": lambda record, before: autodiff.mask_dropout(before),
    "spelled": lambda record, before: autodiff.spell_out(before),
    "forward": lambda record, before: cleaned_and_named(before, not record["outputs"]),
    "joint": lambda record, before: autodiff.differentiate(before, record["outputs"], record["wanted"]),
    "cleaned": lambda record, before: autodiff.clean_joint(before),
}


def _run_split(
    record: dict[str, Any], loaded: dict[str, Function], inputs: list[torch.Tensor], rebuilt: bool
) -> list[torch.Tensor]:
    """Forward, or forward and backward; inputs are the primals, then for a backward the grad_outs."""
    primals, grad_outs = inputs[: record["num_primals"]], inputs[record["num_primals"] :]
    forward, backward = loaded["forward"], loaded["after"]
    saved_primals, saved_outputs = record["saved"]
    if rebuilt and record["strategy"] is not None:
        counts = {"num_primals": record["num_primals"], "num_outputs": record["num_results"]}
        halves = partition(loaded["before"], **counts, strategy=record["strategy"])
        forward, backward = halves.forward, halves.backward
        saved_primals, saved_outputs = halves.plan.saved_primals, halves.plan.saved_outputs
    made = interpret(forward, primals).results
    if record["stage"] == "split forward":
        return made
    saved = [primals[i] for i in saved_primals] + [made[i] for i in saved_outputs] + made[record["num_results"] :]
    return interpret(backward, [*saved, *grad_outs]).results
