"""Functions of torch that a user has replaced, before ``bridge`` is imported or after: kernels are torch's own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import bridge
from bridge.base.torch_internals import VF
from tests.bridge.test_import import fresh

SCRIPT = """
import torch
from torch import nn
{first}

def twice(old):
    def replaced(*args, **kwargs):
        made = old(*args, **kwargs)
        return 2 * made if isinstance(made, torch.Tensor) else type(made)([2 * made[0], *made[1:]])
    return replaced

for name in "index_select sort topk max cummax cat mm addmm erfc atan2 fmod div gather zeros softmax".split():
    setattr(torch, name, twice(getattr(torch, name)))
nn.functional.linear = twice(nn.functional.linear)

from bridge import add_tvm_dispatch, stats

class Replaced(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        h = self.inner(x)
        at = torch.tensor([2, 0])
        parts = [torch.index_select(h, 0, at), h[at].sort(1)[0], torch.sort(h, 1)[0], h.cummax(1)[0], torch.mm(h, h)]
        parts += [torch.max(h, 1)[0][:, None] * x, torch.atan2(h, x), h.fmod(x), torch.div(h, x, rounding_mode="floor")]
        return torch.cat([*parts, torch.topk(h, 2)[0].repeat(1, 2)]) + torch.erfc(h[:1])

torch.manual_seed(0)
module, x = Replaced().double(), torch.rand(4, 4).double() + 0.5
ran = []
for dispatched in (False, True):
    if dispatched:
        add_tvm_dispatch(module, x.clone().requires_grad_())
    given = x.clone().requires_grad_()
    out = module(given)
    out.square().sum().backward()
    ran.append([out, given.grad, *(each.grad for each in module.parameters())])
    module.zero_grad(set_to_none=True)
assert stats(module).hits == 1
for expected, found in zip(*ran, strict=True):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
"""


@pytest.mark.parametrize("first", ["", "import bridge.library, bridge.dispatch"], ids=["before", "after"])
def test_a_replaced_function_is_applied_once(first):
    fresh(SCRIPT.format(first=first))


ROOM = Path(bridge.__file__).parent
FILES = [path for room in ("library", "compile", "rng", "dispatch") for path in sorted((ROOM / room).rglob("*.py"))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOM)))
def test_no_function_that_can_be_replaced_is_called(path):
    of_torch = [
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch"
    ]
    asked = {"promote_types", "result_type", "can_cast"}
    assert [n for n in of_torch if n not in asked and getattr(torch, n, None) is getattr(VF, n, VF)] == []
