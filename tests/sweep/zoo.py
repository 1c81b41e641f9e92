"""Tiny models in training (``tests.sweep.models``): a step compared in each tensor, then losses of some steps.

A refused model is dispatched in parts (``whole=False``), with the same losses; the report shows their share of an eager
forward's time.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from tests.bridge.compare import Call, assert_same, clone_tree, run
from tests.device import DEVICE, generators, moved
from tests.sweep.check import Outcome, Verdict, check, combine, one_line
from tests.sweep.models import MODELS, Case

RTOL = 1e-9
STEPS = 20


def names() -> list[str]:
    """The cases of this suite."""
    return list(MODELS)


def run_case(name: str, *, limit: int = 1, seed: int = 0, dynamic: int | None = None) -> Outcome:
    """One training step: loss and every output, every gradient, buffers, generator state; then losses of some steps.

    ``limit`` has no effect. With ``dynamic``, compares sizes and does not train.
    """
    del limit
    start = time.perf_counter()
    case = MODELS[name]
    torch.manual_seed(seed)
    module = case.model().to(case.dtype).train()
    call = Call(kwargs=case.batch())
    if case.dtype is torch.float64:
        verdict = check(module, call, rtol=RTOL, seed=seed, dynamic=dynamic)
    else:
        verdict = Verdict("skipped", f"{case.dtype} alone") if dynamic is not None else _single(module, call, seed)
    if dynamic is None and verdict.status in ("pass", "refused"):
        verdict = _trained(case, module, call, seed, verdict)
    return combine(name, [verdict], time.perf_counter() - start)


def _single(module: nn.Module, call: Call, seed: int) -> Verdict:
    """A step of a model whose kernels lack float64: differences from eager must be single-precision rounding."""
    module, kwargs = module.to(DEVICE), moved(call.kwargs)
    dispatched = copy.deepcopy(module)
    try:
        add_tvm_dispatch(dispatched, sample_kwargs=kwargs)
        actual, expected = (run(each, Call(kwargs=kwargs), seed=seed) for each in (dispatched, module))
        assert_same(actual, expected, rtol=1e-4, atol=1e-5)
        assert stats(dispatched).hits == 1
    except UnsupportedModule as refusal:
        return Verdict("refused", one_line(refusal), tuple(str(each.op) for each in refusal.ops))
    except AssertionError as difference:
        return Verdict("mismatch", one_line(difference))
    except Exception as error:  # noqa: BLE001 - a bug, which the sweep lists
        return Verdict("error", one_line(error))
    return Verdict("pass", "in single precision")


def _trained(case: Case, module: nn.Module, call: Call, seed: int, verdict: Verdict) -> Verdict:
    """The verdict after ``STEPS`` steps, whole or in parts, with refusals and the dispatched share."""
    module, kwargs = module.to(DEVICE), clone_tree(moved(call.kwargs), case.dtype)
    eager, dispatched = copy.deepcopy(module), copy.deepcopy(module)
    try:
        torch.manual_seed(seed)
        add_tvm_dispatch(dispatched, sample_kwargs=kwargs, whole=verdict.status == "pass", on_miss="compile")
        actual, expected = (_losses(case, each, kwargs, seed) for each in (dispatched, eager))
        tolerances = {"rtol": 1e-5 if verdict.detail else 1e-8, "atol": 1e-10}
        grows = _assert_as_close_as(
            lambda: _losses(case, _rounded_otherwise(module), kwargs, seed), actual, expected, **tolerances
        )
    except UnsupportedModule:
        return Verdict("refused", f"no part: {verdict.detail}", verdict.operators)
    except AssertionError as difference:
        return Verdict("mismatch", f"{STEPS} steps: {one_line(difference)}")
    except Exception as error:  # noqa: BLE001 - a bug, which the sweep lists
        return Verdict("error", f"{STEPS} steps: {one_line(error)}")
    counted = stats(dispatched)
    share = getattr(counted, "coverage", 1.0)
    seen = f"{counted.hits} hits, {counted.misses.total()} misses in {STEPS} steps"
    told = f"{100 * share:.0f}% in {len(counted.parts)} parts, {seen}" if verdict.status == "refused" else seen
    details = told, verdict.detail, "rounding grows, eager's as well" if grows else ""
    return Verdict(verdict.status, "; ".join(filter(None, details)), verdict.operators)


def _rounded_otherwise(module: nn.Module) -> nn.Module:
    """A copy whose parameters are some units in the last place away."""
    made = copy.deepcopy(module)
    with torch.no_grad():
        for each in made.parameters():
            each.mul_(1 + 8 * torch.finfo(each.dtype).eps)
    return made


def _assert_as_close_as(
    rounded: Callable[[], list[torch.Tensor]],
    actual: list[torch.Tensor],
    expected: list[torch.Tensor],
    **tolerances: float,
) -> bool:
    """Asserts eager's losses and generator state; returns whether the losses only agree up to growing rounding.

    Training may be chaotic (normalization by few numbers): then eager's losses with ``rounded`` parameters show the
    effect of rounding up to each step, and ours may be twice as far away.
    """
    try:
        torch.testing.assert_close(actual, expected, **tolerances)
    except AssertionError:
        other = rounded()
        assert torch.equal(actual[-1], expected[-1]), "another state of the generator"
        furthest = 0.0
        for step, (one, two, three) in enumerate(zip(actual[:-1], expected[:-1], other[:-1], strict=True)):
            furthest = max(furthest, float((three - two).abs()))
            off, allowed = float((one - two).abs()), tolerances["atol"] + tolerances["rtol"] * float(two.abs())
            if off > allowed + 2 * furthest:
                words = f"step {step} is off by {off:.1e}, rounding moves eager by {furthest:.1e}"
                raise AssertionError(words) from None
        return True
    return False


def _losses(case: Case, module: nn.Module, kwargs: dict[str, Any], seed: int) -> list[torch.Tensor]:
    """The loss of each step of SGD, under one seed; the last element is the generator's state afterwards."""
    torch.manual_seed(seed + 1)
    np.random.seed(seed + 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = case.loss(module(**kwargs))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, generators()]


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as rows of Markdown."""
    rows = [f"| {each.case} | {each.status} | {each.detail[:120]} |" for each in outcomes]
    return "\n".join(["| model | whole | trained |", "|---|---|---|", *rows])
