"""``python -m benchmarks public``: processes, rows, tables and pictures, with tiny models; no time is asserted."""

import io
import json
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import public, public_model
from benchmarks.gpu_clock import interrupted_after
from benchmarks.public_models import MODELS
from benchmarks.public_report import Rows, outcome
from benchmarks.results import Results
from tests import tiny_models

CPU = torch.device("cpu")


def visited(out, *more):
    public.main(["--out", str(out), "--list", "tests.tiny_models", "--device", "cpu", "--seconds", "0.1", *more])
    return {row["model"]: row for row in Rows(out / "public.jsonl")}


@pytest.mark.slow
def test_a_visit(tmp_path, capsys, monkeypatch):
    def none_starts(*args, **options):
        raise AssertionError("measured again")

    out, peers = tmp_path / "out", ["--peers", "eager", "ours"]
    assert visited(out, *peers, "--time-limit", "0.01").keys() == {"large"}
    assert "no time for 4: raises dies first decides" in capsys.readouterr().out

    rows = visited(out, *peers, "--jobs", "2")
    assert rows.keys() == tiny_models.MODELS.keys()
    assert outcome(rows["raises"]) == "eager: ValueError: no such sizes"
    assert outcome(rows["dies"]).startswith("eager: SIGABRT")
    assert outcome(rows["large"]) == "left out: too large"
    assert outcome(rows["first"]) == "hit" and rows["first"]["hits"] > 0
    assert outcome(rows["decides"]).startswith("parts: 2 parts") and "numpy" in rows["decides"]["refused"]
    for name in ("first", "decides"):
        row = rows[name]
        assert row["ours_further"] == 0 and row["rows"] == row["listed_rows"]
        assert all(row[f"{peer}_{each}"] > 0 for peer in ("eager", "ours") for each in ("first_s", "ms", "run_ms"))
        assert row["eager_peak_bytes"] > 0 and row["ours_peak_bytes"] > 0

    printed = capsys.readouterr().out
    (table,) = out.glob("*.md")
    assert table.read_text() in printed and "| ours / eager |" in printed
    assert "one: 3 models, eager trains 1; eager 2, hit 1; 0 of 1 further" in printed
    (drawn,) = out.glob("*.svg")
    assert {"first", "decides"} < {each.text for each in ElementTree.parse(drawn).iter() if each.tag.endswith("text")}
    (results,) = out.glob("*.json")
    assert len(Results.load(results).rows) == len(rows)

    monkeypatch.setattr(subprocess, "Popen", none_starts)
    assert visited(out, "--peers", "eager") == rows
    assert visited(tmp_path / "other", *peers, "--known", str(out / "public.jsonl")) == rows


def test_rows_are_merged_by_key(tmp_path):
    row = {"model": "one", "device": "a", "torch": "2", "precision": "amp", "small": False, "suite": "x", "ours_ms": 1}
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    first.write_text(f"{json.dumps(row)}\n{json.dumps(row | {'device': 'b'})}\n")
    second.write_text(f"{json.dumps(row | {'ours_ms': 2})}\n")
    merged = {each["device"]: each["ours_ms"] for each in Rows(tmp_path / "all.jsonl", [first, second])}
    assert merged == {"a": 2, "b": 1}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"error": "SIGSEGV: here"}, "crash: SIGSEGV: here"),
        ({"errors": {"ours": "TimeoutError: took longer"}}, "error: TimeoutError: took longer"),
        ({"refused": "an operator"}, "refused: an operator"),
        ({"hits": 2, "misses": {"a size": 3}}, "misses: 2 hits, 3 x a size"),
        ({"hits": 2, "misses": {}, "ours_further": 1, "ours_furthest": "w: 1"}, "hit; further from the judge"),
    ],
)
def test_outcomes(more, words):
    assert outcome({"model": "one", "eager_first_s": 1.0} | more).startswith(words)


def test_lists():
    listed = [model for model in MODELS.values() if not model.small and not model.left_out]
    suites = [model.suite for model in listed]
    assert (suites.count("HuggingFace"), suites.count("TIMM")) == (46, 65)
    assert [sum(m.small and m.suite == suite for m in MODELS.values()) for suite in ("HuggingFace", "TIMM")] == [20, 20]


def model_of(events, has_room=True, **more):
    listed = tiny_models.MODELS["first"]
    parent = public_model.Parent(events, waits=False)
    return public_model.Model(listed, 4, ["eager", "ours"], CPU, "float32", 0, 0.1, parent, has_room, **more)


@pytest.mark.parametrize("has_room", [False, True])
def test_no_room(has_room, monkeypatch):
    tried = []

    def measured(model, groups, row):
        tried.append((model.rows, groups))
        row["errors"] = {}
        if len(tried) < 3:
            raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(public_model, "_measured", measured)
    events = io.StringIO()
    public_model.measure(model_of(events, has_room))
    (event,) = map(json.loads, events.getvalue().splitlines())
    if has_room:
        assert tried == [(4, [["eager", "ours"]]), (4, [["eager"], ["ours"]]), (2, [["eager"], ["ours"]])]
        assert (event["row"]["rows"], event["row"]["listed_rows"], event["row"]["turns"]) == (2, 4, False)
    else:
        assert len(tried) == 1 and "out of memory" in event["no_room"]


def test_the_judge_names_a_gradient_that_is_further():
    model = model_of(io.StringIO())
    judge = model.judge()
    peers = [model.prepared("eager", *model.made()) for _ in range(2)]
    for peer in peers:
        peer.step()
    assert "eager_further" not in judge.look_at("eager", peers[0])
    assert judge.look_at("ours", peers[1])["ours_further"] == 0
    weight, bias, *_ = peers[1].module.parameters()
    weight.grad[0, 0] += 1e-3
    bias.grad = None
    row = judge.look_at("ours", peers[1])
    assert row["ours_further"] == 3 and row["ours_furthest"].startswith("all together: ")
    assert "model.0.weight: 1.0e-03 from the judge" in row["ours_furthest"]
    assert "model.0.bias: None on one side only" in row["ours_furthest"]


def test_memory_is_counted_by_peer(monkeypatch):
    """Garbage that a peer leaves goes before the next count, and counts for no peer."""
    allocated, most = iter([160, 190, 190, 100, 100, 75]), iter([290, 200])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(allocated))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(most))
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    memory, peers = public_model.Memory(torch.device("cuda")), {"eager": None, "ours": None}
    memory.count("eager", lambda: None)  # 130 more at the most
    memory.count("ours", lambda: None)  # 10 more at the most
    for name in list(peers):  # 90 and 25 are theirs
        memory.free(peers, name)
    assert memory.peak == {"eager": 90 + 130, "ours": 25 + 10} and not peers


class Waits:
    """A model's process, as :class:`public.Visit` sees it."""

    def __init__(self) -> None:
        self.runs, self.process, self.stdin, self.row = True, self, io.BytesIO(), {}

    def stop(self) -> None:
        self.runs = False

    def go_on(self) -> None:
        self.runs = True


def test_one_is_timed_and_the_others_are_stopped(tmp_path):
    visit = public.Visit(public.parsed([]), Rows(tmp_path / "public.jsonl"), {})
    visit._children = children = [Waits() for _ in range(3)]

    def running():
        return [child.runs for child in children], [child.stdin.getvalue() for child in children]

    visit._act(children[0], {"wants": "alone"})
    visit._act(children[1], {"wants": "alone"})
    assert running() == ([True, False, False], [b"go\n", b"", b""])
    visit._act(children[0], {"leaves": "alone"})
    assert running() == ([False, True, False], [b"go\n", b"go\n", b""])
    visit._act(children[1], {"leaves": "alone"})
    assert running() == ([True, True, True], [b"go\n", b"go\n", b""])


def test_a_stopped_process_can_read_for_how_long(tmp_path, monkeypatch):
    signals = []
    monkeypatch.setattr(public.os, "killpg", lambda group, number: signals.append((group, number)))
    folder = tempfile.TemporaryDirectory(dir=tmp_path)
    child = public.Child("one", SimpleNamespace(pid=7), 0, folder)
    parent = public_model.Parent(io.StringIO(), Path(folder.name) / "pauses")
    assert parent.stopped() == 0
    child.go_on()
    for _ in range(2):
        child.stop()
        child.stop()
        child.go_on()
    assert signals == [(7, signal.SIGSTOP), (7, signal.SIGCONT)] * 2
    assert parent.stopped() > 0 and len(parent.pauses.read_text().split()) == 2


def test_words_do_not_name_folders_of_a_machine():
    error = RuntimeError(f"at {torch.__file__}:7:\n  x = 1")
    assert public_model._words(error) == "RuntimeError: at torch/__init__.py:7: x = 1"


def test_patience_does_not_count_stops():
    begun, stopped = time.monotonic(), iter([0.0, 0.05, 0.1, 0.1, 0.1])
    with pytest.raises(TimeoutError, match="longer than"), interrupted_after(0.05, lambda: next(stopped)):
        while time.monotonic() - begun < 10:
            pass
    assert next(stopped, None) is not None  # it was asked more than once, and no more than it had to be
