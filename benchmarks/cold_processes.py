"""Cold measurements: each in a process of its own, by turns → a table, line by line.

A script starts itself in a new process, which prints one measurement as JSON on its last line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CACHES = ("BRIDGE_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TMPDIR", "XDG_CACHE_HOME")
"""Environment variables of directories that persist between processes."""


def options_of(doc: str, runs: str) -> argparse.ArgumentParser:
    """The options shared by the scripts; ``runs``: the help text of ``--runs``."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3, help=f"{runs} (default %(default)s)")
    parser.add_argument("--only", default="", help="modules whose name contains this")
    parser.add_argument("--threads", type=int, help="OpenMP threads of each process (default: as set around it)")
    parser.add_argument("--quick", action="store_true", help="tiny modules, one run: does it work")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    return parser


def environment_of(threads: int | None, **variables: str) -> dict[str, str]:
    """The environment of a measurement: this process's, with these variables and OpenMP threads."""
    return {**os.environ, **variables, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}


def asked(script: str, name: str, which: Sequence[str], quick: bool, environment: dict[str, str]) -> dict[str, Any]:
    """The measurement of a model by ``python -m benchmarks.SCRIPT`` in a new process; ``which``: its options."""
    command = [sys.executable, "-m", f"benchmarks.{script}", "--only", name, *which, *(["--quick"] if quick else [])]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def cold(script: str, name: str, which: Sequence[str], quick: bool, threads: int | None = None) -> dict[str, Any]:
    """The same with empty caches."""
    with tempfile.TemporaryDirectory() as scratch:
        folders = {variable: Path(scratch) / variable.lower() for variable in CACHES}
        for folder in folders.values():
            folder.mkdir()
        environment = environment_of(threads, **{variable: str(folder) for variable, folder in folders.items()})
        return asked(script, name, which, quick, environment)


def print_table(
    script: str,
    form: str,
    names: Sequence[str],
    row_of: Callable[[str, argparse.Namespace], dict[str, Any]],
    options: argparse.Namespace,
) -> None:
    """Prints each row at once; writes all rows to the file of ``--json``.

    ``form``: of :data:`benchmarks.tables.FORMS`.
    """
    from benchmarks.results import Results, machine, versions
    from benchmarks.tables import FORMS, header, line

    options.runs = 1 if options.quick else options.runs
    print(f"cold processes, float32, medians of {options.runs}; {versions()}; {machine()}\n")
    print(header(FORMS[form]))
    rows = []
    for name in names:
        rows.append(row_of(name, options))
        print(line(FORMS[form], rows[-1]), flush=True)
    if options.json:
        Results.of(script, f"python -m benchmarks {script}", rows).save(options.json)
