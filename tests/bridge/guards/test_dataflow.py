"""Data flow of bytecode: on each way to an instruction, the stack is as high as the interpreter's."""

from __future__ import annotations

import ast
import asyncio.base_events
import difflib
import inspect
import types

import pytest

from bridge.guards import dataflow


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
