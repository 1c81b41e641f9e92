"""Tables of numbers: JSON results → Markdown between markers in README.md and docs/numbers.md.

    python -m benchmarks.train_blocks --compile --json benchmarks/results/train_blocks.json
    python -m benchmarks.tables

A marker names the form of the table and the results: ``<!-- table: blocks train_blocks -->``; the text between it and
``<!-- end of table -->`` is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import FOLDER, Results, Row

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "numbers.md")
_MARKED = re.compile(r"(<!-- table: (\w+) (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


@dataclass(frozen=True)
class Column:
    """A column: its title, a row's value (``None``: not measured, shown as ``-``), and its number format."""

    title: str
    value: Callable[[Row], Any]
    form: str = ""
    bold: bool = False

    def cell(self, row: Row) -> str:
        """The text of the cell."""
        value = self.value(row)
        text = "-" if value is None else format(value, self.form).replace("|", "\\|")
        return f"**{text}**" if self.bold and value is not None else text


def number(title: str, key: str, form: str = ".2f") -> Column:
    """A measured number."""
    return Column(title, lambda row: row.get(key), form)


def ratio(title: str, key: str, other: str, form: str = ".2f", bold: bool = True) -> Column:
    """The quotient of two measured numbers."""

    def value(row: Row) -> float | None:
        above, below = row.get(key), row.get(other)
        return None if above is None or below is None else above / below

    return Column(title, value, form, bold)


def mebibytes(title: str, way: str) -> Column:
    """Bytes, shown in MiB."""

    def value(row: Row) -> float | None:
        count = row.get(f"{way}_bytes")
        return None if count is None else count / 2**20

    return Column(title, value, ".2f")


def _told(errors: dict[str, str]) -> str:
    return "; ".join(f"{name}: {words}" for name, words in errors.items() if name not in ("eager", "ours"))


_BLOCK = Column("block", lambda row: row["block"])
_MODULE = Column("module", lambda row: row["module"])
_WAYS = {"save_all": "save_all", "torch_min_cut": "torch's min-cut", "min_cut": "min_cut", "inputs": "recompute_all"}

#: Name of the form → the columns of the table.
FORMS: dict[str, tuple[Column, ...]] = {
    "short": (
        _BLOCK,
        number("eager ms", "eager_ms"),
        number("ours ms", "ours_ms"),
        ratio("ours / eager", "ours_ms", "eager_ms"),
        ratio("ours / torch.compile", "ours_ms", "torch_compile_ms"),
    ),
    "blocks": (
        _BLOCK,
        number("eager ms", "eager_ms"),
        number("ours ms", "ours_ms"),
        ratio("ours / eager", "ours_ms", "eager_ms"),
        number("torch.compile ms", "torch_compile_ms"),
        ratio("ours / torch.compile", "ours_ms", "torch_compile_ms"),
        number("torch's products ms", "products_ms"),
        ratio("ours / products", "ours_ms", "products_ms", bold=False),
    ),
    "compile": (
        _MODULE,
        number("add_tvm_dispatch s", "ours_first_add_s"),
        number("ours, first step s", "ours_first_s"),
        number("torch.compile, first step s", "torch_compile_first_s"),
        ratio("ours / torch.compile", "ours_first_s", "torch_compile_first_s", ".3f"),
        number("ours, second length s", "ours_second_length_s"),
        number("torch.compile, second length s", "torch_compile_second_length_s"),
        ratio("second / first length, ours", "ours_second_length_s", "ours_first_s", bold=False),
        number("import bridge s", "ours_import_s"),
    ),
    "cold_start": (
        _MODULE,
        number("first start, add_tvm_dispatch s", "first_add_s"),
        number("second start s", "second_add_s"),
        ratio("second / first", "second_add_s", "first_add_s"),
        number("without a cache s", "off_add_s"),
        number("first step, first start s", "first_step_s"),
        number("second start s", "second_step_s"),
    ),
    "models": (
        _MODULE,
        number("eager ms", "eager_ms", ".1f"),
        number("ours ms", "ours_ms", ".1f"),
        ratio("ours / eager", "ours_ms", "eager_ms"),
        number("torch.compile ms", "torch_compile_ms", ".1f"),
        ratio("ours / torch.compile", "ours_ms", "torch_compile_ms"),
    ),
    "inference": (
        _MODULE,
        number("eager ms", "eager_ms"),
        number("torch.jit ms", "jit_ms"),
        number("torch.compile ms", "compile_ms"),
        number("max-autotune ms", "autotune_ms"),
        number("ours ms", "ours_ms"),
        Column("quickest other", lambda row: row.get("best", "")),
        Column("ours / quickest other", lambda row: row.get("ours_to_best"), ".2f", bold=True),
        number("rounds", "rounds", "d"),
    ),
    "recurrent": (
        _MODULE,
        number("eager ms", "eager_ms", ".1f"),
        number("torch's layer ms", "layer_ms", ".1f"),
        number("torch.compile ms", "compile_ms", ".1f"),
        number("reduce-overhead ms", "reduce-overhead_ms", ".1f"),
        number("eager in a graph ms", "graphed_ms", ".1f"),
        number("unrolled ms", "unrolled_ms", ".1f"),
        number("launched ms", "launched_ms", ".1f"),
        number("ours ms", "ours_ms", ".1f"),
        Column("quickest other", lambda row: row.get("best", "")),
        Column("ours / quickest other", lambda row: row.get("ours_to_best"), ".2f", bold=True),
        Column("ours / unrolled", lambda row: row.get("ours_to_unrolled"), ".2f"),
        number("rounds", "rounds", "d"),
    ),
    "public": (
        Column("model", lambda row: row["model"]),
        number("rows", "rows", "d"),
        number("eager ms", "eager_ms", ".1f"),
        number("torch.compile ms", "default_ms", ".1f"),
        number("max-autotune ms", "max-autotune_ms", ".1f"),
        number("ours ms", "ours_ms", ".1f"),
        ratio("ours / eager", "ours_ms", "eager_ms"),
        ratio("ours / torch.compile", "ours_ms", "default_ms"),
        ratio("ours / max-autotune", "ours_ms", "max-autotune_ms"),
        ratio("in a run: / eager", "ours_run_ms", "eager_run_ms", bold=False),
        ratio("/ torch.compile", "ours_run_ms", "default_run_ms", bold=False),
        ratio("/ max-autotune", "ours_run_ms", "max-autotune_run_ms", bold=False),
        ratio("peak / eager", "ours_peak_bytes", "eager_peak_bytes", bold=False),
        number("first step s", "ours_first_s", ".1f"),
        ratio("/ torch.compile's", "ours_first_s", "default_first_s", bold=False),
        number("gradients from the judge: eager", "eager_from_judge", ".0e"),
        number("ours", "ours_from_judge", ".0e"),
        Column("ours", lambda row: row["outcome"]),
        Column("peers that raised", lambda row: _told(row.get("errors", {}))),
    ),
    "memory": (
        _MODULE,
        Column("input", lambda row: row["input"]),
        mebibytes("eager MiB", "eager"),
        *(mebibytes(f"{title} MiB", way) for way, title in _WAYS.items()),
        *(
            ratio(f"{title} / eager", f"{way}_bytes", "eager_bytes", ".3f", bold=way == "min_cut")
            for way, title in _WAYS.items()
        ),
        Column("torch's graph", lambda row: row.get("note", "")),
    ),
    "dynamic_bind": (_MODULE, number("steps", "steps", "d"), number("ms", "bind_ms"), number("CPU ms", "bind_work_ms")),
    "dynamic_call": (
        _MODULE,
        number("static µs", "static_us", ".1f"),
        number("dynamic µs", "dynamic_us", ".1f"),
        number("more µs", "more_us", ".1f"),
        number("sizes in turns µs", "turns_us", ".1f"),
    ),
    "dynamic_step": (
        _MODULE,
        number("static ms", "static_ms"),
        number("dynamic ms", "dynamic_ms"),
        ratio("dynamic / static", "dynamic_ms", "static_ms"),
        Column("launches/steps, static", lambda row: row.get("static_counts", "")),
        Column("dynamic", lambda row: row.get("dynamic_counts", "")),
    ),
    "dynamic_trainer": (
        _MODULE,
        *(number(f"{peer} s", f"{peer}_epoch_s") for peer in ("eager", "dynamic", "static", "inductor")),
        ratio("dynamic / eager", "dynamic_epoch_s", "eager_epoch_s"),
        ratio("dynamic / static", "dynamic_epoch_s", "static_epoch_s"),
        ratio("dynamic / torch.compile", "dynamic_epoch_s", "inductor_epoch_s"),
        number("entries", "entries", "d"),
        number("misses", "misses", "d"),
    ),
}


def header(columns: Sequence[Column]) -> str:
    """The two lines above the rows; columns of numbers are right-aligned."""
    rule = "".join("---:|" if column.form else "---|" for column in columns)
    return f"| {' | '.join(column.title for column in columns)} |\n|{rule}"


def line(columns: Sequence[Column], row: Row) -> str:
    """One row."""
    return f"| {' | '.join(column.cell(row) for column in columns)} |"


def markdown(form: str, results: Results) -> str:
    """The table without empty columns, then one line on the origin of the numbers."""
    columns = [column for column in FORMS[form] if any(column.value(row) not in (None, "") for row in results.rows)]
    lines = [header(columns), *(line(columns, row) for row in results.rows)]
    origin = f"`{results.command}`; {results.machine}; {results.versions}."
    return "\n".join([*lines, "", " ".join([origin, results.note]).strip(), ""])


def written(text: str, folder: Path = FOLDER) -> str:
    """A page's text with every marked table replaced.

    Raises:
        KeyError: a marker names a form that is not in ``FORMS``.
        FileNotFoundError: a marker names results that are not in ``folder``.
    """

    def table(found: re.Match[str]) -> str:
        opening, form, name, closing = found.groups()
        return f"{opening}{markdown(form, Results.load(folder / f'{name}.json'))}{closing}"

    return _MARKED.sub(table, text)


def main() -> None:
    """Writes the pages."""
    for page in PAGES:
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
