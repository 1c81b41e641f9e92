"""Chains: a product, rows and a product as one kernel, with the bits of three, if quicker and without gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, explain
from bridge.base.session import SESSION
from bridge.compile import host_backend
from bridge.compile.cpu.gemm_tile import register_tile
from bridge.compile.cpu.products import CpuProducts
from bridge.compile.passes import chains
from bridge.compile.runtime import link
from bridge.compile.runtime.instructions import Launch
from tests.sampling import sampled

pytestmark = pytest.mark.skipif(
    register_tile(host_backend().target) is None, reason="no products are generated for this processor"
)


class Attention(nn.Module):
    """Scores, ``rows`` of them, and their product with the values; heads lie side by side as layers make them."""

    def __init__(self, heads, rows):
        super().__init__()
        self.heads, self.rows = heads, rows
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, q, k, v, *masks):
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        scores = q @ k.transpose(-1, -2) * self.scale
        return (self.rows(scores, *masks) @ v).transpose(1, 2).flatten(2)


def plain(scores):
    return scores.softmax(-1)


def added(scores, mask):
    return (scores + mask).softmax(-1)


def filled(scores, mask):
    return scores.masked_fill(mask, -math.inf).softmax(-1)


@pytest.fixture
def times(monkeypatch):
    """Sets the seconds of chains and of their steps; small attentions are also tried."""

    def clear():
        SESSION.reset("programs", "choices", "lowerings")

    def say(steps: float, chain: float) -> None:
        clear()
        monkeypatch.setattr(chains, "_SMALLEST", 1)
        monkeypatch.setattr(CpuProducts, "seconds_of_chain", lambda *_: {"steps": steps, "chain": chain})

    yield say
    clear()


def inputs(batch, rows, others, heads, size, columns=None, dtype=torch.float32):
    shapes = (rows, heads * size), (others, heads * size), (others, heads * (columns or size))
    return [torch.randn(batch, *shape, dtype=dtype) for shape in shapes]


def launched(module) -> list[Launch]:
    (entry,) = explain(module).entries
    (report,) = entry.programs
    return [step for step in report.program.steps if isinstance(step, Launch)]


def chains_of(module) -> int:
    return sum(step.ops.count("matmul") == 2 for step in launched(module))


def answer(module, *given):
    with torch.no_grad():
        return add_tvm_dispatch(module, given, freeze=True)(*given)


def closer(module, given, found):
    """Whether it is as close to float64's answer as eager's is, within a few roundings."""
    exact = module.double()(*(each.double() if each.is_floating_point() else each for each in given))
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("threads", "batch", "rows", "others", "heads", "size", "columns"),
    sampled(
        [
            (1, 1, 33, 33, 3, 16, None),
            (2, 1, 33, 33, 3, 16, None),
            (2, 2, 14, 70, 5, 8, 24),
            (1, 3, 1, 19, 2, 5, 3),
            (3, 1, 131, 300, 1, 65, 33),
            (2, 2, 29, 64, 2, 64, 64),
        ],
        [(2, 2, 14, 70, 5, 8, 24), (1, 3, 1, 19, 2, 5, 3), (3, 1, 131, 300, 1, 65, 33)],
    ),
)
def test_numbers(times, threads, batch, rows, others, heads, size, columns):
    times(1.0, 0.1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        module, given = Attention(heads, plain), inputs(batch, rows, others, heads, size, columns)
        found = answer(module, *given)
        assert chains_of(module) == 1
        closer(module, given, found)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("kind", "shape", "dtype"),
    sampled(
        [
            ("added", (2, 1, 1, 40), torch.float32),
            ("added", (1, 1, 31, 40), torch.float64),
            ("filled", (2, 1, 1, 40), torch.float64),
            ("filled", (2, 3, 31, 40), torch.float32),
        ],
        lambda case: case[:2] != ("filled", (2, 1, 1, 40)),
    ),
)
def test_masks(times, kind, shape, dtype):
    """Masks of a batch, of all heads, of each score; fully masked rows equal eager's."""
    times(1.0, 0.1)
    module = Attention(3, added if kind == "added" else filled).to(dtype)
    given, hidden = inputs(2, 31, 40, 3, 16, dtype=dtype), torch.rand(shape) < 0.3
    hidden[0, 0, 0] = True
    mask = hidden if kind == "filled" else torch.zeros(shape, dtype=dtype).masked_fill(hidden, -math.inf)
    found = answer(module, *given, mask)
    assert chains_of(module) == 1
    assert found.isnan().any()
    wanted = module(*given, mask)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_scaled_dot_product(times):
    """torch's own function, with a mask one row of which hides everything: zeros, as eager answers."""
    times(1.0, 0.1)

    def attend(q, k, v, mask):
        heads = (x.unflatten(-1, (3, -1)).transpose(1, 2) for x in (q, k, v))
        return nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2)

    class Sdpa(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Parameter(torch.ones(1))

        def forward(self, q, k, v, mask):
            return attend(q, k, v, mask) * self.one

    module, given = Sdpa(), inputs(2, 31, 40, 3, 16)
    mask = torch.rand(2, 1, 31, 40) < 0.5
    mask[1, 0, 3] = False
    found = answer(module, *given, mask)
    assert chains_of(module) == 1
    torch.testing.assert_close(found, module(*given, mask), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", sampled([torch.float32, torch.float64], [torch.float32]))
def test_bits_of_three_kernels(times, monkeypatch, dtype):
    """The same products and the same rows, each as a kernel of its own; two chunks of ``k``."""
    found = {}
    for joins in (True, False):
        times(1.0, 0.1)
        if not joins:
            monkeypatch.setattr(link, "chained", lambda steps, *_: steps)
        torch.manual_seed(0)
        module, given = Attention(3, plain).to(dtype), inputs(2, 45, 300, 3, 16, dtype=dtype)
        found[joins] = answer(module, *given)
        assert chains_of(module) == joins
    assert torch.equal(found[True], found[False])


def test_uses_of_one_kernel(times):
    """Layers of one shape share it: it reads other addresses."""
    times(1.0, 0.1)

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Attention(2, plain), Attention(2, plain)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x, x + 1, x)
            return x

    module, x = Layers(), torch.randn(2, 31, 32)
    found = answer(module, x)
    steps = [step.name for step in launched(module) if step.ops.count("matmul") == 2]
    assert len(steps) == 2 and len(set(steps)) == 1
    closer(module, [x], found)


class Kept(Attention):
    def forward(self, q, k, v):
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        weights = (q @ k.transpose(-1, -2) * self.scale).softmax(-1)
        return weights @ v, weights


class Grouped(Attention):
    """All heads read one head's keys."""

    def forward(self, q, k, v):
        q = q.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        weights = (q @ k.unsqueeze(1).transpose(-1, -2) * self.scale).softmax(-1)
        return weights @ v.unsqueeze(1)


class AcrossRows(Attention):
    """A softmax over the other axis, which needs more than a row of scores."""

    def forward(self, q, k, v):
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        return (q @ k.transpose(-1, -2) * self.scale).softmax(-2) @ v


class WithoutRows(Attention):
    """Element-wise operators without a reduction."""

    def __init__(self, heads, _rows):
        super().__init__(heads, torch.tanh)


@pytest.mark.parametrize("kind", [Kept, Grouped, AcrossRows, WithoutRows])
def test_others_stay_steps(times, kind):
    times(1.0, 0.1)
    module, given = kind(2, plain), inputs(2, 31, 40, 2, 16)
    if kind is Grouped:
        given[1:] = [each[..., :16] for each in given[1:]]
    found = answer(module, *given)
    assert chains_of(module) == 0
    torch.testing.assert_close(found, module(*given), rtol=1e-5, atol=1e-6)


def test_slower_chains_stay_steps(times):
    times(1.0, 0.99)
    module, given = Attention(2, plain), inputs(2, 31, 40, 2, 16)
    found = answer(module, *given)
    assert chains_of(module) == 0
    closer(module, given, found)


def test_a_trial_decides(times, monkeypatch):
    """A trial times both candidates, programs of the chain alone with equal results."""
    times(1.0, 0.1)
    seen = []

    def measure(policy, make):
        runs = make()
        found = [run() for run in runs.values()]
        torch.testing.assert_close(*found)
        seen.append(set(runs))
        return {"steps": 1.0, "chain": 0.1}

    monkeypatch.setattr(CpuProducts, "seconds_of_chain", measure)
    module, given = Attention(2, added), [*inputs(2, 31, 40, 2, 16), torch.randn(2, 1, 1, 40)]
    found = answer(module, *given)
    assert seen == [{"steps", "chain"}]
    assert chains_of(module) == 1
    torch.testing.assert_close(found, module(*given), rtol=1e-5, atol=1e-6)


def test_training_has_none(times):
    """Where gradients are asked for, the way of a product follows from its shape alone."""
    times(1.0, 0.1)
    module, given = Attention(2, plain), inputs(2, 31, 40, 2, 16)
    wanted = torch.autograd.grad(module(*given).sum(), module.scale)
    add_tvm_dispatch(module, given)
    found = torch.autograd.grad(module(*given).sum(), module.scale)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    (entry,) = explain(module).entries
    steps = [step for report in entry.programs for step in report.program.steps]
    assert steps
    assert not any(step.ops.count("matmul") > 1 for step in steps if isinstance(step, Launch))


def test_deterministic_algorithms_have_none(times):
    times(1.0, 0.1)
    torch.use_deterministic_algorithms(True)
    try:
        module, given = Attention(2, plain), inputs(2, 31, 40, 2, 16)
        answer(module, *given)
        assert chains_of(module) == 0
    finally:
        torch.use_deterministic_algorithms(False)
