"""``lowered.save_repro(directory)``: a stage → a script and data that run it without the user's module."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import tvm

from autodiff.ir import Function
from bridge.lowering import LoweredCall
from bridge.verify.check import Check, Trace, check, in_dtype, trace
from partition import STRATEGIES

__all__ = ["save_repro"]

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

from bridge.verify.replay import replay

if __name__ == "__main__":
    outcome = replay(Path(__file__).parent)
    print(outcome)
    sys.exit(1 if outcome.deviates else 0)
'''

_BEFORE = {
    "masked": "imported",
    "spelled": "masked",
    "forward": "spelled",
    "joint": "forward",
    "cleaned": "joint",
    "split forward": "cleaned",
    "split backward": "cleaned",
}


def save_repro(lowered: LoweredCall, directory: str | Path, *, stage: str | None = None, seed: int = 0) -> Path:
    """Writes a script and its data that rebuild one stage without the user's module.

    Args:
        lowered: made by :func:`bridge.lower`, whose sample is used.
        directory: is made if it is not there; an earlier reproducer in it is replaced.
        stage: by default the first that :func:`check` finds to deviate. One of the lowering's Relax stages, or
            ``compiled forward`` or ``compiled backward``.
        seed: for random draws and grad_outs.

    Returns:
        the script; it needs ``bridge``, ``autodiff`` and ``partition``, and nothing of the user's.

    Raises:
        ValueError: no stage deviates and none is named; there is no stage of that name; or it is made from the
            module's ATen graph (``captured``, ``imported``), which a reproducer without the module does not have.
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
    (directory / "stage.json").write_text(json.dumps(_record(made, stage, before, after)), encoding="utf-8")
    torch.save(_tensors(made, stage), directory / "tensors.pt")
    title = f"{lowered.captured.module_name}: the stage '{stage}' on its own."
    plain = report.replace("\\", "/").replace('"""', "'''")  # it stands in a docstring
    path = directory / SCRIPT
    path.write_text(_TEXT.format(title=title, report=plain, script=SCRIPT, stage=stage), encoding="utf-8")
    return path


def _sharpest(lowered: LoweredCall, found: Check) -> LoweredCall:
    """The lowering in float64 if the deviation is there too, otherwise the one in the module's own type."""
    kinds = list(found.allowed)
    if len(kinds) > 1 and found.first.deviations[kinds[-1]] > found.allowed[kinds[-1]]:
        return in_dtype(lowered, torch.float64)
    return lowered


def _functions(lowered: LoweredCall, stage: str) -> tuple[Function, Function]:
    if stage.startswith("compiled"):
        function = lowered.forward if stage == "compiled forward" else lowered.backward
        return function, function
    return lowered[_BEFORE[stage]].function, lowered[stage].function


def _record(made: Trace, stage: str, before: Function, after: Function) -> dict[str, object]:
    lowered, plan = made.lowered, made.lowered.plan
    record: dict[str, object] = {
        "stage": stage,
        "allowed": made.allowed,
        "before": tvm.ir.save_json(before),
        "after": tvm.ir.save_json(after),
        "outputs": list(lowered.differentiable),
        "wanted": list(lowered.wanted),
        "num_primals": lowered.num_primals,
        "num_results": lowered.num_results,
    }
    if plan is not None:
        # A strategy that is an object of the user's cannot be written down: then the split is not made again.
        record["strategy"] = plan.strategy if plan.strategy in STRATEGIES else None
        record["forward"] = tvm.ir.save_json(lowered.forward)
        record["saved"] = [list(plan.saved_primals), list(plan.saved_outputs)]
    return record


def _tensors(made: Trace, stage: str) -> dict[str, list[torch.Tensor] | None]:
    """A backward is given what its forward computes, so that another split of the same function can be run too."""
    results, gradients = made.found[stage]
    reference = made.reference
    inputs = reference.primals + reference.grad_outs if stage == "split backward" else made.inputs[stage]
    return {
        "inputs": [tensor.detach().clone() for tensor in inputs],
        "results": reference.results if results is not None else [],
        "gradients": reference.gradients if gradients is not None else [],
    }
