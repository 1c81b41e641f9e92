"""Tuning of a call: choices that are kept and used afterwards, or never, and that the module is left as it was."""

from __future__ import annotations

import random
import sys
from functools import partial

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, explain, stats, tune
from bridge.compile import LIMITS, ORDER, PARTITION, PRODUCTS, ProductShape, backend_for
from bridge.dispatch import EntryOptions, TimedStep, before_compiling
from bridge.state import SampleCall
from bridge.tune.__main__ import main
from bridge.tune.search import Tunable, TuningLog, tunables_of
from bridge.tune.tuning import Means, tune_call


def block() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(56), nn.Linear(56, 96), nn.GELU(), nn.BatchNorm1d(96), nn.Dropout(0.25))


def sample() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(40, 56)


PRODUCT = ProductShape("float32", 1, 40, 96, 56)
LANES, TASKS = Tunable(ORDER, "lanes", (8,)), Tunable(LIMITS, "tasks", (32,))


def tuned(module, x, race, final=None, freeze=False, log=None, tunables=(LANES,)):
    means = Means(5.0, log, progress=False, race=race, final=final or race, tunables=lambda *_: tunables)
    return tune_call(SampleCall(module, (x,)), EntryOptions("min_cut", backend_for(None), freeze), means)


def eight_lanes(choices) -> float:
    """Seconds by which vectors of eight are the best, and nothing else matters."""
    return 0.8 if dict(choices.order).get("lanes") == 8 else 1.0


def gradients(module, x, state):
    torch.set_rng_state(state)
    module.zero_grad()
    y = module(x)
    y.square().sum().backward()
    return [y.detach(), *(parameter.grad for parameter in module.parameters())]


def test_choices_are_used_afterwards_and_said(used_cache, as_another_process, fake_race, tmp_path):
    module, x, state = block(), sample(), torch.get_rng_state()
    wanted = gradients(module, x, state)
    add_tvm_dispatch(module, x)
    plain = gradients(module, x, state)
    assert "not tuned" in str(explain(module))
    result = tuned(module, x, fake_race(eight_lanes), log=tmp_path / "block.jsonl")
    assert result.kept and result.words == ("order.lanes 16 -> 8",) and (result.before, result.after) == (1.0, 0.8)
    add_tvm_dispatch(module, x)  # its entry serves the call, with other choices than the ones kept by now
    (entry,) = stats(module).entries
    assert entry.forward.backend.order.lanes == entry.backward.backend.order.lanes == 8
    again = gradients(module, x, state)
    as_another_process()
    other = add_tvm_dispatch(block(), x)
    for one, two, mine, its in zip(wanted, again, plain, gradients(other, x, state), strict=True):
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-4)
        assert torch.equal(two, its)
        torch.testing.assert_close(mine, two, rtol=1e-4, atol=1e-4)
    assert not all(map(torch.equal, plain, again)) and not stats(module).misses
    told = str(explain(other))
    assert f"tuned {entry.options.tuned.date}, block.jsonl: 1000.000 ms a step before, 800.000 ms after" in told
    assert "order.lanes 16 -> 8 (tuned)" in told and "everything else: default" in told
    assert "measured at first use" in told and "how it is compiled" in explain(other)._repr_html_()


def test_other_sizes_threads_and_modes_have_choices_of_their_own(used_cache, fake_race, monkeypatch):
    module, x = block(), sample()
    assert tuned(module, x, fake_race(eight_lanes)).kept
    lanes = partial(lambda module: stats(module).entries[-1].forward.backend.order.lanes)
    assert lanes(add_tvm_dispatch(block(), x)) == 8
    assert lanes(add_tvm_dispatch(block(), x[:39])) == 16
    assert lanes(add_tvm_dispatch(block().eval(), x)) == 16
    assert lanes(add_tvm_dispatch(block(), x, partition="recompute_all")) == 16
    monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", "AVX2")
    assert lanes(add_tvm_dispatch(block(), x)) == 16


def test_what_the_last_race_does_not_confirm_is_thrown_away(used_cache, fake_race):
    module, x = block(), sample()
    result = tuned(module, x, fake_race(eight_lanes), final=fake_race(lambda choices: 1.0))
    assert not result.kept and not result.choices and "did not confirm" in result.why
    slower = fake_race(lambda choices: 1.2 if choices else 1.0)
    assert not tuned(module, x, fake_race(eight_lanes), final=slower).kept
    add_tvm_dispatch(module, x)
    assert stats(module).entries[0].options.tuned is None


def test_choices_in_use_are_what_the_last_race_is_against(used_cache, fake_race):
    module, x = block(), sample()
    assert tuned(module, x, fake_race(eight_lanes)).kept
    tasks = fake_race(lambda choices: 0.9 if choices.limits else 1.0)
    again = tuned(module, x, fake_race(eight_lanes))
    assert not again.kept and again.choices and again.why == "the choices in use are the best"
    worse = tuned(module, x, tasks, fake_race(lambda choices: eight_lanes(choices)), tunables=[TASKS])
    assert not worse.kept and worse.choices == again.choices and "did not confirm" in worse.why


def test_numbers_that_deviate_are_never_kept(used_cache, fake_race, monkeypatch):
    results = iter([[torch.ones(3)], [torch.tensor([1.0, 1.0, 1.5])]])
    monkeypatch.setattr(TimedStep, "results", lambda step: next(results))
    result = tuned(block(), sample(), fake_race(eight_lanes))
    assert not result.kept and "result 0 differs by more than rounding" in result.why


def test_the_module_is_left_as_it_was(used_cache):
    """With real timings: parameters, buffers, gradients, hooks, attributes, generators."""
    module, x = block(), sample().requires_grad_()
    module.weight_hooked = [parameter.register_hook(pytest.fail) for parameter in module.parameters()]
    module.register_forward_hook(lambda *_: pytest.fail("called"))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    names, states = set(vars(module)), (torch.get_rng_state(), random.getstate())
    result = tune(module, x, minutes=0.03, progress=False)
    assert result.trials and result.seconds > 0 and str(result).startswith("Sequential: ")
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert set(vars(module)) == names and x.grad is None and all(each.grad is None for each in module.parameters())


def test_frozen_inference(used_cache, fake_race):
    module, x = block().eval(), sample()
    wanted = module(x)
    assert tuned_inference(module, x, fake_race(eight_lanes)).kept
    with torch.no_grad():
        add_tvm_dispatch(module, x, freeze=True)
        torch.testing.assert_close(module(x), wanted, rtol=1e-4, atol=1e-5)
    (entry,) = stats(module).entries
    assert entry.is_frozen and entry.forward.backend.order.lanes == 8
    with torch.no_grad():
        module[1].weight.mul_(2.0)
        add_tvm_dispatch(module, x, freeze=True)
    assert stats(module).entries[0].forward.backend.order.lanes == 8


def tuned_inference(module, x, race):
    with torch.no_grad():
        return tuned(module, x, race, freeze=True)


def test_budgets_never_save_more_than_is_allowed(used_cache, fake_race):
    def liked(choices):
        return {None: 1.0, "save_all": 0.5, 0.5: 0.9, 0.25: 0.8}.get(choices.partition, 1.0)

    module, x = block(), sample()
    result = tuned(module, x, fake_race(liked), tunables=[Tunable(PARTITION, None, ("save_all", 0.5, 0.25))])
    assert result.choices.partition != "save_all"
    if result.kept:
        add_tvm_dispatch(module, x)
        (entry,) = stats(module).entries
        assert entry.plan.strategy == f"min_cut(budget={result.choices.partition})" and not stats(module).misses


def test_a_script_is_tuned_where_it_adds_its_dispatch(used_cache, fake_race):
    asked = []

    def tuner(call, options):
        asked.append((call.name, options.partition, options.freeze))
        tuned(call.module, *call.args, fake_race(eight_lanes))

    module, x = block(), sample()
    with before_compiling(tuner):
        add_tvm_dispatch(module, x)
    assert asked == [("Sequential", "min_cut", False)]
    assert stats(module).entries[0].options.tuned.choices


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"minutes": 0}, ValueError, "minutes: wanted a positive number, got 0"),
        ({"minutes": float("nan")}, ValueError, "minutes: wanted a positive number"),
        ({"minutes": "2"}, TypeError, "minutes: wanted a number, got '2'"),
        ({"memory": -1.0}, ValueError, "memory: wanted a positive number"),
        ({"log": 3}, TypeError, "log: wanted a path or None, got 3"),
        ({"log": "/no/such/place/log.jsonl"}, ValueError, "log: there is no directory '/no/such/place'"),
        ({"partition": "some"}, ValueError, "partition"),
        ({"target": {"kind": "opencl"}}, ValueError, "target"),
    ],
)
def test_bad_input(used_cache, change, error, message):
    given = {"sample_input": sample(), **change}
    with pytest.raises(error, match=message):
        tune(block(), given.pop("sample_input"), **given)


def test_without_a_cache_there_is_nothing_to_keep_choices_in(monkeypatch):
    monkeypatch.setenv("BRIDGE_CACHE", "0")
    with pytest.raises(ValueError, match=r"tune: the disk cache, .* is off"):
        tune(block(), sample())
    with pytest.raises(TypeError, match=r"module: wanted a torch.nn.Module, got int"):
        tune(3, sample())


SCRIPT = """
import sys, torch
from torch import nn
from bridge import add_tvm_dispatch, stats
assert sys.argv[1:] == ["--size", "24"]
for _ in range(2):
    module = add_tvm_dispatch(nn.Sequential(nn.Linear(24, 24), nn.GELU()), torch.ones(5, 24))
print("served", stats(module).entries[0].guard is not None)
"""


def test_the_command(used_cache, tmp_path, monkeypatch, capsys):
    script, log = tmp_path / "script.py", tmp_path / "tuned.jsonl"
    script.write_text(SCRIPT)
    monkeypatch.setattr(sys, "argv", ["python"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["--minutes", "0.0001", "--quiet", "--log", str(log), str(script), "--size", "24"]) == 0
    said = capsys.readouterr()
    assert "served True" in said.out and said.err.count("Sequential: ") == 1  # two equal modules, one tuning
    assert '"kind": "trial"' in log.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"), [(["none.py"], "there is no file none.py"), (["--minutes", "-1", __file__], "minutes")]
)
def test_the_command_called_wrongly(arguments, message, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2 and message in capsys.readouterr().err


def test_tunables_of_a_call(used_cache, monkeypatch):
    """Ways of products that are about as fast as the present one, by themselves; the log has the measurements."""
    asked, seconds = [], {"mm": 1.0, "linear": 0.8, "mm_swapped": 1.3, "generated 4x6": 1.05, "generated 8x3": 0.9}
    module, x = block(), sample()
    (entry,) = stats(add_tvm_dispatch(module, x)).entries
    log = TuningLog(None, "here")
    monkeypatch.setattr(
        type(entry.options.backend), "seconds_of_ways", lambda backend, product: asked.append(product) or {**seconds}
    )
    monkeypatch.setitem(tunables_of.__globals__, "products_and_calls", lambda *_: (((PRODUCT, "mm"),), ()))
    tunables = tunables_of(entry, "min_cut", log)
    assert tunables[0] == Tunable(PRODUCTS, PRODUCT, ("linear", "generated 8x3", "generated 4x6")) and asked == [
        PRODUCT
    ]
    assert tunables_of(entry, "min_cut", log) == tunables and len(asked) == 1
    parts = {tunable.part: tunable for tunable in tunables}
    assert {LIMITS, ORDER, PARTITION} <= parts.keys() and PARTITION not in {
        tunable.part for tunable in tunables_of(entry, "save_all", log)
    }
