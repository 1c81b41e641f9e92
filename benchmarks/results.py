"""Measured rows of a benchmark → JSON with the machine and the versions, for `benchmarks.tables`."""

from __future__ import annotations

import json
import os
import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tvm

FOLDER = Path(__file__).parent / "results"
"""The results that README.md and docs/ show, one file per benchmark and machine."""

Row = dict[str, Any]
"""The measurements of one case; keys end in their unit (``eager_ms``, ``min_cut_bytes``), ``None``: not measured."""


@dataclass(frozen=True)
class Results:
    """One run of a benchmark.

    Attributes:
        machine: processor, cores, threads.
        rows: one per case, in the order of the table.
        note: further information for readers, as one sentence.
    """

    benchmark: str
    command: str
    machine: str
    versions: str
    rows: list[Row]
    note: str = ""

    @classmethod
    def of(cls, benchmark: str, command: str, rows: list[Row]) -> Results:
        """The rows with the present machine and versions."""
        return cls(benchmark, command, machine(), versions(), rows)

    @classmethod
    def load(cls, path: Path) -> Results:
        """Reads a file of :meth:`save`."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def save(self, path: Path) -> None:
        """Writes JSON for readable diffs: a line for each row."""
        head = {key: value for key, value in asdict(self).items() if key != "rows"}
        lines = [f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)},\n" for key, value in head.items()]
        rows = ",\n".join(f"    {json.dumps(row, ensure_ascii=False)}" for row in self.rows)
        path.write_text(f'{{\n{"".join(lines)}  "rows": [\n{rows}\n  ]\n}}\n', encoding="utf-8")


def machine() -> str:
    """The processor's name, its cores, and torch's threads."""
    information = Path("/proc/cpuinfo")
    text = information.read_text() if information.exists() else ""
    fields = dict(re.findall(r"^(model name|cpu family|model)\s*:\s*(.+)$", text, re.MULTILINE))
    name = fields.get("model name", platform.processor() or platform.machine())
    family = f" (family {fields['cpu family']}, model {fields['model']})" if "cpu family" in fields else ""
    return f"{name}{family}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {platform.machine()}"


def versions() -> str:
    """Of torch, TVM and Python."""
    return f"torch {torch.__version__}, TVM {tvm.__version__}, Python {platform.python_version()}"
