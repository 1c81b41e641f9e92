"""The search: its choices, that its decisions follow from the log, and its limits."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
from dataclasses import replace

import pytest

from bridge.compile import LIMITS, Choices
from bridge.trials import is_faster
from bridge.tune import Outcome, Search, TuningLog
from bridge.tune.search import Tunable
from bridge.tune.tuning import _GAIN, Means
from tests.bridge.clock import Clock
from tests.bridge.tune.track import TUNABLES, TableCandidates

BEST = Choices(limits=(("nodes", 160), ("tasks", 32)))


def searched(path, track=None, seconds=1000.0, run="here"):
    track = TableCandidates() if track is None else track
    search = Search(TUNABLES, track, TuningLog(path, run), seconds)
    return search.run(), search, track


def test_it_finds_the_best_and_stops(tmp_path):
    found, search, track = searched(tmp_path / "log")
    assert found == BEST and len(set(track.asked)) == len(track.asked) == search.trials
    assert search.spent == 2.0 * search.trials and max(track.prepared) > 2
    assert [round(gain, 3) for gain in search.gains] == [0.9, 0.95]
    assert any("failed" in record["verdict"] for record in search.log.records)


def test_time_that_is_over_begins_no_trial(tmp_path):
    found, search, track = searched(tmp_path / "log", seconds=5.0)
    assert len(track.asked) == 3 and search.spent == 6.0 and found == Choices(limits=(("tasks", 32),))


def test_killed_anywhere_it_ends_with_the_same_choices(tmp_path):
    """A log that ends at any byte: whole lines count, the rest is measured again, and the log stays readable."""
    path = tmp_path / "log"
    found, whole, _ = searched(path)
    content, lines = path.read_bytes(), whole.log.records
    for end in sorted({*range(0, len(content), 97), *(content.index(b"\n", at) for at in range(0, len(content), 501))}):
        path.write_bytes(content[:end])
        there = content[:end].count(b"\n") + (content[end : end + 1] == b"\n")
        again, search, track = searched(path)
        assert (again, search.spent) == (found, whole.spent)
        assert len(track.asked) == len(lines) - there
        assert TuningLog(path, "here").records == lines


class Turned(TableCandidates):
    """A machine on which the slow choices are fast."""

    def _pairs(self, one, other, drift):
        return [(other, one) for one, other in super()._pairs(one, other, drift)]


class Killed(TableCandidates):
    """Its process is killed in the trial after so many."""

    def __init__(self, trials):
        super().__init__()
        self.trials = trials

    def __call__(self, incumbent, candidate):
        if len(self.asked) == self.trials:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(incumbent, candidate)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX")
def test_processes_killed_one_after_the_other_end_with_the_choices_of_one(tmp_path):
    """A killed process's measurements decide, not new ones, which may differ."""
    found, whole, _ = searched(tmp_path / "whole")
    other, _, _ = searched(tmp_path / "other", Turned())
    assert Choices() != found != other, "the choices follow from what is measured"
    path = tmp_path / "killed"
    for trials in (1, 3, 2, 100):
        child = os.fork()
        if child == 0:
            try:
                searched(path, Killed(trials))
            finally:
                os._exit(0)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]) == (trials < 100)
    again, search, track = searched(path, Turned())
    assert (again, search.spent, track.asked) == (found, whole.spent, [])


def test_nothing_is_measured_twice_and_more_time_goes_on(tmp_path):
    searched(tmp_path / "log", seconds=5.0)
    found, _, track = searched(tmp_path / "log", seconds=5.0)
    assert found == Choices(limits=(("tasks", 32),)) and not track.asked
    found, _, track = searched(tmp_path / "log")
    assert found == BEST and track.asked


def test_a_full_disk_costs_a_warning(tmp_path, caplog):
    """The search ends as without the limit; the log has whole lines and the beginning of one, and can be continued."""
    path, limits = tmp_path / "log", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limits[1]))
    try:
        found, search, _ = searched(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert found == BEST and "File too large" in caplog.text and len(caplog.records) == 1
    again, _, track = searched(path)
    assert again == BEST and 0 < len(track.asked) < search.trials


@pytest.mark.parametrize(
    "damage",
    [
        b"{]\n",
        b"\x00\xff\n",
        b"[1, 2]\n",
        b'{"kind": "trial"}\n',
        b"\n",
        b"7\n",
        b'{"run": "here", "kind": "trial", "pairs": 3}\n',
    ],
)
def test_damaged_lines_are_ignored(tmp_path, damage):
    path = tmp_path / "log"
    found, _, _ = searched(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(damage + b"".join(lines[:3]) + damage + b"".join(lines[3:]))
    again, search, track = searched(path)
    assert again == found and not track.asked
    assert search.log.damaged == (0 if damage == b"\n" or b"here" in damage else 2)


def test_another_machines_log_is_ignored(tmp_path):
    searched(tmp_path / "log", run="there")
    found, search, track = searched(tmp_path / "log")
    assert found == BEST and len(track.asked) == search.log.foreign == search.trials
    assert {json.loads(line)["run"] for line in (tmp_path / "log").read_text().splitlines()} == {"here", "there"}


class Noise(TableCandidates):
    """Every step takes a second, times noise; one in ten is interrupted."""

    def __init__(self, seed):
        super().__init__()
        self.random, self.clock = random.Random(seed), Clock()

    def step(self):
        self.clock.now += self.random.lognormvariate(0, 0.3) * (2 if self.random.random() < 0.1 else 1)

    def race(self, race):
        return replace(race, seconds=1e9, clock=self.clock)(self.step, self.step)

    def __call__(self, incumbent, candidate):
        return Outcome(self.race(Means().race), "", 1.0)


def test_noise_alone_is_never_kept():
    """Some of many equally fast candidates win by chance; the last timing confirms none of them."""
    found, kept = [], []
    for seed in range(8):
        track = Noise(seed)
        found.append(Search([Tunable(LIMITS, "tasks", tuple(range(1, 41)))], track, TuningLog(None, "here"), 1e9).run())
        kept.append(is_faster(track.race(Means().final), _GAIN))
    assert any(found) and not any(kept)
