"""Rows of public models → lines of JSON merged by key, tables with geometric means, bar charts."""

from __future__ import annotations

import html
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.results import Results, Row
from benchmarks.tables import markdown

Key = tuple[str, str, str, str]
"""Model, device, torch, precision."""
_OURS = "ours"
_BAR, _GAP, _LEFT, _WIDTH, _HEAD = 12, 4, 300, 640, 56
_FULL = 1.5
"""The ratio at the picture's right edge."""
_COLORS = {"hit": "#2a7f62", "parts": "#6aa9d6", "misses": "#d99a2b"}


def key_of(row: Row) -> Key:
    """The key of a row."""
    return row["model"], row["device"], row["torch"], row["precision"]


class Rows:
    """Measured rows in a file; a later row of a key replaces an earlier one."""

    def __init__(self, path: Path, known: Iterable[Path] = ()):
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._rows: dict[Key, Row] = {}
        for each in (*known, path):
            if each.exists():
                for line in each.read_text(encoding="utf-8").splitlines():
                    row = json.loads(line)
                    self._rows[key_of(row)] = row
        path.write_text("".join(f"{json.dumps(row)}\n" for row in self._rows.values()), encoding="utf-8")

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def get(self, key: Key) -> Row | None:
        """The latest row."""
        return self._rows.get(key)

    def add(self, row: Row) -> None:
        """Adds a row, and writes it at once: a visit may end at any time."""
        self._rows[key_of(row)] = row
        with self._path.open("a", encoding="utf-8") as file:
            print(json.dumps(row), file=file)

    def groups(self) -> dict[tuple[str, str, str], list[Row]]:
        """Comparable rows: of one device, torch and precision, small ones separate."""
        found: dict[tuple[str, str, str], list[Row]] = {}
        for row in self:
            size = "small" if row["small"] else "listed"
            found.setdefault((f"{row['device']}, {size}", row["torch"], row["precision"]), []).append(row)
        return found

    def write(self, command: str) -> list[Path]:
        """Writes a table, a picture, and results for :mod:`benchmarks.tables` for each group, beside the file."""
        written = []
        for group, rows in self.groups().items():
            rows.sort(key=_order)
            base = self._path.parent / re.sub(r"[^\w.]+", "_", "_".join(("public", *group)))
            title = f"{group[0]}, torch {group[1]}, {group[2]}"
            latest, told = rows[-1], [row | {"outcome": outcome(row)} for row in rows]
            origin = f"{group[0]}; {latest['machine']}"
            results = Results("public", command, origin, latest["versions"], told)
            results.save(base.with_name(f"{base.name}.json"))
            text = f"# {title}\n\n{summary(rows)}\n\n{markdown('public', results)}"
            base.with_name(f"{base.name}.md").write_text(text, encoding="utf-8")
            base.with_name(f"{base.name}.svg").write_text(picture(title, rows), encoding="utf-8")
            written.append(base.with_name(f"{base.name}.md"))
        return written


def outcome(row: Row) -> str:
    """The outcome of a model with our compiler; begins with one of a few words."""
    errors = row.get("errors", {})
    if "left_out" in row:
        return f"left out: {row['left_out']}"
    if "eager" in errors or "eager_first_s" not in row:
        return f"eager: {errors.get('eager') or row.get('error')}"
    further = "" if not row.get("ours_further") else f"; further from the judge than eager: {row['ours_furthest']}"
    if "error" in row:
        return f"crash: {row['error']}{further}"
    if _OURS in errors:
        return f"error: {errors[_OURS]}{further}"
    if "hits" not in row:
        words = row.get("refused") or "ours was not asked for"
        return f"refused: {words}{further}" if "refused" in row else words
    misses = "; ".join(f"{count} x {reason}" for reason, count in row["misses"].items())
    if "parts" in row:
        head = f"{row['parts']} parts, {100 * row['coverage']:.0f}% of a forward; refused whole: {row['refused']}"
        return f"parts: {head}{f'; misses: {misses}' if misses else ''}{further}"
    return f"misses: {row['hits']} hits, {misses}{further}" if misses else f"hit{further}"


def _kind(row: Row) -> str:
    return re.split(r"[:;]", outcome(row), maxsplit=1)[0]


def _ratio(row: Row, above: str, below: str) -> float | None:
    return row[above] / row[below] if row.get(above) and row.get(below) else None


def _order(row: Row) -> tuple[bool, float, str]:
    """Sorts by our time relative to eager's, missing ones last."""
    ratio = _ratio(row, "ours_ms", "eager_ms")
    return ratio is None, ratio or 0.0, row["model"]


def _mean(rows: Sequence[Row], above: str, below: str) -> str:
    """Geometric mean, number of models, and largest ratio."""
    found = {row["model"]: ratio for row in rows if (ratio := _ratio(row, above, below)) is not None}
    if not found:
        return "-"
    mean = math.exp(math.fsum(map(math.log, found.values())) / len(found))
    worst = max(found, key=lambda model: found[model])
    return f"**{mean:.2f}** of {len(found)}, at most {found[worst]:.2f} ({worst})"


_MEANS = {
    "ours / eager": ("ours_ms", "eager_ms"),
    "ours / torch.compile": ("ours_ms", "default_ms"),
    "ours / max-autotune": ("ours_ms", "max-autotune_ms"),
    "torch.compile / eager": ("default_ms", "eager_ms"),
    "ours / eager, in a run of steps": ("ours_run_ms", "eager_run_ms"),
    "ours / torch.compile, in a run of steps": ("ours_run_ms", "default_run_ms"),
    "ours / max-autotune, in a run of steps": ("ours_run_ms", "max-autotune_run_ms"),
    "peak / eager": ("ours_peak_bytes", "eager_peak_bytes"),
    "torch.compile's peak / eager": ("default_peak_bytes", "eager_peak_bytes"),
    "first step / torch.compile": ("ours_first_s", "default_first_s"),
}


def summary(rows: Sequence[Row]) -> str:
    """Counts and geometric means of each suite; a mean covers the models with both numbers."""
    lines = []
    for suite in dict.fromkeys(row["suite"] for row in rows):
        own = [row for row in rows if row["suite"] == suite]
        counted = Counter(map(_kind, own))
        trained = len(own) - counted["eager"] - counted["left out"]
        kinds = ", ".join(f"{kind} {count}" for kind, count in counted.most_common())
        judged = [row for row in own if "ours_further" in row]
        further = sum(bool(row["ours_further"]) for row in judged)
        lines += [f"{suite}: {len(own)} models, eager trains {trained}; {kinds}; {further} of {len(judged)} further"]
        lines[-1] += f" from the judge than eager\n\n| {suite} | geometric mean |\n|---|---|"
        lines[-1] += "".join(f"\n| {title} | {_mean(own, *pair)} |" for title, pair in _MEANS.items())
    return "\n\n".join(lines)


def picture(title: str, rows: Sequence[Row]) -> str:
    """An SVG bar chart: our time relative to eager's, with a tick for torch.compile; sorted."""
    rows = [row for row in sorted(rows, key=_order) if _ratio(row, "ours_ms", "eager_ms") is not None]
    height = _HEAD + len(rows) * (_BAR + _GAP) + 24
    scale = _WIDTH / _FULL
    texts = [
        f'<text x="8" y="18" font-size="14">{html.escape(title)}: a step of ours as a part of eager\'s</text>',
        f'<text x="8" y="36">{_legend()}</text>',
    ]
    for mark in (0.25, 0.5, 0.75, 1.0, 1.25):
        x, color = _LEFT + mark * scale, "#888" if mark == 1 else "#ddd"
        texts.append(f'<line x1="{x:.1f}" y1="{_HEAD - 6}" x2="{x:.1f}" y2="{height - 18}" stroke="{color}"/>')
        texts.append(f'<text x="{x:.1f}" y="{height - 6}" text-anchor="middle">{mark:g}</text>')
    for number, row in enumerate(rows):
        y, ours = _HEAD + number * (_BAR + _GAP), _ratio(row, "ours_ms", "eager_ms") or 0.0
        width, color = min(ours, _FULL) * scale, _COLORS.get(_kind(row), "#999")
        texts.append(f'<text x="{_LEFT - 6}" y="{y + 10}" text-anchor="end">{html.escape(row["model"])}</text>')
        texts.append(f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{color}"/>')
        texts.append(f'<text x="{_LEFT + width + 4:.1f}" y="{y + 10}">{ours:.2f}</text>')
        other = _ratio(row, "default_ms", "eager_ms")
        if other is not None:
            x = _LEFT + min(other, _FULL) * scale
            texts.append(f'<rect x="{x - 1:.1f}" y="{y - 1}" width="2.5" height="{_BAR + 2}" fill="#b3123a"/>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 60}" height="{height}"'
    style = 'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
    return f"{head} {style}\n" + "\n".join(texts) + "\n</svg>\n"


def _legend() -> str:
    kinds = "".join(f'<tspan fill="{color}">&#9632; {kind}  </tspan>' for kind, color in _COLORS.items())
    return f'{kinds}<tspan fill="#999">&#9632; others  </tspan><tspan fill="#b3123a">&#9474; torch.compile</tspan>'
