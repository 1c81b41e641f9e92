"""State without a name: files, the process, objects in C, names of classes; changed between calls, or by forward."""

from __future__ import annotations

import abc
import collections
import contextvars
import decimal
import hashlib
import io
import itertools
import logging
import operator
import os
import pickle
import queue
import re
import sqlite3
import subprocess
import sys
import tempfile
import threading
import warnings
import xml.etree.ElementTree as ET
import zlib
from types import SimpleNamespace
from xml.parsers import expat

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from bridge.guards.functions import is_asked

KEEP: list = []


class Kind:
    v = 2.0

    def method(self):
        return 2.0


class Sub(Kind):
    def method(self):
        return super().method()


class Raised(Exception):
    pass


class Other(Exception):
    pass


class Root(abc.ABC):  # noqa: B024 - a class that others are registered with
    pass


def raises(kind, base):
    try:
        raise kind
    except base:
        return 3.0
    except Exception:  # noqa: BLE001 - either
        return 2.0


def warns():
    try:
        warnings.warn("a test", stacklevel=1)
    except UserWarning:
        return 3.0
    return 2.0


def matches(value, kind):
    match value:
        case kind():
            return 3.0
    return 2.0


def kind(**names):
    return type("Made", (Kind,), names)


def write(path, text="3"):
    with open(path, "w") as file:
        file.write(text)


def text_of(path):
    with open(path) as file:
        return float(file.read())


# name: (the held object, forward's read of it, the change); ``path`` is a file that holds "2"
STATE = {
    "a file": (lambda path: path, text_of, write),
    "a file, computed": (lambda path: path[:-1], lambda h: 2.0 + os.access(h + "q", os.R_OK), lambda h: write(h + "q")),
    "a folder": (os.path.dirname, lambda h: 2.0 + len(os.listdir(h)), lambda h: write(h + "/another")),
    "a folder, scanned": (os.path.dirname, lambda h: 2.0 + len([*os.scandir(h)]), lambda h: write(h + "/another")),
    "decimal": (
        lambda path: decimal.Decimal(1),
        lambda h: float(h / 3),
        lambda h: setattr(decimal.getcontext(), "prec", 2),
    ),
    "warnings that raise": (lambda path: None, lambda h: warns(), lambda h: warnings.simplefilter("error")),
    "NumPy's errors": (
        lambda path: np,
        lambda h: 2.0 + (h.geterr()["over"] == "raise"),
        lambda h: h.seterr(over="raise"),
    ),
    "autocast's dtype": (
        lambda path: None,
        lambda h: 2.0 + (torch.get_autocast_dtype("cpu") is torch.float16),
        lambda h: torch.set_autocast_dtype("cpu", torch.float16),
    ),
    "autocast's cache": (
        lambda path: None,
        lambda h: 2.0 + torch.is_autocast_cache_enabled(),
        lambda h: torch.set_autocast_cache_enabled(False),
    ),
    "torch's print options": (
        lambda path: torch.ones(3) / 3,
        lambda h: float(len(f"{h}")),
        lambda h: torch.set_printoptions(precision=8),
    ),
    "numbers that are flushed": (
        lambda path: 1e-310,
        lambda h: 2.0 + (h * 0.5 == 0.0),
        lambda h: torch.set_flush_denormal(True),
    ),
    "the folder of temporary files": (
        lambda path: None,
        lambda h: float(len(tempfile.gettempdir())),
        lambda h: setattr(tempfile, "tempdir", "/tmp/tests"),
    ),
    "flags of attention": (
        lambda path: None,
        lambda h: 2.0 + torch.backends.cuda.math_sdp_enabled(),
        lambda h: torch.backends.cuda.enable_math_sdp(False),
    ),
    "a class's name": (
        lambda path: kind()(),
        lambda h: float(len(type(h).__name__)),
        lambda h: setattr(type(h), "__name__", "N"),
    ),
    "names in a class": (lambda path: kind(), lambda h: 2.0 + ("late" in vars(h)), lambda h: setattr(h, "late", 1)),
    "dir": (lambda path: kind()(), lambda h: 2.0 + ("late" in dir(h)), lambda h: setattr(type(h), "late", 1)),
    "type is": (lambda path: kind()(), lambda h: 2.0 + (type(h) is Sub), lambda h: setattr(h, "__class__", Sub)),
    "isinstance": (lambda path: kind()(), lambda h: 2.0 + isinstance(h, Sub), lambda h: setattr(h, "__class__", Sub)),
    "an ABC": (lambda path: kind()(), lambda h: 2.0 + isinstance(h, Root), lambda h: Root.register(type(h))),
    "match": (lambda path: kind()(), lambda h: matches(h, Sub), lambda h: setattr(h, "__class__", Sub)),
    "except": (
        lambda path: type("E", (Raised,), {}),
        lambda h: raises(h, Other),
        lambda h: setattr(h, "__bases__", (Other,)),
    ),
    "super()": (
        lambda path: type("S", (Sub,), {})(),
        lambda h: h.method(),
        lambda h: KEEP.append(Kind.method) or setattr(Kind, "method", lambda self: 3.0),
    ),
    "attrgetter": (
        lambda path: (operator.attrgetter("a.k"), SimpleNamespace(a=SimpleNamespace(k=2.0))),
        lambda h: h[0](h[1]),
        lambda h: setattr(h[1].a, "k", 3.0),
    ),
    "lists compared by is": (
        lambda path: {"a": [1], "b": [1]},
        lambda h: 2.0 + (h["a"] is h["b"]),
        lambda h: h.update(b=h["a"]),
    ),
    "a digest": (lambda path: hashlib.sha256(), lambda h: 2.0 + h.digest()[0], lambda h: h.update(b"x")),
    "an element": (lambda path: ET.fromstring("<a k='2'/>"), lambda h: float(h.get("k")), lambda h: h.set("k", "3")),
    "a queue's size": (lambda path: queue.SimpleQueue(), lambda h: 2.0 + h.qsize(), lambda h: h.put(1)),
    "an event": (lambda path: threading.Event(), lambda h: 2.0 + h.is_set(), lambda h: h.set()),
    "a generator's place": (lambda path: itertools.count(2), lambda h: float(repr(h)[6:-1]), next),
    "an object array": (
        lambda path: np.array([SimpleNamespace(k=2.0)], dtype=object),
        lambda h: h[0].k,
        lambda h: setattr(h[0], "k", 3.0),
    ),
}


class Net(nn.Module):
    def __init__(self, held, act):
        super().__init__()
        self.linear, self.held, self.act = nn.Linear(4, 4), held, act

    def forward(self, x):
        return self.linear(x) * self.act(self.held)


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """Restores the process's state after a case."""
    context, errors, dtype = decimal.getcontext().copy(), np.geterr(), torch.get_autocast_dtype("cpu")
    with warnings.catch_warnings():
        yield
    decimal.setcontext(context)
    np.seterr(**errors)
    torch.set_autocast_dtype("cpu", dtype)
    torch.set_autocast_cache_enabled(True)
    torch.backends.cuda.enable_math_sdp(True)
    torch.set_printoptions(profile="default")
    torch.set_flush_denormal(False)
    tempfile.tempdir = None
    if KEEP:
        Kind.method = KEEP.pop()


@pytest.mark.parametrize("name", STATE)
def test_hidden_state_is_guarded(name, tmp_path):
    make, read, change = STATE[name]
    path = str(tmp_path / "file")
    write(path, "2")
    held = make(path)
    module, x = Net(held, read), torch.randn(3, 4)
    wanted = module(x)
    add_tvm_dispatch(module, x)
    for hits in (1, 2):  # nothing has changed
        torch.testing.assert_close(module(x), wanted)
        assert stats(module).hits == hits, dict(stats(module).misses)
    change(held)
    now = module.forward(x)
    assert not torch.allclose(now, wanted), "the change is one that eager sees"
    torch.testing.assert_close(module(x), now)
    assert stats(module).hits == 2 and len(stats(module).misses) == 1


# objects of classes in C that no row of the types table tells
UNKNOWN = {
    "a parser": (expat.ParserCreate, lambda h: h.GetBase()),
    "a decompressor": (zlib.decompressobj, lambda h: h.copy()),
    "a pickler": (lambda: pickle.Pickler(io.BytesIO()), lambda h: h.clear_memo()),
    "a connection": (lambda: sqlite3.connect(":memory:"), lambda h: h.getlimit(0)),
    "compared": (zlib.decompressobj, lambda h: h == [1]),
    "in an attribute": (lambda: SimpleNamespace(a=[zlib.decompressobj()]), lambda h: h.a[0].copy()),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_watched_is_refused_by_name(name):
    make, read = UNKNOWN[name]
    with pytest.raises(UnsupportedModule, match=r"attribute 'held' of the module: .* its state cannot be watched"):
        add_tvm_dispatch(Net(make(), lambda held: (read(held), 2.0)[1]), torch.randn(3, 4))


VARIABLE = contextvars.ContextVar("VARIABLE", default=0)


def start(target):
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()


COUNT = 0


def same(value):
    return value


def add_one(value):
    same(value).n += 1


def step(values):
    next(iter(values)).n += 1


def count():
    globals()["COUNT"] += 1


def more_digits():
    decimal.getcontext().prec += 1


# the held object, forward's effect on it, the result of the effect
EFFECTS = {
    "a context variable": (lambda path: VARIABLE, lambda h: h.set(h.get() + 1), lambda h: h.get()),
    "a thread": (lambda path: [], lambda h: start(lambda: h.append(1)), len),
    "a process": (lambda path: path + "q", lambda h: subprocess.run(["touch", h], check=True), os.path.exists),
    "a file": (lambda path: path + "q", write, os.path.exists),
    "an event": (lambda path: threading.Event(), lambda h: h.clear() if h.is_set() else h.set(), lambda h: h.is_set()),
    "an iterator, sliced": (lambda path: iter(range(9)), lambda h: [*itertools.islice(h, 2)], operator.length_hint),
    "an iterator, asked": (lambda path: iter(range(9)), lambda h: 5 in h, operator.length_hint),
    "a generator": (lambda path: itertools.count(), lambda h: h.__next__(), repr),
    "an ordered dictionary": (lambda path: collections.OrderedDict(), lambda h: h.update({len(h): 1}), len),
    "a logger's level": (lambda path: logging.getLogger("tests.hidden"), lambda h: h.setLevel(10), lambda h: h.level),
    "an attribute of a result": (lambda path: SimpleNamespace(n=0), add_one, lambda h: h.n),
    "an attribute of a result in C": (lambda path: [SimpleNamespace(n=0)], step, lambda h: h[0].n),
    "a global by globals()": (lambda path: None, lambda h: count(), lambda h: COUNT),
    "the decimal context": (lambda path: None, lambda h: more_digits(), lambda h: decimal.getcontext().prec),
    "the recursion limit": (
        lambda path: sys,
        lambda h: h.setrecursionlimit(h.getrecursionlimit() + 1),
        lambda h: h.getrecursionlimit(),
    ),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_effects_are_refused_and_leave_nothing(name, tmp_path):
    make, act, left = EFFECTS[name]
    held = make(str(tmp_path / "file"))
    before = left(held)
    with pytest.raises(UnsupportedModule):
        add_tvm_dispatch(Net(held, lambda held: (act(held), 2.0)[1]), torch.randn(3, 4))
    assert left(held) == before


class Scaled(torch.autograd.Function):
    scale, settings = 2.0, [2.0]

    @staticmethod
    def forward(ctx, x):
        return x * 2.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient * Scaled.scale * Scaled.settings[0]


@pytest.mark.parametrize("change", [lambda: setattr(Scaled, "scale", 3.0), lambda: Scaled.settings.__setitem__(0, 3.0)])
def test_what_a_backward_reads_is_asked_before_it_runs(change, monkeypatch):
    monkeypatch.setattr(Scaled, "scale", 2.0)
    monkeypatch.setattr(Scaled, "settings", [2.0])
    module, x = Net(None, lambda held: 1.0), torch.randn(3, 4)
    module.forward = lambda x: Scaled.apply(module.linear(x))
    add_tvm_dispatch(module, x)
    module(x).sum().backward()
    assert stats(module).hits == 1
    result = module(x).sum()
    change()
    with pytest.raises(UnsupportedModule, match="changed after forward"):
        result.backward()


class Again(Net):
    """A checkpoint with the reads of ``act``, which sets attributes."""

    def __init__(self, act):
        super().__init__({"k": 2.0}, act)
        self.k, self.last, self.inner = 2.0, None, torch.nn.Tanh()
        self.register_buffer("scale", torch.ones(4))

    def body(self, x):
        self.last = x.shape[0]
        return self.inner(self.linear(x) * self.act(self))

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) * self.act(self)


@pytest.mark.parametrize(
    ("act", "change"),
    [
        (lambda m: m.held["k"], lambda m: m.held.update(k=3.0)),
        (lambda m: m.k, lambda m: setattr(m, "k", 3.0)),
        (lambda m: 1.0, lambda m: setattr(m, "inner", torch.nn.Sigmoid())),
        (lambda m: 1.0, lambda m: setattr(m.linear, "weight", torch.nn.Parameter(m.linear.weight * 2))),
        (lambda m: 1.0, lambda m: setattr(m.linear.weight, "data", m.linear.weight.data * 2)),
        (lambda m: m.scale, lambda m: m.scale.mul_(2)),
        (lambda m: VARIABLE.get(), lambda m: VARIABLE.set(7)),
    ],
    ids=["entry", "attribute", "module", "parameter", "its memory", "buffer", "context variable"],
)
def test_what_a_checkpoint_reads_again_is_asked_before_the_backward(act, change):
    module, x, before = Again(act), torch.randn(3, 4), VARIABLE.get()
    add_tvm_dispatch(module, x)
    wanted = torch.autograd.grad(module.forward(x).sum(), module.linear.weight)
    torch.testing.assert_close(torch.autograd.grad(module(x).sum(), module.linear.weight), wanted)
    result = module(x).sum()
    assert stats(module).hits == 2, dict(stats(module).misses)
    try:
        change(module)
        with pytest.raises(UnsupportedModule, match="changed after forward"):
            result.backward()
    finally:
        VARIABLE.set(before)


def test_a_free_tensor_that_the_backward_reads_is_eagers_then():
    held = torch.full((4,), 2.0)
    module, x = Net(None, lambda _: held), torch.randn(3, 4)
    add_tvm_dispatch(module, x)
    results = module(x).sum(), module(x).sum()
    assert stats(module).hits == 2, dict(stats(module).misses)
    held.numpy()[:] = 3.0
    results[0].backward()
    torch.testing.assert_close(module.linear.bias.grad, torch.full((4,), 9.0))
    held.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        results[1].backward()


def test_no_function_that_sets_state_is_asked_again():
    """A check that called ``set_autocast_enabled`` once more left autocast off, and no call of the entry hit."""
    names = {name for module in (torch, torch._C) for name in dir(module)}
    setters = [name for name in names if re.search("(^|_)set_", name)]
    assert len(setters) > 50 and not any(is_asked("torch._C", name) for name in setters)
    assert is_asked("torch", "is_autocast_enabled") and is_asked("torch._C", "_is_torch_function_mode_enabled")


def test_what_forward_prints_is_said_once_and_printed_once(capsys, caplog):
    module = Net(None, lambda held: (print("spoken"), 2.0)[1])
    x = torch.randn(3, 4)
    with caplog.at_level(logging.WARNING, "bridge"):
        add_tvm_dispatch(module, x)
    assert capsys.readouterr().out.count("spoken") == 1
    assert sum("prints at" in record.getMessage() for record in caplog.records) == 1
    module(x)
    assert "spoken" not in capsys.readouterr().out and stats(module).hits == 1


def test_an_attribute_of_a_result_is_set_on_each():
    class Tagged(Net):
        def forward(self, x):
            result = self.linear(x)
            result.tag = 1
            return result

    module = add_tvm_dispatch(Tagged(None, None), torch.randn(3, 4))
    results = [module(torch.randn(3, 4)) for _ in range(2)]
    assert [each.tag for each in results] == [1, 1] and stats(module).hits == 2


def test_a_file_in_memory_is_no_file():
    module, x = Net("2", lambda held: float(io.StringIO(held).read())), torch.randn(3, 4)
    add_tvm_dispatch(module, x)
    module(x)
    assert stats(module).hits == 1


class Pair(Net):
    def forward(self, x, y):
        return self.linear(x) * (2.0 + self.act(x, y)) + y


def test_tensors_that_are_not_compared_may_be_the_same_object():
    """Labels may be the input tensor, in a model that hashes its input."""
    module, x = Pair(None, lambda x, y: hash(x) == 0), torch.randn(3, 4)
    add_tvm_dispatch(module, (x, x))
    for y in (x, torch.randn(3, 4)):
        torch.testing.assert_close(module(x, y), module.forward(x, y))
    assert stats(module).hits == 2, dict(stats(module).misses)
    with pytest.raises(UnsupportedModule, match="same object"):
        add_tvm_dispatch(Pair(None, lambda x, y: x is y), (x, x))
