"""One case of the sweep: a module's result under dispatch, in one word and one line."""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from bridge import UnsupportedModule, stats
from tests.bridge.compare import Call, Run, assert_same, check_module, clone_tree, run
from tests.device import DEVICE, moved
from tests.host_kernels import HostKernels
from tests.operator_mode import OperatorMode
from tests.sweep.other_sizes import Missed, compare_sizes, of_sizes

RECORDED_CALLS = 8
"""Calls of a module with recorded programs: warm-ups, calls until addresses repeat, replays."""
REDUCED = {"rtol": 1e-5, "atol": 1e-6}
"""Tolerances for a float64 module that computes in lower precision inside (a float32 RMSNorm, rotary angles)."""


@dataclass(frozen=True)
class Verdict:
    """One sample: ``pass``, ``refused``, ``mismatch``, ``error``, or ``skipped`` where eager gives no reference."""

    status: str
    detail: str = ""
    operators: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """One case, with one or more samples: a row of the report.

    ``status`` is ``pass``, ``refused(op)``, ``mismatch``, ``error``, or ``skipped``: without a reference, because eager
    itself fails or gives another result at every call.
    """

    case: str
    status: str
    samples: int
    passed: int
    refused: int
    skipped: int
    seconds: float
    detail: str


class _LowerPrecision(OperatorMode):
    """Notices whether any operation makes a float narrower than float64."""

    def __init__(self):
        super().__init__()
        self.seen = False

    def operator(self, func, args, kwargs):
        result = func(*args, **kwargs)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64:
                self.seen = True
        return result


def check(
    module: nn.Module,
    call: Call,
    *,
    rtol: float = 1e-9,
    seed: int = 0,
    process: Any = None,
    dynamic: int | None = None,
    recorded: bool = False,
) -> Verdict:
    """Compares a float64 module with eager: outputs, every gradient, buffers, and the generator's state.

    Raises nothing: all errors are results of the sweep.

    Args:
        dynamic: a dynamic dimension of the inputs; two further sizes are compared.
        recorded: makes more calls, with programs recorded as graphs as soon as possible.
    """
    module, call = module.to(DEVICE), Call(*moved((call.args, call.kwargs)))
    if dynamic is not None:
        return _check_dynamic(module, call, rtol, seed, process, dynamic)
    reduced, reason = _reference(module, call, rtol, seed, process)
    if reason:
        return Verdict("skipped", reason)

    how = {"calls": RECORDED_CALLS, "cuda_graphs": True} if recorded else {"calls": 1}
    replays = ""

    def compare(tolerances: dict[str, float], **options: Any) -> None:
        nonlocal replays
        make = partial(copy.deepcopy, module)
        made = check_module(make, lambda: call, seed=seed, process=process, **how, **tolerances, **options)
        if recorded:
            graphs = stats(made).graphs
            replays = "; ".join([f"{graphs.replays} replays", *graphs.refused.values()])

    verdict = _judge(compare, rtol, reduced)
    if replays and verdict.status == "pass":
        return replace(verdict, detail=f"{verdict.detail} ({replays})")
    if verdict.status != "mismatch" or DEVICE.type == "cpu":
        return verdict
    host = HostKernels()
    exactly = _judge(partial(compare, kernels=lambda: host), rtol, False)
    if exactly.status != "pass" or not host.differing:
        return verdict
    return Verdict(
        "pass", f"as the host's kernels; eager's {', '.join(sorted(host.differing))} is off on {DEVICE.type}"
    )


def _check_dynamic(module: nn.Module, call: Call, rtol: float, seed: int, process: Any, dimension: int) -> Verdict:
    """The verdict for the first set of other input sizes that eager accepts."""
    call = Call(*clone_tree((call.args, call.kwargs), torch.float64))
    verdict = Verdict("skipped", "no such dimension")
    for calls in of_sizes(call, dimension):
        references = [_reference(module, each, rtol, seed, process) for each, _ in calls]
        reason = next((reason for _, reason in references if reason), "" if calls else "nothing in that dimension")
        if reason:
            verdict = Verdict("skipped", reason)
            continue

        def compare(tolerances: dict[str, float], calls: list = calls) -> None:
            compare_sizes(module, calls, dimension, seed=seed, process=process, tolerances=tolerances)

        return _judge(compare, rtol, any(reduced for reduced, _ in references))
    return verdict


def _tolerances(rtol: float) -> dict[str, float]:
    return {"rtol": rtol, "atol": rtol / 100}


def _judge(compare: Callable[[dict[str, float]], None], rtol: float, reduced: bool) -> Verdict:
    verdict = _compare(compare, _tolerances(rtol))
    if verdict.status == "mismatch" and reduced:
        relaxed = _compare(compare, REDUCED)
        if relaxed.status == "pass":
            return Verdict("pass", f"to rtol {REDUCED['rtol']} only, because it makes narrower floats inside")
    return verdict


def _compare(compare: Callable[[dict[str, float]], None], tolerances: dict[str, float]) -> Verdict:
    try:
        compare(tolerances)
    except UnsupportedModule as refusal:
        return Verdict("refused", one_line(refusal), tuple(str(op.op) for op in refusal.ops))
    except Missed as missed:
        return Verdict("refused", one_line(missed), ("other sizes",))
    except AssertionError as difference:
        return Verdict("mismatch", one_line(difference))
    except Exception as error:  # noqa: BLE001 - any other exception is a bug, which the sweep lists
        return Verdict("error", f"{one_line(error)} @ {_place(error)}")
    return Verdict("pass")


def _reference(module: nn.Module, call: Call, rtol: float, seed: int, process: Any) -> tuple[bool, str]:
    """Whether eager computes in lower precision inside, and the reason why it is no reference (empty if it is).

    On a GPU, atomic additions vary in their order: eager is a reference if it reproduces itself up to ``rtol``.
    """

    def once(context: contextlib.AbstractContextManager) -> Run:
        copied, arguments = copy.deepcopy(module), Call(*clone_tree((call.args, call.kwargs), torch.float64))
        with context:
            return run(copied, arguments, seed=seed, process=process)

    mode = _LowerPrecision()
    try:
        first, second = once(mode), once(contextlib.nullcontext())
    except Exception as error:  # noqa: BLE001 - eager refuses to differentiate some of torch's samples
        return mode.seen, f"eager: {one_line(error)}"
    try:
        assert_same(first, second, **_tolerances(rtol))
    except AssertionError as difference:
        return mode.seen, f"eager differs from itself: {one_line(difference)}"
    return mode.seen, ""


def combine(case: str, verdicts: Iterable[Verdict], seconds: float) -> Outcome:
    """The row of a case: the worst of its samples decides; it passes if one sample passed and none is wrong."""
    verdicts = list(verdicts)
    counts = {status: sum(verdict.status == status for verdict in verdicts) for status in _BY_WEIGHT}
    status = next((status for status in _BY_WEIGHT if counts[status]), "skipped")
    decisive = next((verdict for verdict in verdicts if verdict.status == status), Verdict("skipped", "no samples"))
    label = f"refused({' '.join(sorted(set(decisive.operators)))})" if status == "refused" else status
    return Outcome(
        case=case,
        status=label,
        samples=len(verdicts),
        passed=counts["pass"],
        refused=counts["refused"],
        skipped=counts["skipped"],
        seconds=round(seconds, 2),
        detail=decisive.detail,
    )


_BY_WEIGHT = ("error", "mismatch", "pass", "refused", "skipped")


def one_line(error: BaseException, limit: int = 400) -> str:
    """The type and message of an exception as one line of a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:limit]


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{'/'.join(frames[-1].filename.split('/')[-2:])}:{frames[-1].lineno}" if frames else "unknown place"
