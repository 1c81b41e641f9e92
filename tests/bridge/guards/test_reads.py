"""State that forward reads, in any place: if it changes between two calls, the second runs eager, with a reason."""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import dataclasses
import decimal
import enum
import functools
import gc
import importlib
import logging
import os
import random
import sys
import threading
import types
import weakref
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from bridge.capture import record_call
from bridge.guards import Reads, functions
from bridge.guards.objects import Strangers
from bridge.state import SampleCall


class Slots:
    __slots__ = ("k",)

    def __init__(self):
        self.k = 2.0


@dataclasses.dataclass
class Settings:
    k: float = 2.0
    unread: float = 0.0


class Color(enum.Enum):
    RED = 1


class Guessing:
    def __init__(self):
        self.values = {"k": 2.0}

    def __getattr__(self, name):
        return self.values[name]


class Pair(ctypes.Structure):
    _fields_ = [("k", ctypes.c_double)]


def local():
    made = threading.local()
    made.k = 2.0
    return made


def variable():
    made = contextvars.ContextVar("k")
    made.set(2.0)
    return made


def color():
    Color.RED.k = 2.0
    return Color.RED


KEPT = Settings()


HOLDERS = {
    "list": (lambda: [2.0], lambda h: h[0], lambda h: h.__setitem__(0, 3.0)),
    "list in a tuple": (lambda: ([2.0],), lambda h: h[0][0], lambda h: h[0].append(1) or h[0].__setitem__(0, 3.0)),
    "dict": (lambda: {"k": 2.0}, lambda h: h["k"], lambda h: h.update(k=3.0)),
    "dict.get": (lambda: {}, lambda h: h.get("k", 2.0), lambda h: h.update(k=3.0)),
    "bound dict.get": (lambda: {}.get, lambda h: h("k", 2.0), lambda h: h.__self__.update(k=3.0)),
    "in a dict": (lambda: {}, lambda h: 3.0 if "k" in h else 2.0, lambda h: h.update(k=1)),
    "values of a dict": (lambda: {"k": 2.0}, lambda h: sum(h.values()), lambda h: h.update(j=1.0)),
    "OrderedDict": (
        lambda: collections.OrderedDict(a=2.0, b=3.0),
        lambda h: next(iter(h.values())),
        lambda h: h.move_to_end("a"),
    ),
    "deque": (lambda: collections.deque([2.0]), lambda h: h[-1], lambda h: h.append(3.0)),
    "Counter": (lambda: collections.Counter(k=2), lambda h: float(h["k"]), lambda h: h.update(["k"])),
    "ChainMap": (lambda: collections.ChainMap({}, {"k": 2.0}), lambda h: h["k"], lambda h: h.update(k=3.0)),
    "UserDict": (lambda: collections.UserDict(k=2.0), lambda h: h["k"], lambda h: h.update(k=3.0)),
    "set": (lambda: {1}, lambda h: 1.0 + len(h), lambda h: h.add(2)),
    "proxy of a mapping": (
        lambda: types.MappingProxyType(KEPT.__dict__),
        lambda h: h["k"],
        lambda h: setattr(KEPT, "k", KEPT.k + 1),
    ),
    "namespace": (lambda: types.SimpleNamespace(k=2.0), lambda h: h.k, lambda h: setattr(h, "k", 3.0)),
    "six namespaces deep": (
        lambda: functools.reduce(lambda h, _: types.SimpleNamespace(h=h), range(6), types.SimpleNamespace(k=2.0)),
        lambda h: h.h.h.h.h.h.h.k,
        lambda h: setattr(h.h.h.h.h.h.h, "k", 3.0),
    ),
    "dataclass": (Settings, lambda h: h.k, lambda h: setattr(h, "k", 3.0)),
    "getattr with a default": (Settings, lambda h: getattr(h, "late", 2.0), lambda h: setattr(h, "late", 3.0)),
    "getattr of a name": (Settings, lambda h: getattr(h, "".join("k")), lambda h: setattr(h, "k", 3.0)),
    "vars": (Settings, lambda h: vars(h)["k"], lambda h: setattr(h, "k", 3.0)),
    "hasattr": (Settings, lambda h: 2.0 + hasattr(h, "late"), lambda h: setattr(h, "late", 1)),
    "__getattr__": (Guessing, lambda h: h.k, lambda h: h.values.update(k=3.0)),
    "slots": (Slots, lambda h: h.k, lambda h: setattr(h, "k", 3.0)),
    "class attribute": (
        lambda: type("Made", (), {"k": 2.0})(),
        lambda h: h.k,
        lambda h: setattr(type(h), "k", 3.0),
    ),
    "class of an object": (
        lambda: type("Made", (), {"k": 2.0})(),
        lambda h: h.k,
        lambda h: setattr(h, "__class__", type("Other", (), {"k": 3.0})),
    ),
    "bases of a class": (
        lambda: type("Sub", (type("Low", (Settings,), {}),), {}),
        lambda h: 3.0 if issubclass(h, Guessing) else 2.0,
        lambda h: setattr(h, "__bases__", (type("High", (Guessing,), {}),)),
    ),
    "enum member": (color, lambda h: h.k, lambda h: setattr(h, "k", 3.0)),
    "ndarray": (lambda: np.array([2.0]), lambda h: float(h[0]), lambda h: h.__setitem__(0, 3.0)),
    "array": (lambda: array.array("d", [2.0]), lambda h: h[0], lambda h: h.__setitem__(0, 3.0)),
    "bytearray": (lambda: bytearray(b"\2"), lambda h: float(h[0]), lambda h: h.__setitem__(0, 3)),
    "partial": (
        lambda: functools.partial(max, [2.0]),
        lambda h: h([1.0])[0],
        lambda h: h.args[0].__setitem__(0, 3.0),
    ),
    "ctypes": (lambda: ctypes.c_double(2.0), lambda h: h.value, lambda h: setattr(h, "value", 3.0)),
    "ctypes structure": (lambda: Pair(2.0), lambda h: h.k, lambda h: setattr(h, "k", 3.0)),
    "context variable": (variable, lambda h: h.get(), lambda h: h.set(3.0)),
    "thread-local": (local, lambda h: h.k, lambda h: setattr(h, "k", 3.0)),
    "weak reference": (lambda: weakref.ref(KEPT), lambda h: h().k, lambda h: setattr(KEPT, "k", KEPT.k + 1)),
    "weak value": (
        lambda: weakref.WeakValueDictionary(k=KEPT),
        lambda h: 3.0 if h.get("k") is None else 2.0,
        lambda h: h.clear(),
    ),
    "weak set": (lambda: weakref.WeakSet([KEPT]), lambda h: 1.0 + len(h), lambda h: h.add(_other())),
    "lock": (threading.Lock, lambda h: 2.0 + h.locked(), lambda h: h.acquire()),
    "logger": (
        lambda: logging.getLogger("tests.of.reads"),
        lambda h: 3.0 if h.isEnabledFor(logging.DEBUG) else 2.0,
        lambda h: h.setLevel(logging.DEBUG),
    ),
    "function's attribute": (lambda: _function(), lambda h: h.k, lambda h: setattr(h, "k", 3.0)),
    "function's name": (lambda: _function(), lambda h: float(len(h.__name__)), lambda h: setattr(h, "__name__", "n")),
    "subclasses": (
        lambda: type("Root", (), {}),
        lambda h: 2.0 + len(h.__subclasses__()),
        lambda h: KEEP.append(type("Sub", (h,), {})),
    ),
    "environment": (
        lambda: os.environ,
        lambda h: float(h.get("TESTS_OF_" + "READS", "2")),
        lambda h: h.__setitem__("TESTS_OF_READS", str(float(h.get("TESTS_OF_READS", "2")) + 1)),
    ),
    "decimal context": (
        lambda: decimal.getcontext(),
        lambda h: float(h.prec),
        lambda h: setattr(h, "prec", h.prec + 1),
    ),
    "module's attribute": (lambda: _module(), lambda h: h.k, lambda h: setattr(h, "k", 3.0)),
}
KEEP: list = []


def _other():
    KEEP.append(Settings())
    KEEP[-1].__class__ = type("Hashable", (Settings,), {"__hash__": object.__hash__})
    return KEEP[-1]


Settings.__hash__ = object.__hash__


def _function():
    def made():
        return None

    made.k = 2.0
    return made


def _module():
    made = types.ModuleType("tests_of_reads_made")
    made.k = 2.0
    return made


HELD = None


def _attribute(holder, read):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.held = nn.Linear(4, 4), holder

        def forward(self, x):
            return self.linear(x) * read(self.held)

    return Net()


def _global(holder, read):
    global HELD
    HELD = holder

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x) * read(HELD)

    return Net()


def _closure(holder, read):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        @property
        def scale(self):
            def inner():
                return read(holder)

            return inner()

        def forward(self, x):
            return self.linear(x) * self.scale

    return Net()


def _default(holder, read):
    def helper(held=holder, *, how=read):
        return how(held)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.helpers = nn.Linear(4, 4), {"scale": [helper]}

        def forward(self, x):
            scales = [each() for each in self.helpers["scale"]]
            return self.linear(x) * scales[0]

    return Net()


READERS = {"attribute": _attribute, "global": _global, "closure": _closure, "default": _default}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("holder", HOLDERS)
def test_what_is_read_is_guarded(holder, reader):
    make, read, change = HOLDERS[holder]
    held = make()
    module, x = READERS[reader](held, read), torch.randn(3, 4)
    wanted = module(x)
    try:
        add_tvm_dispatch(module, x)
    except UnsupportedModule:
        pytest.fail("a common read is refused")
    torch.testing.assert_close(module(x), wanted)
    assert stats(module).hits == 1, dict(stats(module).misses)
    change(held)
    now = module.forward(x)
    assert not torch.allclose(now, wanted), "the change is one that eager sees"
    torch.testing.assert_close(module(x), now)
    assert stats(module).hits == 1 and len(stats(module).misses) == 1
    if holder == "lock":
        held.release()
    logging.getLogger("tests.of.reads").setLevel(logging.NOTSET)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.act, self.config = nn.Linear(4, 4), nn.ReLU(), Settings()
        self.table, self.steps = {"k": 2.0, "other": 1}, 0

    def forward(self, x):
        return self.act(self.linear(x)) * self.config.k * self.table["k"]


REPLACED = {
    "a function under torch's layer": (F, "relu", lambda x, inplace=False: x * 2),
    "a method of tensors": (torch.Tensor, "__mul__", lambda a, b: torch.add(a, b)),
    "forward of torch's layer": (nn.ReLU, "forward", lambda self, x: x * 2),
    "what calls modules": (nn.Module, "__call__", lambda self, x: self.forward(x) + 1),
}


@pytest.mark.parametrize("name", REPLACED)
def test_code_that_libraries_replace(name, monkeypatch):
    module, x = Plain(), torch.randn(3, 4)
    add_tvm_dispatch(module, x)
    module(x)
    monkeypatch.setattr(*REPLACED[name])
    now = module.forward(x) if name != "what calls modules" else None
    got = module(x)
    if now is not None:
        torch.testing.assert_close(got, now)
        assert stats(module).hits == 1 and stats(module).misses


UNREAD = {
    "another field": lambda m: setattr(m.config, "unread", 1.0),
    "another attribute": lambda m: setattr(m, "steps", m.steps + 1),
    "a new attribute": lambda m: setattr(m, "note", "x"),
    "another key": lambda m: m.table.update(other=5),
    "an equal dict": lambda m: setattr(m, "table", {"k": 2.0, "other": 1}),
    "an equal configuration": lambda m: setattr(m, "config", Settings()),
    "another environment variable": lambda m: os.environ.update(TESTS_OF_READS_TOO="1"),
    "another module": lambda m: importlib.import_module("colorsys"),
    "garbage": lambda m: gc.collect(),
}


@pytest.mark.parametrize("name", UNREAD)
def test_what_is_not_read_may_change(name):
    module, x = Plain(), torch.randn(3, 4)
    add_tvm_dispatch(module, x)
    module(x)
    UNREAD[name](module)
    torch.testing.assert_close(module(x), module.forward(x))
    assert stats(module).hits == 2, dict(stats(module).misses)


EFFECTS = {
    "list": (list, lambda h: h.append(len(h)), list),
    "dict": (dict, lambda h: h.__setitem__(len(h), 1), dict),
    "set": (set, lambda h: h.add(len(h)), set),
    "deep": (
        lambda: types.SimpleNamespace(a=types.SimpleNamespace(n=0)),
        lambda h: setattr(h.a, "n", h.a.n + 1),
        lambda h: h.a.n,
    ),
    "iterator": (lambda: iter(range(9)), next, lambda h: h.__reduce__()[2]),
    "random": (lambda: random.Random(0), lambda h: h.random(), lambda h: h.getstate()),
    "default_rng": (lambda: np.random.default_rng(0), lambda h: h.random(), lambda h: str(h.bit_generator.state)),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", EFFECTS)
def test_effects_are_refused_and_undone(kind, reader):
    make, act, state = EFFECTS[kind]
    held = make()
    before = state(held)
    module = READERS[reader](held, lambda h: (act(h), 2.0)[1])
    with pytest.raises(UnsupportedModule):
        add_tvm_dispatch(module, torch.randn(3, 4), whole=True)
    assert state(held) == before
    with suppress(UnsupportedModule):  # a generator's draws are eager's, between parts
        add_tvm_dispatch(module, torch.randn(3, 4))
    assert state(held) == before


def _mask():
    found = os.umask(0)
    os.umask(found)
    return found


@pytest.mark.parametrize(
    "act",
    [
        lambda path: open(path, "a").write("x"),
        lambda path: os.mkdir(path),
        lambda path: os.umask(_mask() ^ 0o20),
        lambda path: os.environ.update({path: "1"}),
        lambda path: threading.Thread(target=os.mkdir, args=(path,)).start(),
    ],
    ids=["open", "mkdir", "umask", "environ", "thread"],
)
def test_what_changes_files_or_the_process_is_refused_before_it_does(act, tmp_path):
    path, before = str(tmp_path / "made"), _mask()
    module = _attribute(path, lambda held: (act(held), 2.0)[1])
    with pytest.raises(
        UnsupportedModule, match=r"changes files, the process|writes to or reads from a file"
    ) as refused:
        add_tvm_dispatch(module, torch.randn(3, 4))
    (problem,) = refused.value.ops
    assert problem.where.startswith(__file__) and problem.where.partition(": ")[2]
    assert not os.path.exists(path) and _mask() == before and path not in os.environ


def test_a_profiler_of_the_users_goes_on():
    heard: list[str] = []

    def hear(frame, event, arg):
        heard.append(event)

    sys.setprofile(hear)
    try:
        add_tvm_dispatch(Plain(), torch.randn(3, 4))
        assert sys.getprofile() is hear
    finally:
        sys.setprofile(None)


class Steps(nn.Module):
    """Calls a part step by step; a step may set an attribute that the next one reads."""

    def __init__(self, steps, sets):
        super().__init__()
        self.norm, self.steps, self.sets = nn.LayerNorm(4), steps, sets

    def forward(self, x):
        for step in range(self.steps):
            x = self.norm(x)
            if self.sets and step == 1:
                self.norm.later = LATER
        return x * getattr(self.norm, "later", LATER)["k"]


LATER = {"k": 2.0}


def test_steps_are_followed_once(monkeypatch):
    followed, look = [], Reads._look_at
    monkeypatch.setattr(Reads, "_look_at", lambda reads, frame, flow: (followed.append(0), look(reads, frame, flow)))
    counts = []
    for steps in (4, 4, 40):  # the first call imports
        followed.clear()
        record_call(SampleCall(Steps(steps, sets=False), (torch.randn(3, 4),), {}))
        counts.append(len(followed))
    assert counts[1] == counts[2] > 0


def test_what_a_step_sets_is_read_by_the_next(monkeypatch):
    module, x = Steps(4, sets=True), torch.randn(3, 4)
    module.norm.later = LATER
    add_tvm_dispatch(module, x)
    module(x)
    monkeypatch.setitem(LATER, "k", 3.0)
    torch.testing.assert_close(module(x), module.forward(x))
    assert stats(module).hits == 1 and stats(module).misses


def test_what_a_module_runs_while_it_is_imported_is_not_followed(tmp_path, monkeypatch):
    """It runs once in a process, and may be a library's thousands of functions."""
    (tmp_path / "imported_late.py").write_text("def f(k):\n    return k\nK = sum(f(k) for k in (0, 1, 1.5))\n")
    monkeypatch.syspath_prepend(tmp_path)
    followed, look = [], Reads._look_at
    monkeypatch.setattr(
        Reads, "_look_at", lambda reads, frame, flow: (followed.append(frame.code), look(reads, frame, flow))
    )

    class Late(nn.Module):
        def forward(self, x):
            import imported_late

            return x.tanh() * imported_late.K

    module, x = add_tvm_dispatch(Late(), torch.randn(3, 4)), torch.randn(3, 4)
    assert followed and not [code for code in followed if code.co_filename.startswith(str(tmp_path))]
    module(x)
    sys.modules["imported_late"].K = 4.0
    torch.testing.assert_close(module(x), x.tanh() * 4)
    assert (stats(module).hits, stats(module).misses.total()) == (1, 1)


def test_earlier_objects_are_told_apart_without_an_audit_event_for_each(monkeypatch):
    class Hearing(dict):
        asked = 0

        def __bool__(self):
            self.asked += 1
            return False

    class Object:
        pass

    with functions.audited(lambda event, arguments: None):  # adds the hook
        pass
    monkeypatch.setattr(functions, "_hearing", hearing := Hearing())
    many, before, strangers = [[] for _ in range(2000)], Object(), Strangers()
    with strangers.lifetimes():
        strangers.note(before, ("is read",))
        strangers.note(made := Object(), ("is read",))
        asked = hearing.asked
        assert strangers.known_before() == [(before, [("is read",)])]
    assert hearing.asked - asked < len(many) and made is not before
