"""Forward and backward of whole models beside eager PyTorch, interleaved, with a breakdown of a step's time.

The breakdown is one profiled run of the dispatched step (torch's profiler, ranges ``tvm: PROGRAM/STEP``): matrix
products, other library calls, generated kernels by name, views; masks are drawn once more and timed separately.
"Outside" is the rest: the guard, autograd's engine, other code. The profiler costs microseconds per program step.

    python -m benchmarks whole_models --json whole_models.json
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.models import MODELS, loss_of
from benchmarks.results import Results, Row, machine, versions
from benchmarks.tables import FORMS, header, line
from bridge import add_tvm_dispatch, explain, stats
from bridge.dispatch.call_run import CallValues
from bridge.state import SampleCall

NAMES = ("GPT-2 small (4, 128)", "BERT-base (4, 128)", "ViT-S (8, 224 x 224)")
WARM_UP = 2
LARGEST = 8
"""Steps shown by name."""


def stepper(module: nn.Module, batch: dict[str, Any]) -> Callable[[], None]:
    """One forward and backward; gradients are new at each step."""

    def step() -> None:
        module.zero_grad()
        loss_of(module(**batch)).backward()

    return step


def interleaved(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each, by turns."""
    times: dict[str, list[float]] = {peer: [] for peer in steps}
    for _ in range(rounds + WARM_UP):
        for peer, step in steps.items():
            started = time.perf_counter()
            step()
            times[peer].append(time.perf_counter() - started)
    return {peer: 1e3 * statistics.median(values[WARM_UP:]) for peer, values in times.items()}


def breakdown(module: nn.Module, batch: dict[str, Any], step: Callable[[], None]) -> tuple[dict[str, float], Counter]:
    """Milliseconds of a profiled step by kind, and by the name of a step of the programs."""
    kinds = {}
    (report,) = explain(module).entries
    for program in report.programs:
        for row in program.steps:
            kinds[f"tvm: {program.program.name}/{row.name}"] = kind_of(row.kind, row.name, row.what), program.direction
    started = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        step()
    whole = 1e3 * (time.perf_counter() - started)
    by_kind: Counter[str] = Counter()
    by_name: Counter[str] = Counter()
    for event in recorded.key_averages():
        if event.key in kinds:
            kind, direction = kinds[event.key]
            spent = event.cpu_time_total / 1e3
            by_kind[f"{direction} {kind}"] += spent
            by_name[f"{direction} {event.key.partition('/')[2]} ({kind}, {event.count} x)"] += spent
    by_kind["masks"] = masks(module, batch)
    by_kind["outside"] = whole - by_kind.total()
    return dict(by_kind.most_common()), by_name


def kind_of(kind: str, name: str, what: str) -> str:
    """The kind of a step: matrix products by any library, other library calls, generated kernels, views."""
    products = ("mm", "bmm", "addmm", "linear", "matmul")
    if kind != "view" and any(word in products for word in (name, *what.split())):
        return "products"
    return {"kernel": "kernels"}.get(kind, kind)


def masks(module: nn.Module, batch: dict[str, Any]) -> float:
    """Milliseconds of the random draws alone; the fastest of a few."""
    (entry,) = stats(module).entries
    call, times = CallValues(), []
    call.inputs = entry.guard.match(SampleCall(module, (), batch))
    for _ in range(3):
        started = time.perf_counter()
        for act in entry.run.before:
            act(call)
        times.append(time.perf_counter() - started)
    return 1e3 * min(times)


def measure(name: str, options: argparse.Namespace) -> Row:
    """One row of the table, with the breakdown beside it."""
    torch.manual_seed(0)
    model = MODELS[name]
    eager = model.make(options.quick)
    batch = model.sample(eager, options.quick)
    ours = add_tvm_dispatch(copy.deepcopy(eager), batch)
    steps = {"eager": stepper(eager, batch), "ours": stepper(ours, batch)}
    if options.inductor:
        steps["torch_compile"] = stepper(torch.compile(copy.deepcopy(eager)), batch)
    row: Row = {"module": name}
    row.update({f"{peer}_ms": spent for peer, spent in interleaved(steps, options.rounds).items()})
    if stats(ours).misses:
        raise RuntimeError(f"not every step was dispatched: {stats(ours)}")
    by_kind, by_name = breakdown(ours, batch, steps["ours"])
    row["kinds_ms"] = {kind: round(spent, 3) for kind, spent in by_kind.items()}
    row["steps_ms"] = {step: round(spent, 3) for step, spent in by_name.most_common(LARGEST)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, help="torch.set_num_threads")
    parser.add_argument("--inductor", action="store_true", help="torch.compile as a third peer")
    parser.add_argument("--quick", action="store_true", help="tiny models, two rounds: does it work")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    options.rounds = 2 if options.quick else options.rounds
    if options.threads:
        torch.set_num_threads(options.threads)
    print(f"forward + backward, float32, medians of {options.rounds}; {versions()}; {machine()}\n")
    rows = [measure(name, options) for name in NAMES if options.only in name]
    print("\n".join([header(FORMS["models"]), *(line(FORMS["models"], row) for row in rows)]))
    for row in rows:
        print(f"\n{row['module']}: one profiled step of ours, ms\n")
        for title in ("kinds_ms", "steps_ms"):
            print("".join(f"    {spent:10.3f}  {what}\n" for what, spent in row[title].items()))
    if options.json:
        Results.of("whole_models", "python -m benchmarks whole_models", rows).save(options.json)


if __name__ == "__main__":
    main()
