"""A report as HTML, for notebooks."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from bridge.lowering.text import html_table, megabytes

if TYPE_CHECKING:
    from bridge.show.report import EntryReport, Report

__all__ = ["report_html"]


def report_html(report: Report) -> str:
    """Totals in the open, tables to fold out."""
    parts = [f"<b>{html.escape(report.head())}</b>"]
    parts += [_entry(entry) for entry in report.entries]
    if report.misses:
        rows = [(str(number), reason) for reason, number in report.misses.most_common()]
        parts.append(_fold("misses", html_table(("calls", "reason"), rows, right=(0,)), is_open=True))
    return f'<div style="font-size:90%">{"".join(parts)}</div>'


def _entry(entry: EntryReport) -> str:
    from bridge.show.report import saved_rows

    parts = [f"<p>{html.escape(entry.title)}</p>"]
    parts.append(_fold("guards", html_table(("a call must have",), [(guard,) for guard in entry.guards])))
    rows = [(name, f"{1e3 * seconds:.1f}") for name, seconds in entry.seconds.items()]
    total = 1e3 * sum(entry.seconds.values())
    parts.append(_fold(f"compile time: {total:.0f} ms", html_table(("stage", "ms"), rows, right=(1,))))
    for program in entry.programs:
        table = html_table(("step", "name", "flop", "moved", "module", "operators"), program.table(), right=(2, 3))
        parts.append(_fold(program.summary(full=True), table))
    if entry.plan is not None:
        head = f"saved for the backward: {len(entry.plan.captures)} captures, {megabytes(entry.plan.bytes)}"
        table = html_table(("value", "module", "tensor", "bytes", "kind", "why"), saved_rows(entry.plan), right=(3,))
        parts.append(_fold(head, table, is_open=True))
    return "".join(parts)


def _fold(title: str, body: str, *, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}><summary>{html.escape(title)}</summary>{body}</details>"
