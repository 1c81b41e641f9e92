"""Refusals around the conversion of operators: element types of inputs, computed draws without a use."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch
from tests.bridge.compare import Function

FLOAT8 = torch.ones(3).to(torch.float8_e5m2)


def _bernoulli_unused(x):
    torch.bernoulli(x.sigmoid())
    return x


def _multinomial_unused(x):
    y = F.dropout(x)
    torch.multinomial(torch.full((4,), 0.25), 2)
    return y


CASES = {
    "argument": (lambda x, y: x * y.float(), (FLOAT8,), "argument 1: values of type torch.float8_e5m2"),
    "unused argument": (
        lambda x, y: x * 2,
        (torch.ones(3).to(torch.uint16),),
        "argument 1: values of type torch.uint16",
    ),
    "literal": (
        lambda x: x * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float8_e5m2).float(),
        (),
        "literal: values of type torch.float8_e5m2",
    ),
    "bernoulli": (_bernoulli_unused, (), r"\(aten.bernoulli.default\) whose distribution is computed"),
    "multinomial": (_multinomial_unused, (), r"\(aten.multinomial.default\) whose distribution is computed"),
}

DRAWN = ("bernoulli", "multinomial")


MOVES = pytest.mark.cpu("what an unused draw of a GPU computes does not decide how far it moves the generator")


@pytest.mark.parametrize("name", [pytest.param(n, marks=MOVES) if n in DRAWN else n for n in CASES])
def test_refused(name):
    function, rest, reason = CASES[name]
    with pytest.raises(UnsupportedModule, match=reason):
        add_tvm_dispatch(Function(function), (torch.randn(2, 3), *rest))


def test_a_buffer_is_refused_by_its_name():
    module = nn.Linear(3, 3)
    module.register_buffer("coded", FLOAT8)
    with pytest.raises(UnsupportedModule, match=r"coded: values of type torch.float8_e5m2"):
        add_tvm_dispatch(module, (torch.randn(2, 3),))
