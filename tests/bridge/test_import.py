"""``import bridge`` imports neither TVM nor sympy: its functions do when they are called, which nothing else tells."""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import bridge

HEAVY = (
    *("tvm", "tvm_ffi", "sympy", "mpmath", "graphviz", "torch._dynamo", "torch._inductor"),
    *("torch.fx.experimental.symbolic_shapes", "bridge.capture", "bridge.dispatch", "autodiff", "partition"),
)

ROOMS = {
    **dict.fromkeys(["add_tvm_dispatch", "remove_tvm_dispatch", "stats"], "bridge.dispatch"),
    **dict.fromkeys(["explain", "visualize"], "bridge.show"),
    **dict.fromkeys(["save_compiled", "load_compiled"], "bridge.export"),
    **{"examine": "bridge.examine", "lower": "bridge.lower"},
}


def fresh(script: str) -> str:
    """A script's output in a new process."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(root), *filter(None, sys.path)))}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.parametrize("statement", ["import bridge", f"from bridge import {', '.join(ROOMS)}"])
def test_importing_leaves_the_compiler_for_later(statement):
    found = fresh(f"""
import sys, torch
before = set(sys.modules)
{statement}
print(*(set({HEAVY}) & (sys.modules.keys() - before)))""")
    assert found == ""


def test_every_public_name_is_there_without_being_imported_first():
    script = "import bridge; print(*(name for name in bridge.__all__ if name in dir(bridge) and hasattr(bridge, name)))"
    assert fresh(script).split() == bridge.__all__
    with pytest.raises(AttributeError, match="'bridge' has no attribute 'nothing'"):
        bridge.nothing  # noqa: B018


@pytest.mark.parametrize("name", ROOMS)
def test_a_function_takes_what_its_room_takes(name):
    of_room = getattr(importlib.import_module(ROOMS[name]), name)
    assert inspect.signature(getattr(bridge, name)) == inspect.signature(of_room)


def test_a_submodule_of_the_same_name_leaves_the_function():
    names = ["examine", "lower"]
    found = fresh(f"""
import bridge
functions = [getattr(bridge, name) for name in {names}]
import bridge.examine, bridge.lower
assert [getattr(bridge, name) for name in {names}] == functions
print(*(function.__name__ for function in functions))""")
    assert found.split() == names
    assert pickle.loads(pickle.dumps(bridge.lower)) is bridge.lower


def test_modes_of_the_first_call_see_nothing_of_the_import():
    found = fresh("""
import gc, sys, torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
import bridge

class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        print(func)
        return func(*args, **(kwargs or {}))

class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        print(func)
        return func(*args, **(kwargs or {}))

module = torch.nn.Linear(2, 3)
state = torch.get_rng_state()
with Functions(), Operators():
    bridge.remove_tvm_dispatch(module)
assert "tvm" in sys.modules and gc.isenabled() and torch.equal(state, torch.get_rng_state())""")
    assert found == ""


def test_what_is_imported_inside_modes_serves_outside_of_them():
    found = fresh("""
import torch, bridge
module, x = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout()), torch.randn(2, 4)
with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
    bridge.remove_tvm_dispatch(module)
torch.manual_seed(0)
expected = module(x)
bridge.add_tvm_dispatch(module, x)
torch.manual_seed(0)
torch.testing.assert_close(module(x), expected)
module(x).sum().backward()
print(bridge.stats(module).hits)""")
    assert found == "2"


def test_no_collection_walks_through_what_is_imported():
    script = """
import gc, torch, bridge
walked = [0]
gc.callbacks.append(lambda phase, info: phase == "start" and walked.append(len(gc.get_objects(0))))
bridge.add_tvm_dispatch(torch.nn.Linear(2, 2))  # compiles at its first call
made = [[] for _ in range(2000)]
print(max(walked), gc.get_freeze_count() < 1000, gc.isenabled())"""
    walked, *after = fresh(script).split()
    assert int(walked) < 20_000 and after == ["True", "True"]  # TVM and this package make 300,000


def test_an_interrupt_waits_for_the_end_of_the_import():
    """Python would take back half of TVM, whose other half cannot be imported again."""
    found = fresh("""
import importlib.abc, os, signal, sys, torch
import bridge

class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "tvm.relax":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
module, x = torch.nn.Linear(2, 3), torch.ones(1, 2)
try:
    bridge.add_tvm_dispatch(module, x)
except KeyboardInterrupt:
    bridge.add_tvm_dispatch(module, x)
    module(x)
    print(bridge.stats(module).hits)""")
    assert found == "1"


def test_caches_may_be_reset_before_they_are_there():
    found = fresh("""
import bridge
from bridge.base.session import SESSION
SESSION.reset("programs", "choices", "lowerings", "complaints", "stores")
kinds = set(SESSION._caches)
import bridge.dispatch, bridge.export, bridge.show
print(*(SESSION._caches.keys() ^ kinds))""")
    assert found == ""


def test_reports_need_no_graphviz_and_pictures_say_what_does():
    found = fresh("""
import sys
sys.modules["graphviz"] = None
import bridge.show
from bridge.show.picture import Picture, draw
try:
    draw(Picture("nothing"))
except ImportError as error:
    print(error)""")
    assert found == "visualize needs the Python package graphviz: pip install 'tvm-dispatch[show]'"
