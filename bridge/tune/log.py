"""Tuning log: records ↔ lines of JSON, appended one by one, of any number of runs in one file.

A line is written whole, with its end, and is on disk before the next trial begins; a process that is killed leaves at
most one line without its end, which counts for nothing. Every record names the run that it belongs to: a key of the
call, the machine, threads and versions. Records of other runs are passed over.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from bridge.base.log import channel

__all__ = ["TuningLog"]

_LOG = channel("tune")


class TuningLog:
    """Records of one run.

    Args:
        path: the file, made by the first record; ``None``: records are kept in memory only.
        run: the key of the run.

    Attributes:
        records: of this run, in order.
        foreign: lines of other runs; ``damaged``: lines that are no records.
    """

    def __init__(self, path: str | os.PathLike | None, run: str):
        self.path, self.run = None if path is None else Path(path), run
        self.records: list[dict[str, Any]] = []
        self._can_write = self.path is not None
        self.foreign = self.damaged = 0
        if self.path is not None and self.path.exists():
            self._read(self.path.read_bytes())

    def _read(self, content: bytes) -> None:
        for line in content.split(b"\n"):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                run = record["run"]
            except (ValueError, KeyError, TypeError):
                self.damaged += 1
                continue
            if run == self.run:
                self.records.append(record)
            else:
                self.foreign += 1
        if self.damaged:
            _LOG.warning("%s: %d damaged lines are ignored", self.path, self.damaged)
        if self.foreign:
            _LOG.info("%s: %d lines are of other calls, machines or versions", self.path, self.foreign)

    def append(self, **record: Any) -> dict[str, Any]:
        """Adds a record, which is on disk when this returns; the record as it will be read.

        Where the file cannot be written (a full disk), a warning says so once, and records are kept in memory.
        """
        text = json.dumps({"run": self.run, **record}, allow_nan=False)
        if self._can_write:
            try:
                self._write(text)
            except OSError as error:
                self._can_write = False
                _LOG.warning("%s: %s; the tuning goes on, and cannot be resumed from here", self.path, error)
        record = json.loads(text)
        self.records.append(record)
        return record

    def _write(self, text: str) -> None:
        with open(self.path, "ab+") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # of a process that was killed: its half line ends here
                    text = "\n" + text
            file.write(text.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
