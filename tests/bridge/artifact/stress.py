"""Stress of the disk cache: processes that are killed while they use it, flipped bytes, a full disk; the bits stay.

It kills processes at work, at any moment (``kills``), and processes that only write the work's artifacts, again and
again (``writes``): nearly each writer dies in the middle of a file.

    python -m tests.bridge.artifact.stress --kills 200
    python -m tests.bridge.artifact.stress --kills 25 --seed 3 --only looped --checks kills
    python -m tests.bridge.artifact.stress --seconds 60 --only gpu --checks kills     # as many as that time allows

After each kill every file of the cache is whole; results of later processes have the bits of a process that found an
empty cache. Works are in :mod:`tests.bridge.artifact.works`; processes are forked, and compile nothing before.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import resource
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from bridge.artifact import DamagedError, current_store, read_artifact
from bridge.compile.cpu import products
from bridge.compile.schedule.products import GENERATED
from tests.bridge.artifact.count_builds import forget_all, in_children
from tests.bridge.artifact.works import GPU, WORKS

Work = Callable[[Path], str]

CHECKS = ("kills", "writes", "flips", "disk")
SIZES = (0, 500, 2000, 8000, 32000)
"""Bytes above which a file does not fit on a disk that is full."""

TURNS, WRITERS = 5, 25
"""Kills of workers, and of writers, between two complete runs that check the files."""

LONGEST_WRITE = 0.05
"""Seconds after which a writer is killed at the latest."""


def bits_on(folder: Path, work: Work, largest_file: int = resource.RLIM_INFINITY) -> str:
    """The bits that a process computes with its cache in a folder, where files have at most ``largest_file`` bytes."""
    return in_children(1, partial(_work_on, folder, work, largest_file))[0]


def _work_on(folder: Path, work: Work, largest_file: int) -> str:
    os.environ.update(BRIDGE_CACHE="1", BRIDGE_CACHE_DIR=str(folder / "cache"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
    return work(folder)


def allowed_on_a_full_disk(work: Work) -> set[str]:
    """The bits of a work where everything is kept."""
    with tempfile.TemporaryDirectory() as scratch:
        return {bits_on(Path(scratch), work)}


def artifacts(folder: Path) -> dict[str, list[Path]]:
    """The files of the cache in a folder by their kinds."""
    found: dict[str, list[Path]] = {}
    for path in sorted((folder / "cache").glob("*/??/*")):
        found.setdefault(path.parent.parent.name, []).append(path)
    return found


def flip(path: Path, rng: random.Random) -> None:
    """Another bit somewhere in a file."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def kill_at_random(work: Work, count: int, rng: random.Random, seconds: float = math.inf) -> Counter:
    """Kills so many processes at work; how often that left something unfinished, or a claim.

    ``seconds``: after which no further one is killed; a last complete run checks the files that the last kills left.

    Raises:
        AssertionError: a file is not whole, or another process computes other bits.
    """
    found: Counter = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "first"
        folder.mkdir()
        began = time.monotonic()
        expected = bits_on(folder, work)
        whole_run = time.monotonic() - began
        folder = Path(scratch) / "killed"
        while found["killed"] < count and time.monotonic() - began < seconds:
            folder.mkdir()
            for _ in range(min(TURNS, count)):
                if time.monotonic() - began > seconds:
                    break
                found["killed"] += _is_killed(rng.uniform(0, whole_run), folder, work)
                for kind, paths in artifacts(folder).items():
                    for path in paths:
                        _assert_whole(path, kind)
                for left in ("unfinished", "claims"):
                    found[left] += any((folder / "cache" / left).glob("*"))
            bits = bits_on(folder, work)
            assert bits == expected, f"other bits after {dict(found)}"
            shutil.rmtree(folder)
    return found


def kill_writers(work: Work, count: int, rng: random.Random, seconds: float = math.inf) -> Counter:
    """Kills so many processes that write a work's artifacts; how many in the middle of a file, and files seen whole.

    Arguments and errors as of :func:`kill_at_random`.
    """
    found: Counter = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "first"
        folder.mkdir()
        began = time.monotonic()
        expected = bits_on(folder, work)
        kept = [
            (kind, path.name, *read_artifact(path.read_bytes(), kind, path.name))
            for kind, paths in artifacts(folder).items()
            for path in paths
        ]
        folder = Path(scratch) / "killed"
        while found["killed"] < count and time.monotonic() - began < seconds:
            folder.mkdir()
            for _ in range(min(WRITERS, count - found["killed"])):
                rng.shuffle(kept)
                found["killed"] += _is_killed(rng.uniform(0, LONGEST_WRITE), folder, partial(_write, kept))
                for kind, paths in artifacts(folder).items():
                    for path in paths:
                        _assert_whole(path, kind)
                        found[f"{kind} whole"] += 1
            found["in the middle of a file"] += len([*(folder / "cache" / "unfinished").glob("*")])
            bits = bits_on(folder, work)
            assert bits == expected, f"other bits after {dict(found)}"
            found["looks at the bits"] += 1
            shutil.rmtree(folder)
    return found


def _write(kept: Sequence[tuple[str, str, Mapping, Mapping]], folder: Path) -> str:
    """Puts artifacts into the cache until the process is killed."""
    while True:
        for kind, key, header, parts in kept:
            current_store().put(kind, key, parts, header["note"])


def _is_killed(seconds: float, folder: Path, work: Work) -> bool:
    """Whether a process was still at work after so many seconds, and was killed then."""
    forget_all()
    child = os.fork()
    if child == 0:
        try:
            _work_on(folder, work, resource.RLIM_INFINITY)
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def _assert_whole(path: Path, kind: str) -> None:
    try:
        read_artifact(path.read_bytes(), kind, path.name)
    except DamagedError as error:
        raise AssertionError(f"{kind} {path.name} {error}") from error


def flipped(work: Work, count: int, rng: random.Random) -> Counter:
    """Flips a bit in every file of a kind, so many times for each kind, and asserts equal bits; the runs by kind."""
    runs: Counter = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        expected = bits_on(folder, work)
        for kind in artifacts(folder):
            for _ in range(count):
                for path in artifacts(folder)[kind]:
                    flip(path, rng)
                assert bits_on(folder, work) == expected, f"other bits after flipped bytes in {kind}"
                runs[kind] += 1
    return runs


def on_full_disks(work: Work) -> Counter:
    """A run for each size above which files do not fit; asserts equal bits."""
    allowed, runs = allowed_on_a_full_disk(work), Counter()
    for size in SIZES:
        with tempfile.TemporaryDirectory() as scratch:
            assert bits_on(Path(scratch), work, size) in allowed, f"other bits on a disk for files of {size} bytes"
        runs[size] += 1
    return runs


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--kills", type=int, default=200, help="of each work, at work and writing (default %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="for the kills of each work (default: any)")
    parser.add_argument("--flips", type=int, default=3, help="runs for each kind of file (default %(default)s)")
    parser.add_argument("--only", choices=list(WORKS), help="one of the works (default: all)")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=CHECKS, help="(default: all)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    products.measured = lambda policy, product, ways: {GENERATED if GENERATED in ways else ways[0]: 1.0}
    for name, work in WORKS.items():
        if options.only not in (None, name) or (name == GPU and not torch.cuda.device_count()):
            continue
        if "kills" in options.checks:
            found = kill_at_random(work, options.kills, rng, options.seconds)
            print(f"{name}, killed: the same bits, {dict(found)}", flush=True)
        if "writes" in options.checks:
            found = kill_writers(work, options.kills, rng, options.seconds)
            print(f"{name}, killed while writing: the same bits, {dict(found)}", flush=True)
        if "flips" in options.checks:
            print(f"{name}, flipped bits: the same bits, runs {dict(flipped(work, options.flips, rng))}", flush=True)
        if "disk" in options.checks:
            print(f"{name}, full disks by bytes: the same bits, runs {dict(on_full_disks(work))}", flush=True)


if __name__ == "__main__":
    main()
