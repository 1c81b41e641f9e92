"""A folder of records: ``header.json`` identifies their origin, ``records.jsonl`` has a line per case."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import tvm

from bridge.compile.cpu.build import features, model

ROOT = Path(__file__).parents[2]
PACKAGES = ("bridge", "autodiff", "partition")
IDENTITY = ("sources", "torch", "tvm", "python", "cpu", "features")
"""The header's entries that all records of a folder share."""


def header_of_this_tree() -> dict[str, str]:
    """Versions of everything that bits and text may depend on."""
    sources = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            sources.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    git = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--dirty"]
    found = subprocess.run(git, capture_output=True, text=True, check=False)
    return {
        "commit": found.stdout.strip() or "unknown",
        "sources": sources.hexdigest()[:24],
        "torch": torch.__version__,
        "tvm": tvm.__version__,
        "python": platform.python_version(),
        "cpu": model(),
        "features": hashlib.sha256(features().encode()).hexdigest()[:24],
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


class Store:
    """Records of one tree.

    Args:
        folder: made when the first record is added.

    Raises:
        ValueError: by :meth:`begin`, for a folder of another tree.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._header, self._records = folder / "header.json", folder / "records.jsonl"

    @property
    def header(self) -> dict[str, str]:
        return json.loads(self._header.read_text()) if self._header.exists() else {}

    def begin(self, header: dict[str, str]) -> None:
        """Continues a folder of the same sources and versions, or begins one."""
        found = self.header
        other = [name for name in IDENTITY if found and found.get(name) != header[name]]
        if other:
            words = ", ".join(f"{name} {found.get(name)} (here {header[name]})" for name in other)
            raise ValueError(f"{self.folder} is another tree's, of commit {found.get('commit')}: {words}")
        if not found:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._header.write_text(json.dumps(header, indent=1) + "\n")

    def add(self, record: dict[str, Any]) -> None:
        """Appends a record and writes it to disk."""
        with self._records.open("a") as file:
            file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """All records; ignores a line that an interrupted run has cut off."""
        if not self._records.exists():
            return
        with self._records.open() as file:
            for line in file:
                if line.endswith("\n"):
                    yield json.loads(line)

    def names(self) -> set[str]:
        """Cases that have a record."""
        return {record["case"] for record in self}

    def mend(self) -> None:
        """Ends a cut-off line, so that the next one is not lost with it."""
        if self._records.exists() and (data := self._records.read_bytes()) and not data.endswith(b"\n"):
            self._records.write_bytes(data[: data.rfind(b"\n") + 1])
