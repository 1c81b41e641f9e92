"""Special points: every supported operator at zeros, ties, infinities, nan, subnormals and overflow, beside eager.

    python -m tests.sweep --suite special --out special.csv

A case is an operator and a dtype. The column ``samples`` counts points (inputs and an upstream gradient), ``passed``
the points equal to eager, ``skipped`` the justified differences, with the reasons in ``detail``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from bridge import UnsupportedModule
from tests.sweep.check import Outcome, one_line
from tests.sweep.special.justified import excuse
from tests.sweep.special.operators import cases
from tests.sweep.special.run import run

__all__ = ["names", "run_case", "table"]

DTYPES = ("float32",)


def names() -> list[str]:
    """The cases of this suite: ``operator float32``, …"""
    return [f"{name} {dtype}" for dtype in DTYPES for name in cases()]


def run_case(name: str, *, limit: int = 0, seed: int = 0) -> Outcome:
    """One operator at all of its points."""
    start = time.perf_counter()
    operator, dtype = name.rsplit(" ", 1)
    element_type = getattr(torch, dtype)

    def outcome(status: str, points=0, equal=0, refused=0, justified=0, detail="") -> Outcome:
        seconds = round(time.perf_counter() - start, 2)
        return Outcome(name, status, points, equal, refused, justified, seconds, detail)

    try:
        found = run(cases()[operator], element_type, excuse(operator, element_type))
    except UnsupportedModule as refusal:
        return outcome(f"refused({' '.join(sorted({str(op.op) for op in refusal.ops}))})", refused=1)
    except Exception as error:  # noqa: BLE001 - a row of the table, as in the other suites
        return outcome("error", detail=one_line(error))
    words = "; ".join(f"{count} {why}" for why, count in found.justified.items())
    if found.differing:
        words = f"{len(found.differing)} differ, such as {found.differing[0]}"
    justified = sum(found.justified.values())
    return outcome("mismatch" if found.differing else "pass", found.points, found.equal, 0, justified, words)


def table(outcomes: Sequence[Outcome]) -> str:
    """Operators × points as text: counts per element type."""
    lines = [f"{'':10}{'operators':>10}{'refused':>9}{'points':>10}{'equal':>10}{'justified':>11}{'differing':>11}"]
    for dtype in DTYPES:
        rows = [outcome for outcome in outcomes if outcome.case.endswith(f" {dtype}")]
        points, equal = sum(row.samples for row in rows), sum(row.passed for row in rows)
        justified = sum(row.skipped for row in rows)
        refused = sum(row.refused for row in rows)
        counts = (len(rows) - refused, refused, points, equal, justified, points - equal - justified)
        widths = (10, 9, 10, 10, 11, 11)
        lines.append(f"{dtype:10}" + "".join(f"{n:>{width}}" for n, width in zip(counts, widths, strict=True)))
    return "\n".join(lines)
