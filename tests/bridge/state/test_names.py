"""Names that code looks up among the globals: as ``dis`` tells them."""

import argparse
import dis
import inspect
from types import CodeType

import pytest
from torch.nn import functional

from bridge.state.names import global_names

ENDINGS = ("_GLOBAL", "_NAME", "_FROM_DICT_OR_GLOBALS")


def codes(code: CodeType):
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


@pytest.mark.parametrize("module", [argparse, inspect, functional], ids=lambda module: module.__name__)
def test_look_ups_are_those_of_dis(module):
    whole = compile(inspect.getsource(module), module.__file__, "exec")
    for code in codes(whole):
        told = {
            step.argval for each in codes(code) for step in dis.get_instructions(each) if step.opname.endswith(ENDINGS)
        }
        assert set(global_names(code)) == told
