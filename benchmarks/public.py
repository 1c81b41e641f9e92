"""Training steps of PyTorch's own dynamo benchmarks (HuggingFace's and TIMM's lists) beside eager and torch.compile.

    python -m benchmarks public --out results --device cuda --precision amp --jobs 6 --time-limit 280
    python -m benchmarks public --out results --small --peers eager ours          # 20 + 20 small ones, for a CPU

A step is forward, loss, backward and a fused AdamW; models have random parameters, sizes and batches come from the
lists (:mod:`benchmarks.public_models`), and nothing is downloaded. TIMM's models need ``timm``.

A process for each model, with empty caches; ``--jobs`` of them compile side by side. One at a time is timed, while all
others are stopped. A first step's seconds exclude stops, but include the effect of other compilations. Times are
medians of turns of all peers: ``ms`` of a synchronised step, ``run_ms`` of a step in a run with one synchronisation at
its end. A model that runs out of device memory beside others is repeated at the end, by itself; if necessary with one
peer after another, and with fewer rows. Gradients of the first step are compared with a judge of better precision:
float64 for float32, float32 for autocast to bfloat16 (``amp``). A peer that raises is reported by its error, and the
others go on.

``--out`` gets a line of JSON for each finished model, and at the end a table, a picture and results for
``benchmarks.tables``. Existing rows (also in ``--known``) with all ``--peers`` are not measured again; their key is
model, device, torch and precision. ``--time-limit``: drops unfinished models, for a later visit.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.cold_processes import CACHES, environment_of
from benchmarks.public_models import PublicModel
from benchmarks.public_report import Rows, outcome
from benchmarks.results import Row, machine, versions

PEERS = ("eager", "default", "max-autotune", "ours")
_GRACE_S = 120
"""Seconds beyond ``--patience`` after which a silent process is ended."""


@dataclass
class Child:
    """The process of one model.

    Attributes:
        process: leader of its own process group, which includes its helpers.
        events: the pipe with its lines.
        row: the results so far.
        heard: the time of its last event.
        stopped_at: the time when it was stopped; ``None``: it runs.
    """

    name: str
    process: subprocess.Popen[bytes]
    events: int
    folder: tempfile.TemporaryDirectory[str]
    row: Row = field(default_factory=dict)
    heard: float = field(default_factory=time.monotonic)
    stopped_at: float | None = None
    unread: bytes = b""

    def told(self) -> Iterator[dict[str, Any]]:
        """Arrived events; ``{"ended": True}`` is the last one."""
        arrived = os.read(self.events, 1 << 16)
        *lines, self.unread = (self.unread + arrived).split(b"\n")
        self.heard = time.monotonic()
        yield from map(json.loads, lines)
        if not arrived:
            yield {"ended": True}

    def stop(self) -> None:
        """Stops the group."""
        if self.stopped_at is None:
            self.stopped_at = time.monotonic()
            self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Continues the group, which can read the length of its stop."""
        if self.stopped_at is not None:
            seconds, self.stopped_at = time.monotonic() - self.stopped_at, None
            self.heard += seconds
            with (Path(self.folder.name) / "pauses").open("a") as file:
                print(seconds, file=file)
            self._signal(signal.SIGCONT)

    def end(self) -> None:
        """Ends the group, and removes its files."""
        self._signal(signal.SIGKILL)
        self.process.wait()
        os.close(self.events)
        self.process.stdin.close()
        self.folder.cleanup()

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass  # the group has ended


class Visit:
    """Measures models until none or no time is left."""

    def __init__(self, options: argparse.Namespace, rows: Rows, common: Row):
        self._options, self._rows, self._common = options, rows, common
        self._begun = time.monotonic()
        self._peers: dict[str, list[str]] = {}
        self._pending: deque[str] = deque()
        self._crowded: deque[str] = deque()
        self._children: list[Child] = []
        self._waiting: deque[Child] = deque()
        self._timed: Child | None = None
        self._selector = selectors.DefaultSelector()

    def run(self, peers: dict[str, list[str]]) -> list[str]:
        """Measures models with their peers; returns the names that time did not suffice for."""
        self._peers = peers
        self._pending.extend(peers)
        try:
            while self._left() > 0 and (self._pending or self._crowded or self._children):
                self._admit()
                for ready, _ in self._selector.select(min(self._left(), 1.0)):
                    for event in ready.data.told():
                        if ready.data in self._children:  # its row may be done before its pipe ends
                            self._act(ready.data, event)
                self._end_the_silent()
            return [*(child.name for child in self._children), *self._crowded, *self._pending]
        finally:
            for child in list(self._children):
                self._remove(child)

    def _left(self) -> float:
        limit = self._options.time_limit
        return limit - (time.monotonic() - self._begun) if limit else float("inf")

    def _admit(self) -> None:
        """Starts models that may run beside the others; none during a timing."""
        while self._pending and self._timed is None and len(self._children) < self._options.jobs:
            self._start(self._pending.popleft(), has_room=self._options.jobs == 1)
        if self._crowded and not self._pending and not self._children:
            self._start(self._crowded.popleft(), has_room=True)

    def _start(self, name: str, has_room: bool) -> None:
        options, folder = self._options, tempfile.TemporaryDirectory(prefix="public-")
        caches = {variable: str(Path(folder.name) / variable.lower()) for variable in CACHES}
        for each in caches.values():
            Path(each).mkdir()
        read, write = os.pipe()
        command = [sys.executable, "-m", "benchmarks.public", "--measure", name, "--events", str(write)]
        command += ["--pauses", f"{folder.name}/pauses", *(["--has-room"] if has_room else [])]
        command += ["--list", options.list, "--device", options.device, "--precision", options.precision]
        command += [
            "--patience",
            str(options.patience),
            "--seconds",
            str(options.seconds),
            "--peers",
            *self._peers[name],
        ]
        logs = options.out / "logs"
        logs.mkdir(exist_ok=True)
        with (logs / f"{name.replace('/', '_')}.txt").open("w") as log:
            process = subprocess.Popen(
                command,
                env=environment_of(options.threads, **caches),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(write,),
                start_new_session=True,
            )
        os.close(write)
        child = Child(name, process, read, folder)
        self._children.append(child)
        self._selector.register(read, selectors.EVENT_READ, child)

    def _act(self, child: Child, event: dict[str, Any]) -> None:
        child.row.update(event.get("row", {}))
        if event.get("wants"):
            self._waiting.append(child)
            self._grant()
        if event.get("leaves"):
            self._timed = None
            self._grant()
        if event.get("finished"):
            self._done(child)
        elif event.get("no_room"):
            self._say(child.name, "no room beside others: comes once more, last")
            self._crowded.append(child.name)
            self._remove(child)
        elif event.get("ended"):
            self._lost(child)

    def _grant(self) -> None:
        """Times the first waiting model and stops the others; if none waits, continues all."""
        if self._timed is None and self._waiting:
            self._timed = self._waiting.popleft()
            for child in self._children:
                if child is not self._timed:
                    child.stop()
            self._timed.go_on()
            self._timed.process.stdin.write(b"go\n")
            self._timed.process.stdin.flush()
        elif self._timed is None:
            for child in self._children:
                child.go_on()

    def _end_the_silent(self) -> None:
        if not self._options.patience:
            return
        for child in list(self._children):
            is_working = child.stopped_at is None and child not in self._waiting
            silent = time.monotonic() - child.heard
            if is_working and silent > self._options.patience + _GRACE_S:
                self._done(child, f"ended: silent for {silent:.0f} s")

    def _lost(self, child: Child) -> None:
        """A process that ended before its row was done."""
        code = child.process.wait()
        log = (self._options.out / "logs" / f"{child.name.replace('/', '_')}.txt").read_text(errors="replace")
        last = [line for line in log.splitlines() if line.strip()][-1:]
        how = signal.Signals(-code).name if code < 0 else f"exit {code}"
        self._done(child, f"{how}: {''.join(last)[:300]}")

    def _done(self, child: Child, error: str = "") -> None:
        row = row_of(child.name, self._common, self._options) | {"peers": self._peers[child.name]} | child.row
        if error:
            row["error"] = error
        self._rows.add(row)
        self._say(child.name, told(row))
        self._remove(child)

    def _remove(self, child: Child) -> None:
        if child not in self._children:
            return
        self._children.remove(child)
        self._selector.unregister(child.events)
        child.end()
        if child in self._waiting:
            self._waiting.remove(child)
        if child is self._timed:
            self._timed = None
            self._grant()

    def _say(self, name: str, words: str) -> None:
        print(f"{time.monotonic() - self._begun:6.0f} s  {name}: {words}", flush=True)


def row_of(name: str, common: Row, options: argparse.Namespace) -> Row:
    """A row's fields before the measurement."""
    listed = models_of(options.list)[name]
    return {"model": name, "suite": listed.suite, "small": listed.small, **common, "peers": list(options.peers)}


def told(row: Row) -> str:
    """A finished row as a printed line."""
    words = [outcome(row)]
    for clock, unit in (("first_s", "s"), ("ms", "ms"), ("run_ms", "ms in a run")):
        times = [f"{peer} {row[f'{peer}_{clock}']:.1f}" for peer in PEERS if f"{peer}_{clock}" in row]
        words += [f"{', '.join(times)} {unit}"] if times else []
    words += [f"{peer}: {error}" for peer, error in row.get("errors", {}).items() if peer not in ("eager", "ours")]
    return " | ".join(words)


def models_of(module: str) -> dict[str, PublicModel]:
    """The models of a list."""
    return importlib.import_module(module).MODELS


def common_of(options: argparse.Namespace) -> Row:
    """The fields that all rows of a visit share: the key without the model, and the circumstances."""
    return {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else re.split(r", \d+ cores", machine())[0],
        "torch": torch.__version__,
        "precision": options.precision,
        "machine": machine(),
        "versions": versions(),
        "jobs": options.jobs,
    }


@contextmanager
def measured_list(options: argparse.Namespace, rows: Rows, common: Row) -> Iterator[dict[str, list[str]]]:
    """Yields the names to measure, with their peers; always writes tables and pictures at the end."""
    names: dict[str, list[str]] = {}
    for name, listed in models_of(options.list).items():
        if listed.small != options.small or not any(text in name for text in options.only):
            continue
        row = rows.get((name, common["device"], common["torch"], common["precision"]))
        before = set() if row is None else set(row["peers"])
        if before >= set(options.peers) and not options.again:
            continue
        if listed.left_out:
            rows.add(row_of(name, common, options) | {"left_out": listed.left_out})
        elif listed.suite == "TIMM" and find_spec("timm") is None:
            print(f"{name}: not measured: there is no package timm here", flush=True)
        else:
            names[name] = [peer for peer in PEERS if peer in before.union(options.peers)]
    try:
        yield names
    finally:
        for path in rows.write(options.command):
            print(f"\n{path.read_text(encoding='utf-8')}({path.with_suffix('.svg')})", flush=True)


def measure_one(options: argparse.Namespace) -> None:
    """The work of a model's process."""
    from benchmarks.public_model import Model, Parent, measure

    warnings.simplefilter("ignore")
    if options.device == "cuda":
        torch.cuda.init()
    listed = models_of(options.list)[options.measure]
    with os.fdopen(options.events, "w") as events:
        parent = Parent(events, options.pauses)
        model = Model(
            listed,
            listed.rows,
            options.peers,
            torch.device(options.device),
            options.precision,
            options.patience,
            options.seconds,
            parent,
            options.has_room,
        )
        measure(model)


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("public"), metavar="FOLDER", help="where results go")
    parser.add_argument("--known", type=Path, nargs="+", default=(), metavar="FILE", help="lines of earlier visits")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=("float32", "amp"), default="float32")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=("eager", "default", "ours"))
    parser.add_argument("--only", nargs="+", default=[""], help="models whose name contains one of these")
    parser.add_argument("--small", action="store_true", help="the small forms, for a CPU")
    parser.add_argument("--again", action="store_true", help="also what has been measured")
    parser.add_argument("--jobs", type=int, default=1, help="models that compile side by side")
    parser.add_argument("--threads", type=int, help="OpenMP threads of each process (default: as set around it)")
    parser.add_argument("--seconds", type=float, default=6, help="for the times of a model's peers")
    parser.add_argument("--patience", type=float, default=600, metavar="S", help="for a peer's first step; 0: no limit")
    parser.add_argument("--time-limit", type=float, default=0, metavar="S", help="for all of it; 0: no limit")
    parser.add_argument("--list", default="benchmarks.public_models", metavar="MODULE", help="whose MODELS")
    for name, kind in (("measure", str), ("events", int), ("pauses", Path)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--has-room", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if "eager" not in options.peers:
        options.peers = ["eager", *options.peers]
    options.peers = [each for each in PEERS if each in options.peers]
    options.command = "python -m benchmarks public"
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    if options.measure:
        measure_one(options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # writes tables, ends all processes
    common = common_of(options)
    rows = Rows(options.out / "public.jsonl", options.known)
    print(f"{common['device']}, {common['precision']}, {versions()}; {', '.join(options.peers)}", flush=True)
    with measured_list(options, rows, common) as peers:
        left = Visit(options, rows, common).run(peers)
        if left:
            print(f"\nno time for {len(left)}: {' '.join(left)}", flush=True)


if __name__ == "__main__":
    main()
