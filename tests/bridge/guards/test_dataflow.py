"""Data flow of bytecode: the height of the stack is the interpreter's, and an object found in any way is watched."""

from __future__ import annotations

import ast
import asyncio.base_events
import copy
import difflib
import functools
import inspect
import operator
import types

import pytest
import torch

from bridge import add_tvm_dispatch, stats
from bridge.capture import record_call
from bridge.guards import Reads, dataflow
from bridge.state import SampleCall


def codes(code):
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from codes(each)


@pytest.mark.parametrize("module", [ast, asyncio.base_events, difflib, inspect], ids=lambda each: each.__name__)
def test_the_stack_is_as_high_on_each_way(module, monkeypatch):
    others = []

    def merge(self, index, stack, merge=dataflow._Interpreter._merge):
        height = len(self.states.get(index, stack))
        if height != len(stack):
            each = self.instructions[index]
            others.append(f"{self.code.co_qualname} at {each.offset} ({each.opname}): {height}, {len(stack)}")
        return merge(self, index, stack)

    monkeypatch.setattr(dataflow._Interpreter, "_merge", merge)
    with open(module.__file__) as file:
        for code in codes(compile(file.read(), module.__file__, "exec")):
            dataflow._Interpreter(code).run()
    assert not others


class Base:
    k = 2.0


class Kind(Base):
    @staticmethod
    def get():
        return Base.k


class Slots:
    __slots__ = ("k",)


def key(number):
    return f"b{number}"


def held(value):
    found = Slots()
    found.k = value
    return found


KEYS = "k = 'a'\nif self.flag: "
# the way to the value that forward reads, its result; both names in G are 2., then 7.
FOUND = {
    **{
        name: (f"{KEYS}{code}", "G[k]")
        for name, code in {
            "f-string": "k = f'b{self.n}'",
            "slice": "k = 'xb3'[1:]",
            "method": "k = 'B3'.lower()",
            "negative": "k = -self.n",
            "comparison": "k = self.n == 3",
            "tuple": "k = ('a', self.n)",
            "unpacked": "k, j = ['b3', 1]",
            "loop": "\n  for k in ('a', 'b3'): pass",
            "enumerated": "\n  for k, j in enumerate('abcd'): pass",
            "shape": "k = x.shape[0]",
            "int": "k = int('3')",
            "entry": "k = {'q': 'b3'}['q']",
            "deleted": "del k; k = f'b{self.n}'",
        }.items()
    },
    "assigned by an inner function": ("k = 'a'\ndef put():\n  nonlocal k\n  k = 'b' + str(self.n)\nput()", "G[k]"),
    "local dictionary": ("d = {'a': H[0]}; d['b'] = H[1]", "d['b'].k"),
    "local list": ("d = []; d.append(H[0]); d.append(H[1])", "d[-1].k"),
    "local object": ("d = SimpleNamespace(); d.q = H[1]", "d.q.k"),
    "many keys": ("t = 0.0\nfor i in range(300): t += G.get(key(i), 1.0)", "t"),
    "many entries": ("t = 0.0\nfor i in range(303): t += G[key(302 - i)]", "t"),
    "copied slots": ("k = copy.copy(H[1])", "k.k"),
    "class of a new object": ("", "Kind().k"),
    "static method of a new object": ("", "Kind().get()"),
    "new object without a call": ("", "Kind.__new__(Kind).k"),
    "new object by a partial": ("", "functools.partial(Kind)().k"),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_found_in_another_way_is_watched(name, monkeypatch):
    body, result = FOUND[name]
    names = ["a", "b", "b3", 3, -3, True, ("a", 3)]
    used = {"copy": copy, "functools": functools, "SimpleNamespace": types.SimpleNamespace}
    space = {**globals(), **used, "G": dict.fromkeys([*names, *map(key, range(303))], 2.0), "H": [held(2.0), held(2.0)]}
    text = "".join(f"    {line}\n" for line in f"{body}\nreturn x * {result}".split("\n"))
    exec(f"def forward(self, x):\n{text}", space)
    module, x = type("Found", (torch.nn.Module,), {"forward": space["forward"]})(), torch.ones(3)
    module.flag, module.n = True, 3
    add_tvm_dispatch(module, x)
    wanted = module.forward(x)
    torch.testing.assert_close(module(x), wanted)
    assert stats(module).hits == 1, dict(stats(module).misses)
    space["G"].update(dict.fromkeys(names[1:], 7.0))
    space["H"][1].k = 7.0
    monkeypatch.setattr(Base, "k", 7.0)
    assert not torch.equal(module.forward(x), wanted)
    torch.testing.assert_close(module(x), module.forward(x))


@pytest.mark.parametrize(
    "kind, args",
    [(functools.partial, "Kind, other"), (operator.methodcaller, "'get', other"), (operator.itemgetter, "other")],
)
def test_an_object_that_binds_arguments_is_made_once_for_all_looks(kind, args, monkeypatch):
    counts, look = [], Reads._look_at

    def count(reads, frame, flow):
        look(reads, frame, flow)
        counts.append(max(map(len, frame.calls.results.values()), default=0))

    monkeypatch.setattr(Reads, "_look_at", count)
    space = {**globals(), "kind": kind}
    body = f"other = Kind\n  for _ in range(3): other = functools.partial(kind, {args})()\n  return x * 2.0"
    exec(f"def forward(self, x):\n  {body}", space)
    module = type("Binds", (torch.nn.Module,), {"forward": space["forward"]})()
    record_call(SampleCall(module, (torch.ones(3),), {}))
    assert 0 < max(counts) < 8
