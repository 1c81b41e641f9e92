"""Logs by channel, the environment variable that switches them on, and ranges under torch.profiler."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import bridge
from bridge import add_tvm_dispatch, stats
from bridge.base.log import CHANNELS, channel, set_logs
from bridge.base.session import SESSION
from bridge.compile import Launch
from tests.bridge.models import MLP


@pytest.fixture(autouse=True)
def fresh():
    """Empty caches: equal modules of other tests must not have compiled the programs that a test logs."""
    SESSION.reset("programs", "lowerings")
    yield
    set_logs("")


def rows(count: int = 5) -> torch.Tensor:
    return torch.randn(count, 6)


class Sorts(nn.Module):
    def forward(self, x):
        return torch.logcumsumexp(x, -1) + x.sort(-1)[0]


def lines(caplog, name: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == f"bridge.{name}"]


def test_each_pass_is_one_line(caplog):
    with caplog.at_level(logging.INFO, logger="bridge"):
        module = add_tvm_dispatch(MLP(), rows())
    told = lines(caplog, "passes")
    stages = stats(module).entries[0].lowered.stages
    assert len(told) == len(stages)
    for line, stage in zip(told, stages, strict=True):
        assert re.fullmatch(rf"MLP {stage.name}: .*, \d+\.\d ms, (\d+ -> )?{stage.size} nodes", line), line


def test_channels_tell_what_they_promise(caplog):
    with caplog.at_level(logging.INFO, logger="bridge"):
        module = add_tvm_dispatch(MLP(), rows())
        module(rows(3))
        add_tvm_dispatch(Sorts(), rows().requires_grad_())
    plan = stats(module).entries[0].plan
    assert lines(caplog, "partition")[0] == f"MLP {plan.summary()}"
    assert any("shape of args[0]" in line for line in lines(caplog, "guards"))
    programs = lines(caplog, "compile")
    assert any("MLP_forward" in line for line in programs) and any("MLP_backward" in line for line in programs)
    assert any("logcumsumexp" in line or "operator" in line for line in lines(caplog, "fallbacks"))
    assert any("added Entry(MLP(" in line for line in lines(caplog, "dispatch"))


def test_details_only_on_request(caplog):
    with caplog.at_level(logging.DEBUG, logger="bridge"):
        add_tvm_dispatch(MLP(), rows())
    assert any("@R.function" in line for line in lines(caplog, "passes"))
    assert any("kernel k0" in line for line in lines(caplog, "compile"))


def test_nothing_is_said_by_default(capfd):
    module = add_tvm_dispatch(MLP(), rows())
    module(rows(3))
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == ""


def test_levels():
    set_logs("passes, +guards, -dispatch")
    assert [channel(name).level for name in ("passes", "guards", "dispatch")] == [
        logging.INFO,
        logging.DEBUG,
        logging.ERROR,
    ]
    assert channel("compile").level == logging.NOTSET
    set_logs("all,+compile")
    assert channel("compile").level == logging.DEBUG and channel("reuse").level == logging.INFO
    root = logging.getLogger("bridge")
    assert len(root.handlers) == 1 and root.propagate
    set_logs("Bridge.Guards, + passes")
    assert [channel(name).level for name in ("guards", "passes", "compile")] == [
        logging.INFO,
        logging.DEBUG,
        logging.NOTSET,
    ]
    assert len(root.handlers) == 1
    set_logs("")
    assert not root.handlers and root.propagate
    assert all(channel(name).level == logging.NOTSET for name in CHANNELS)


def run(program: str, **environment: str) -> subprocess.CompletedProcess:
    """In a process of its own: pytest has handlers of its own on the root logger."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    return subprocess.run(
        [sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True, timeout=300
    )


LOADED = """
import torch; from bridge import add_tvm_dispatch
m = add_tvm_dispatch(torch.nn.Linear(3, 2), torch.randn(4, 3)); m(torch.randn(5, 3))
print("loaded", flush=True)
"""
LOADED_AGAIN = """
import importlib, io, logging, sys
import bridge.base.log
importlib.reload(bridge.base.log)
tell = bridge.base.log.channel("guards").info
sys.stderr = first = io.StringIO()
tell("one"), bridge.base.log.channel("passes").info("not asked for")
sys.stderr = second = io.StringIO()
logging.getLogger("bridge").addHandler(logging.NullHandler())
tell("heard")
logging.basicConfig(level=logging.WARNING, format="mine: %(message)s")
tell("two"), bridge.base.log.channel("passes").info("not asked for")
print([first.getvalue(), second.getvalue(), len(logging.getLogger("bridge").handlers)])
"""


@pytest.fixture(scope="module")
def told():
    """The output of a process that loads the package, and then its logs once more."""
    return run(LOADED + LOADED_AGAIN, BRIDGE_LOGS="guards,partition")


def test_one_handler_however_often_loaded_and_none_beside_the_applications(told):
    """A module loaded again, the stream redirected, logging configured afterwards: each message appears once."""
    said = told.stdout.partition("loaded\n")[2]
    assert said == "['[bridge.guards] one\\n', '[bridge.guards] heard\\nmine: two\\n', 2]\n"


def test_unknown_channels_are_named():
    with pytest.raises(ValueError, match=r"no channel 'gards' in 'gards'. There are 'all' and\n  passes"):
        set_logs("gards")
    with pytest.raises(KeyError, match="gards"):
        channel("gards")


def test_every_logger_of_the_package_is_a_channel():
    root = Path(bridge.__file__).parent
    named = {name for path in root.rglob("*.py") for name in re.findall(r'getLogger\("bridge\.(\w+)', path.read_text())}
    assert named <= set(CHANNELS)
    every = {name for path in root.rglob("*.py") for name in re.findall(r'channel\("(\w+)"\)', path.read_text())}
    assert every | named == set(CHANNELS)


@pytest.mark.composes(
    "logs (`BRIDGE_LOGS`), `torch.profiler`",
    "ranges name module and kernel",
    section="Autograd, memory, threads",
)
def test_environment_variable(told):
    """In a process of its own, without torch's threads: only the chosen channels, on the standard error stream."""
    assert "[bridge.guards] Linear runs eager: shape of args[0]" in told.stderr
    assert "[bridge.partition] Linear min_cut" in told.stderr and "[bridge.passes]" not in told.stderr
    assert told.stdout.startswith("loaded\n")


@pytest.mark.composes("logs (`BRIDGE_LOGS`), `torch.profiler`")
def test_profiler_ranges_name_module_and_kernel():
    module = add_tvm_dispatch(MLP(dropout=0.5), rows())
    module(rows()).sum().backward()
    entry = stats(module).entries[0]
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        module(rows()).sum().backward()
    names = [event.name for event in profiled.events()]
    for program in (entry.forward, entry.backward):
        assert names.count(f"tvm: {program.name}") == 1
        for step in program.steps:
            assert f"tvm: {program.name}/{step.name}" in names
    kernels = [step for step in entry.forward.steps if isinstance(step, Launch)]
    outer = next(event for event in profiled.events() if event.name == f"tvm: {entry.forward.name}")
    inner = next(e for e in profiled.events() if e.name == f"tvm: {entry.forward.name}/{kernels[0].name}")
    assert outer.time_range.start <= inner.time_range.start <= inner.time_range.end <= outer.time_range.end


class SameMLP(MLP):
    """Another name for the same function."""


def test_profiler_ranges_name_the_module_that_was_called(tmp_path):
    """Forward and backward, in the exported trace, although the code was compiled for an equal module."""
    first = add_tvm_dispatch(MLP(), rows())
    module = add_tvm_dispatch(SameMLP(), rows())
    assert stats(module).entries[0].forward is stats(first).entries[0].forward
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        module(rows()).sum().backward()
    profiled.export_chrome_trace(str(tmp_path / "trace.json"))
    told = (tmp_path / "trace.json").read_text()
    for direction in ("forward", "backward"):
        kernel = next(step for step in getattr(stats(module).entries[0], direction).steps if isinstance(step, Launch))
        assert f'"tvm: SameMLP_{direction}"' in told and f'"tvm: MLP_{direction}/{kernel.name}"' in told


def test_profiled_and_plain_results_are_the_same():
    module = add_tvm_dispatch(MLP(), rows())
    x = rows()
    plain = module(x)
    with profile(activities=[ProfilerActivity.CPU]):
        profiled = module(x)
    assert torch.equal(plain, profiled)
