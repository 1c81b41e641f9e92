"""Functions of torch that a user has replaced, before ``bridge`` is imported or after: kernels are torch's own."""

from __future__ import annotations

import ast
import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bridge
from bridge import add_tvm_dispatch, stats
from bridge.base.modes import replaced
from bridge.base.torch_internals import VF
from bridge.capture.thread_isolation import replacements
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

names = "index_select sort topk max cummax cat mm addmm erfc atan2 fmod div gather zeros softmax narrow tensor_split"
for name in names.split():
    setattr(torch, name, twice(getattr(torch, name)))
nn.functional.linear = twice(nn.functional.linear)
torch.Tensor.__getitem__ = twice(torch.Tensor.__getitem__)  # CPython has another kind of sequence from then on

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
        places = torch.tensor([1, 3])
        parts += [torch.narrow(h, 0, places[0], 2), torch.tensor_split(h, places)[1]]
        parts += [h[x > 0.9].sum() + h[1] + h[:1] + h[torch.tensor(2)]]
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


def _attended(h, x):
    return F.scaled_dot_product_attention(h[None, None], x[None, None], x[None, None])


REPLACED = {
    "a composite operator": ("torch.cat", lambda h, x: torch.stack([h, x])),
    "a loss": ("torch.log_softmax", lambda h, x: F.cross_entropy(h, torch.tensor([0, 3, 1, 2]))),
    "a method of a decomposition": ("torch.Tensor.__sub__", lambda h, x: F.huber_loss(h, x)),
    "a function in C": ("torch.nn.functional.gelu", lambda h, x: F.gelu(h)),
    "a function in Python": ("torch.nn.functional.softmax", lambda h, x: F.softmax(h, -1)),
    "inside another one": ("torch.nn.functional.relu", lambda h, x: nn.ReLU()(h)),
    "with keywords": ("torch.nn.functional.layer_norm", lambda h, x: F.layer_norm(h, (4,), eps=1e-3)),
    "a loss in Python": ("torch.nn.functional.mse_loss", lambda h, x: F.mse_loss(h, x, reduction="sum")),
    "attention": ("torch.nn.functional.scaled_dot_product_attention", _attended),
    "an embedding": ("torch.nn.functional.embedding", lambda h, x: F.embedding(torch.tensor([0, 2]), h)),
    "of torch.functional": ("torch.norm", lambda h, x: torch.norm(h)),
    "a method in C": ("torch.Tensor.sum", lambda h, x: (h @ x).sum()),
    "an operator": ("torch.Tensor.__sub__", lambda h, x: (h - x).abs()),
    "a method in Python": ("torch.Tensor.norm", lambda h, x: h.norm()),
    "behind a function in another form": ("torch.max_pool1d", lambda h, x: F.max_pool1d(h[None], 2)),
}


@pytest.mark.parametrize("kind", REPLACED)
def test_a_replacement_is_applied_as_often_as_in_eager(kind):
    """Not by torch's decompositions, nor once more where torch announces a function to a mode by its public name."""
    path, compute = REPLACED[kind]
    owner, _, name = path.rpartition(".")
    owner = eval(owner)
    own = getattr(owner, name)

    class Computed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return compute(self.inner(x), x)

    torch.manual_seed(0)
    eager, x = Computed().double(), torch.rand(4, 4).double()
    module, plain = copy.deepcopy(eager), compute(eager.inner(x), x)
    with replaced(owner, **{name: lambda *args, **kwargs: 2 * own(*args, **kwargs)}):
        replacement = getattr(owner, name)
        add_tvm_dispatch(module, x)
        found, expected = module(x), eager(x)
        assert stats(module).hits == 1 and getattr(owner, name) is replacement
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert kind in ("a composite operator", "a loss", "a method of a decomposition") or not torch.equal(found, plain)
    gradients = [torch.autograd.grad(each.sum(), of.parameters()) for each, of in ((found, module), (expected, eager))]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.cpu("the suite of a GPU replaces torch's factories itself")
def test_nothing_is_put_back_where_nothing_is_replaced():
    """Functions of Python's that torch holds by its names are no replacements."""
    assert replacements() == {}


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
