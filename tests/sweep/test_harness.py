"""The sweep's own logic: each kind of failure gets its word, and none ends the sweep."""

import csv
import time
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from bridge import UnsupportedModule
from tests.bridge import compare
from tests.bridge.compare import Call
from tests.pool import run_pool
from tests.pool_cases import CASES, serve
from tests.sweep import __main__ as program
from tests.sweep import moduleinfo, opinfo, other_sizes, worker, zoo
from tests.sweep.check import Verdict, check, combine
from tests.sweep.worker import Settings, run_cases

pytestmark = pytest.mark.slow


def rows() -> Call:
    return Call((torch.randn(3, 4, dtype=torch.float64, requires_grad=True),))


def eager(module, sample_input, **options):
    return module


def shifted_values(module, sample_input, **options):
    module._compiled_call_impl = lambda *args: module._call_impl(*args) + 1e-6
    return module


def halved_gradients(module, sample_input, **options):
    def call(*args):
        y = module._call_impl(*args)
        return y.detach() + (y - y.detach()) / 2

    module._compiled_call_impl = call
    return module


def extra_draw(module, sample_input, **options):
    def call(*args):
        y = module._call_impl(*args)
        torch.rand(())
        return y

    module._compiled_call_impl = call
    return module


def refuses(module, sample_input, **options):
    refusal = UnsupportedModule.__new__(UnsupportedModule)
    Exception.__init__(refusal, "aten.tanh.default is not supported")
    refusal.ops = [SimpleNamespace(op="aten.tanh.default")]
    raise refusal


def crashes(module, sample_input, **options):
    raise KeyError("stage")


@pytest.mark.parametrize(
    ("bridge", "hits", "status", "named"),
    [
        (eager, 1, "pass", ""),
        (eager, 0, "mismatch", "0 of 1 calls were dispatched"),
        (shifted_values, 1, "mismatch", "output 0"),
        (halved_gradients, 1, "mismatch", "gradient of"),
        (extra_draw, 1, "mismatch", "generator"),
        (refuses, 1, "refused", "aten.tanh.default"),
        (crashes, 1, "error", "KeyError"),
    ],
)
def test_verdicts(monkeypatch, bridge, hits, status, named):
    monkeypatch.setattr(compare, "add_tvm_dispatch", bridge)
    monkeypatch.setattr(compare, "stats", lambda module: SimpleNamespace(hits=hits, misses=Counter()))
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    verdict = check(module, rows())
    assert verdict.status == status
    assert named in verdict.detail


class Unseeded(nn.Module):
    def forward(self, x):
        return x + torch.rand(x.shape, generator=torch.Generator().manual_seed(time.perf_counter_ns() % 2**31))


class OrderOfItsOwn(nn.Module):
    """Rounds differently at each call, as atomic additions do."""

    calls = 0

    def forward(self, x):
        OrderOfItsOwn.calls += 1
        return x * (1 + 1e-15 * (OrderOfItsOwn.calls % 2))


class Fails(nn.Module):
    def forward(self, x):
        raise NotImplementedError("no such derivative")


class Loops(nn.Module):
    def forward(self, x):
        for row in range(len(x)):
            x = x + x[row]
        return x


class Asks(nn.Module):
    def forward(self, x):
        return x * 2 if x.shape[0] < 4 else x


VARYING = [
    (nn.Sequential(nn.Linear(4, 4), nn.Tanh()), 0, "pass", ""),
    (nn.Linear(4, 4), 1, "skipped", "eager: RuntimeError"),
    (nn.Linear(4, 4), 2, "skipped", "no such dimension"),
    (Loops(), 0, "refused", "forward is for the sample's 3 alone"),
    (Asks(), 0, "refused", "compiled for 3 >= x_0, called with x_0 = 5"),
]


@pytest.mark.parametrize(("module", "dimension", "status", "named"), VARYING)
def test_verdicts_of_other_sizes(module, dimension, status, named):
    verdict = check(module.double(), rows(), dynamic=dimension)
    assert verdict.status == status
    assert named in verdict.detail


def test_a_wrong_result_at_another_size_is_a_mismatch(monkeypatch):
    def wrong(module, sample_input, **options):
        module._compiled_call_impl = lambda x: module._call_impl(x) + (len(x) == 5) * 1e-6
        return module

    monkeypatch.setattr(other_sizes, "add_tvm_dispatch", wrong)
    monkeypatch.setattr(other_sizes, "stats", lambda module: SimpleNamespace(hits=3, misses=Counter()))
    assert check(nn.Linear(4, 4).double(), rows(), dynamic=0).status == "mismatch"


@pytest.mark.parametrize(("module", "named"), [(Unseeded(), "differs from itself"), (Fails(), "no such derivative")])
def test_no_reference_is_skipped(module, named):
    verdict = check(module, rows())
    assert verdict.status == "skipped"
    assert named in verdict.detail


def test_eager_that_rounds_in_an_order_of_its_own_is_a_reference(monkeypatch):
    for changed, status in ((eager, "pass"), (shifted_values, "mismatch")):
        monkeypatch.setattr(compare, "add_tvm_dispatch", changed)
        monkeypatch.setattr(compare, "stats", lambda module: SimpleNamespace(hits=1, misses=Counter()))
        assert check(OrderOfItsOwn(), rows()).status == status


def test_the_worst_sample_decides():
    passed, refused, wrong = Verdict("pass"), Verdict("refused", "no", ("aten.b", "aten.a")), Verdict("mismatch", "5")
    assert combine("x", [passed, refused], 1).status == "pass"
    assert combine("x", [refused, refused], 1).status == "refused(aten.a aten.b)"
    assert combine("x", [passed, wrong, refused], 1).status == "mismatch"
    assert combine("x", [wrong, Verdict("error")], 1).status == "error"
    assert combine("x", [], 1).status == "skipped"
    assert combine("x", [passed, wrong, refused], 1).detail == "5"


def test_crashes_and_time_outs_cost_one_row():
    """In processes without a suite's imports; a suite's worker only adds its loop."""
    results = {}

    def failed(case, reason, seconds):
        return case, reason

    run_pool(CASES, serve, lambda result: results.update([result]), failed=failed, jobs=2, seconds=1)
    assert results.keys() == set(CASES)
    assert [results[name] for name in CASES if name not in ("crash", "hang")] == ["pass"] * 3
    assert "exit code 11" in results["crash"] and "no result after 1 s" in results["hang"]


def test_a_case_without_a_result_is_an_error(monkeypatch):
    def pool(cases, serve, report, *, failed, jobs, seconds, imports):
        assert (jobs, seconds, imports) == (2, 3, ["tests.sweep.opinfo", *worker.TORCHS_LISTS["opinfo"]])
        assert serve.args == (settings,)
        report(failed(cases[0], "why", 0.5))

    monkeypatch.setattr(worker, "run_pool", pool)
    outcomes, settings = [], Settings("opinfo", seconds_per_case=3)
    run_cases(["add"], settings, outcomes.append, jobs=2)
    (outcome,) = outcomes
    assert (outcome.case, outcome.status) == ("add", "error") and "why" in outcome.detail


def test_a_worker_serves_cases_of_its_suite(monkeypatch):
    """The loop of a worker's process, in this one."""
    suite = SimpleNamespace(run_case=lambda name, **options: (name, options))
    monkeypatch.setattr(worker.importlib, "import_module", lambda name: suite)
    connection = mock.Mock(recv=mock.Mock(side_effect=["add", "mul", None]))
    worker._serve(Settings("opinfo", samples=2, threads=torch.get_num_threads(), dynamic=1), connection)
    told = [call.args[0] for call in connection.send.call_args_list]
    options = {"limit": 2, "seed": 0, "dynamic": 1}
    assert told == [None, ("add", options), ("mul", options)]


def test_suites_have_the_size_the_sweep_promises():
    assert len(opinfo.names()) >= 500
    assert len(moduleinfo.names()) >= 100
    assert len(zoo.names()) >= 23


def test_samples_are_spread_and_reproducible():
    everything = opinfo.samples("add", 10_000)
    chosen = opinfo.samples("add", 3)
    assert len(chosen) == 3 < len(everything)
    assert torch.equal(chosen[0].input, everything[0].input)
    assert torch.equal(chosen[-1].input, everything[-1].input)


def test_only_selects_and_an_empty_selection_is_reported(tmp_path, capsys):
    arguments = ["--suite", "zoo", "--out", str(tmp_path / "out.csv")]
    assert program.main([*arguments, "--only", "^bert", "--list"]) == 0
    assert capsys.readouterr().out.split() == ["bert", "bert-sdpa"]
    assert program.main([*arguments, "--only", "^bert", "--list", "--slice", "1/2"]) == 0
    assert capsys.readouterr().out.split() == ["bert-sdpa"]
    assert program.main([*arguments, "--only", "nothing"]) == 2
    assert program.main(["--suite", "special", *arguments[2:], "--dynamic", "0"]) == 2


@pytest.mark.parametrize(("statuses", "exit_status"), [(["pass", "refused(aten.x)"], 0), (["pass", "mismatch"], 1)])
def test_report(tmp_path, monkeypatch, statuses, exit_status):
    def run(names, settings, report, *, jobs):
        for name, status in zip(names, statuses, strict=False):
            report(combine(name, [Verdict(status)], 0.0))

    monkeypatch.setattr(program, "run_cases", run)
    path = tmp_path / "out.csv"
    assert program.main(["--suite", "zoo", "--out", str(path), "--only", "bert"]) == exit_status
    with path.open() as file:
        table = list(csv.DictReader(file))
    assert [row["suite"] for row in table] == ["zoo", "zoo"]
    assert table[0]["status"] == "pass"
