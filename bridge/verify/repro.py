"""``lowered.save_repro(directory)``: a stage → a script with data that runs it without the user's module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tvm

import autodiff
from autodiff.ir import Function
from bridge.artifact import from_text, to_text
from bridge.base.devices import HOST, devices_of
from bridge.lowering import LoweredCall, cleaned_and_named
from bridge.reference import interpret
from bridge.verify.check import BEFORE, Check, Trace, check, in_dtype, trace
from bridge.verify.inputs import compiled_on, deviation, largest
from partition import STRATEGIES, partition

SCRIPT = "repro.py"

_TEXT = '''"""{title}

{report}

Run it where tvm-dispatch is installed: python {script}. It runs the stage '{stage}' as it was saved and as installed
code rebuilds it from its input, compares both with what PyTorch's autograd gave, and exits with 1 if the rebuilt one
deviates. The module that the stage comes from is not needed.

    before.relax, after.relax   the stage's input and result as TVMScript, to read
    stage.json                  the same functions to load, and what the stage was given
    tensors.pt                  inputs, and the wanted results
"""

import sys
from pathlib import Path

from bridge.verify.repro import replay

if __name__ == "__main__":
    outcome = replay(Path(__file__).parent)
    print(outcome)
    sys.exit(1 if outcome.deviates else 0)
'''


def save_repro(lowered: LoweredCall, directory: str | Path, *, stage: str | None = None, seed: int = 0) -> Path:
    """Writes a script with data that rebuilds one stage without the user's module.

    Args:
        lowered: a result of :func:`bridge.lower`, with a sample.
        directory: created if it does not exist; an earlier reproducer in it is replaced.
        stage: one of the lowering's Relax stages, ``compiled forward`` or ``compiled backward``; by default the first
            one that deviates by :func:`check`.
        seed: for random draws and grad_outs.

    Returns:
        the script's path; it needs ``bridge``, ``autodiff`` and ``partition``, and no user code.

    Raises:
        ValueError: no stage deviates and none is named; there is no stage of that name; or the stage needs the
            module's ATen graph (``captured``, ``imported``), which a reproducer does not have.
    """
    report = f"The stage {stage!r} was named, not found to deviate."
    if stage is None:
        found = check(lowered, seed=seed)
        if found.first is None:
            raise ValueError(f"no stage deviates ({found.headline()}): name the stage to save")
        stage, report = found.first.name, str(found)
        lowered = _sharpest(lowered, found)
    if stage in ("captured", "imported"):
        raise ValueError(f"the stage {stage!r} is made from the module's ATen graph: there is no reproducer without it")
    made = trace(lowered, seed=seed)
    if stage not in made.found:
        raise ValueError(f"stage: wanted one of {', '.join(made.found)}, got {stage!r}")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    before, after = _functions(lowered, stage)
    for name, function in (("before", before), ("after", after)):
        (directory / f"{name}.relax").write_text(function.script(), encoding="utf-8")
    (directory / "stage.json").write_text(to_text(_record(made, stage, before, after)), encoding="utf-8")
    torch.save(_tensors(made, stage), directory / "tensors.pt")
    title = f"{lowered.captured.module_name}: the stage '{stage}' on its own."
    plain = report.replace("\\", "/").replace('"""', "'''")  # becomes part of a docstring
    path = directory / SCRIPT
    path.write_text(_TEXT.format(title=title, report=plain, script=SCRIPT, stage=stage), encoding="utf-8")
    return path


def _sharpest(lowered: LoweredCall, found: Check) -> LoweredCall:
    """The lowering in float64 if the stage deviates there as well, else in the module's own dtype."""
    kinds = list(found.allowed)
    if len(kinds) > 1 and found.first.deviations[kinds[-1]] > found.allowed[kinds[-1]]:
        return in_dtype(lowered, torch.float64)
    return lowered


def _functions(lowered: LoweredCall, stage: str) -> tuple[Function, Function]:
    if stage.startswith("compiled"):
        function = lowered.forward if stage == "compiled forward" else lowered.backward
        return function, function
    return lowered[BEFORE[stage]].function, lowered[stage].function


def _record(made: Trace, stage: str, before: Function, after: Function) -> dict[str, object]:
    lowered, plan = made.lowered, made.lowered.plan
    record: dict[str, object] = {
        "stage": stage,
        "allowed": made.allowed,
        "before": tvm.ir.save_json(before),
        "after": tvm.ir.save_json(after),
        "outputs": tuple(lowered.differentiable),
        "wanted": tuple(lowered.wanted),
        "num_primals": lowered.num_primals,
        "num_results": lowered.num_results,
    }
    if plan is not None:
        # A strategy object of the user's cannot be serialized: the split is not rebuilt then.
        record["strategy"] = plan.strategy if plan.strategy in STRATEGIES else None
        record["forward"] = tvm.ir.save_json(lowered.forward)
        record["saved"] = plan.saved_primals, plan.saved_outputs
    return record


def _tensors(made: Trace, stage: str) -> dict[str, list[torch.Tensor] | None]:
    """Inputs and wanted results of a stage; a backward gets primals and grad_outs, so that another split can run."""
    results, gradients = made.found[stage]
    reference = made.reference
    inputs = reference.primals + reference.grad_outs if stage == "split backward" else made.inputs[stage]
    return {
        "inputs": [tensor.detach().clone() for tensor in inputs],
        "results": reference.results if results is not None else [],
        "gradients": reference.gradients if gradients is not None else [],
    }


@dataclass(frozen=True)
class Replay:
    """The result of a reproducer; ``print`` it.

    Attributes:
        stage: the stage.
        as_saved, rebuilt: largest deviation from autograd of the saved stage, and of the stage rebuilt from its input
            by the installed code.
        allowed: largest deviation explained by rounding.
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
    """Runs the reproducer in a directory: the stage as saved, and rebuilt from its input, on the saved tensors."""
    record = from_text((directory / "stage.json").read_text(encoding="utf-8"))
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
    pairs = zip(found, [*results, *gradients], strict=False)  # a split forward also returns saved tensors
    scales = [largest(results)] * len(results) + [largest(gradients)] * len(gradients)
    offs = [deviation(mine, wanted, scale=scale) for (mine, wanted), scale in zip(pairs, scales, strict=True)]
    return max(offs, default=0.0)


def _run(
    record: dict[str, Any], loaded: dict[str, Function], inputs: list[torch.Tensor], rebuilt: bool
) -> list[torch.Tensor]:
    stage = record["stage"]
    if stage.startswith("compiled"):  # the stage is the compilation: as saved, the function is interpreted
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
    """Runs the forward, or forward and backward, on the primals and, for a backward, the grad_outs."""
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
