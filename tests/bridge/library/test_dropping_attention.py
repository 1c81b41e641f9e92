"""Attention with dropout inside of its kernel: eager's numbers, gradients and generator, in order; refusals.

Without a GPU: CUDA's operators are given kernels for the host, which draw from a generator with seed and offset.
"""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.export import Dim

from bridge import UnsupportedModule, add_tvm_dispatch, lower, stats
from bridge.base import generators
from bridge.capture import draws as captured_draws
from bridge.compile import CallLibrary
from bridge.library import attention
from bridge.library.attention import FORMULA, KERNELS, SUMS, Dropout
from bridge.reference import aten_graph
from bridge.rng import draws, engine
from tests.sampling import sampled, spread

pytestmark = pytest.mark.cpu("kernels for the CPU under the names of CUDA's")

SCALE, aten = 0.3, torch.ops.aten
SEED = 2**64 - 12345


class Counting:
    """A generator as a GPU's: a seed and an offset. Its numbers are of no distribution: see the formula."""

    device = torch.device("cuda", 0)

    @staticmethod
    def advance(operator, q, k):
        return 4 * q.shape[2] * k.shape[2]

    def __init__(self, seed=SEED, offset=8):
        self.seed, self.offset = seed, offset

    def initial_seed(self):
        return self.seed

    def manual_seed(self, seed):
        self.seed, self.offset = seed, 0

    def get_offset(self):
        return self.offset

    def set_offset(self, offset):
        self.offset = offset

    def get_state(self):
        return torch.tensor([self.seed, self.offset], dtype=torch.uint64)

    def set_state(self, state):
        self.seed, self.offset = state.numpy().tolist()  # forward reads no number


def kernels_of(generator):
    """Operator → forward and backward on the host; the forward moves the generator by its number of elements."""

    def forward(name, more):
        def compute(q, k, v, *rest, scale=None, **given):
            rates = [each for each in (*rest, given.get("dropout_p")) if type(each) is float]
            state = generator.get_state()
            dropout = Dropout(rates[0], state) if rates and rates[0] else None
            out, sums = FORMULA.forward(q, k, v, None, False, scale, dropout)
            generator.offset += generator.advance(name, q, k) if dropout else 0
            return out, SUMS[name](sums).float(), *more(q, state)

        return compute

    def backward(read, *more):
        def compute(grad_out, q, k, v, *rest, scale=None, **_):
            out, sums, state, rate = read(*rest)
            dropout = Dropout(rate, state)
            return *FORMULA.backward(grad_out, q, k, v, None, out, sums, False, scale, dropout), *more

        return compute

    def both(seed, offset):
        return torch.stack([seed.view(torch.uint64).reshape(()), offset.view(torch.uint64).reshape(())])

    def unsigned(q, state):
        return None, None, 5, 5, state, torch.empty((), dtype=torch.uint64), q.new_empty(0)

    none = torch.empty(0)
    yield "flash", forward("flash", unsigned)
    yield "efficient", forward("efficient", lambda q, state: state.view(torch.int64).unbind())
    yield "cudnn", forward("cudnn", lambda q, state: (None, None, 5, 5, *state.view(torch.int64).unbind(), None))
    yield "flash", backward(lambda out, sums, cq, ck, mq, mk, p, c, seed, unused: (out, sums, seed, p))
    yield "efficient", backward(lambda m, out, sums, seed, at, p, *rest: (out, sums, both(seed, at), p), none)
    yield "cudnn", backward(lambda out, sums, seed, at, m, cq, ck, mq, mk, p, c: (out, sums, both(seed, at), p))


@pytest.fixture
def generator(monkeypatch):
    """The operators' kernels on the host, and the generator that they draw from."""
    made = Counting()
    library = torch.library.Library("aten", "IMPL")
    for place, (name, compute) in enumerate(kernels_of(made)):
        direction = "" if place < len(KERNELS) else "_backward"
        library.impl(f"_scaled_dot_product_{name}_attention{direction}", compute, "CPU")
    for module in (generators, captured_draws, engine, draws, attention, aten_graph):
        monkeypatch.setattr(module, "default_generator", lambda device: made)

    def undo(before, draw_again, device):
        twin = Counting()
        twin.set_state(before)
        draw_again(twin)
        if twin.offset == made.offset:
            made.set_state(before)

    seeded = torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: made.manual_seed(seed) or seeded(seed))
    monkeypatch.setattr(draws, "undo_draws", undo)
    monkeypatch.setattr(captured_draws, "_twin", lambda device: Counting(made.seed, made.offset))
    monkeypatch.setattr(attention, "_kernel", lambda name, q: KERNELS[name])
    monkeypatch.setattr(attention, "_state_at", lambda device, dropout: dropout.state)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("bridge.dispatch.dispatcher.measure_profitability", lambda *_: None)
    yield made
    library._destroy()


CALLS = {
    "flash": lambda q, k, v, p: aten._scaled_dot_product_flash_attention(q, k, v, p, scale=SCALE)[0],
    "efficient": lambda q, k, v, p: aten._scaled_dot_product_efficient_attention(q, k, v, None, True, p, scale=SCALE)[
        0
    ],
    "cudnn": lambda q, k, v, p: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, p, scale=SCALE)[0],
}


class Layers(nn.Module):
    """Three attentions: the second's result is unused, one has another rate."""

    def __init__(self, kernel, rate=0.3):
        super().__init__()
        self.kernel, self.rate, self.linear = kernel, rate, nn.Linear(8, 8)

    def forward(self, q, k, v):
        call = CALLS[self.kernel]
        x = self.linear(call(q, k, v, self.rate))
        call(q, k, v, self.rate)
        return torch.tanh(call(x, k * 2, v, 0.5))


def tensors():
    made = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 5, 8, generator=made, dtype=torch.float64).requires_grad_() for _ in range(3)]


def step(module, generator, leaves=None):
    leaves = tensors() if leaves is None else leaves
    y = module(*leaves)
    found = torch.autograd.grad(y.square().sum(), [*leaves, module.linear.weight])
    return [y.detach(), *found, generator.get_state().view(torch.int64)]


@pytest.mark.parametrize("partition", sampled(["min_cut", "recompute_all"], ["min_cut"]))
@pytest.mark.parametrize("name", KERNELS)
def test_numbers_gradients_and_generator_are_eagers(name, partition, generator):
    torch.manual_seed(0)
    module, eager = Layers(name).double(), Layers(name).double()
    eager.load_state_dict(module.state_dict())
    generator.__init__()
    add_tvm_dispatch(module, tuple(tensors()), partition=partition)
    assert (generator.seed, generator.offset) == (SEED, 8), "adding the dispatch moved the generator"
    wanted = [step(eager, generator) for _ in range(3)]
    generator.__init__()
    found = [step(module, generator) for _ in range(3)]
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    assert stats(module).hits == 3 and not stats(module).misses
    assert not torch.equal(found[0][0], found[1][0])
    (entry,) = stats(module).entries
    names = [step.name for step in entry.forward.steps if isinstance(step, CallLibrary)]
    assert names.count("dropping_attention") == 2, names
    (drawn,) = (str(step) for step in entry.steps if step.kind == "draws")
    assert drawn.count("the state for _scaled_dot_product") == 3 and drawn.count("unused") == 1, drawn


@pytest.mark.parametrize("name", KERNELS)
def test_a_seed_that_changes_before_the_backward_does_not_matter(name, generator):
    module = Layers(name).double()
    add_tvm_dispatch(module, tuple(tensors()), partition="recompute_all")
    grads = []
    for seed in (SEED, 3):
        generator.__init__()
        leaves = tensors()
        y = module(*leaves)
        generator.manual_seed(seed)
        state = generator.get_state()
        grads.append(torch.autograd.grad(y.sum(), leaves))
        assert torch.equal(generator.get_state().view(torch.int64), state.view(torch.int64))
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_the_stages_agree_with_each_other(generator):
    found = lower(Layers("efficient").double(), tuple(tensors())).check()
    assert found.ok, found


def test_a_kernel_that_moves_the_generator_otherwise_is_a_miss(generator):
    """The call runs eager, from the generator's state before it."""
    module, eager = Layers("flash").double(), Layers("flash").double()
    eager.load_state_dict(module.state_dict())
    add_tvm_dispatch(module, tuple(tensors()))
    generator.advance = lambda operator, q, k: 200
    wanted = step(eager, generator)
    generator.__init__()
    torch.testing.assert_close(step(module, generator), wanted, rtol=0, atol=0)
    assert "moved the generator by 200, where eager's moved it by 100" in str(stats(module).misses)


class Masked(Layers):
    """Eager asks whether anything is masked, which chooses the kernel; a traced forward does not ask."""

    def forward(self, q, k, v):
        if not torch.compiler.is_compiling() and self.is_masked(q):
            return self.linear(CALLS["efficient"](q.nan_to_num() + 1, k, v, self.rate))
        return self.linear(CALLS["flash"](q, k, v, self.rate))

    def is_masked(self, q):
        return q.isnan().any()


def test_a_kernel_that_numbers_choose_where_they_are_not_traced_is_the_one_that_eager_takes(generator):
    """Each value of the number is an entry with eager's kernel and draws."""
    module, eager = Masked("flash").double(), Masked("flash").double()
    eager.load_state_dict(module.state_dict())
    plain, masked = tensors(), tensors()
    masked[0] = masked[0].detach().index_fill(0, torch.tensor(0), torch.nan).requires_grad_()
    add_tvm_dispatch(module, tuple(plain), on_miss="compile")
    for leaves in (plain, masked, plain, masked):
        before = generator.get_state()
        wanted = step(eager, generator, leaves)
        generator.set_state(before)
        torch.testing.assert_close(step(module, generator, leaves), wanted, rtol=1e-10, atol=1e-12)
    assert stats(module).hits == 4 and [entry.readings[0].value for entry in stats(module).entries] == [False, True]


class Biased(Layers):
    """Eager takes another kernel than the traced one; in half types its masks alone do not show the difference."""

    def forward(self, q, k, v):
        name = "efficient" if torch.compiler.is_compiling() else "flash"
        return self.linear(CALLS[name](q, k, v, self.rate) * 0.01 + 1)


def test_the_kernel_of_eagers_branch_is_taken_where_numbers_hardly_differ(generator):
    generator.advance = lambda operator, q, k: {"flash": 8, "efficient": 24}[operator]
    module, leaves = Biased("flash").bfloat16(), [leaf.detach().bfloat16() for leaf in tensors()]
    add_tvm_dispatch(module, tuple(leaves))
    module(*leaves)
    assert stats(module).hits == 1 and generator.offset == 16
    (drawn,) = (str(step) for step in stats(module).entries[0].steps if step.kind == "draws")
    assert "flash" in drawn and "efficient" not in drawn


class Selected(Masked):
    def is_masked(self, q):
        return bool(q.unique().numel() > 10**9)


def test_a_kernel_that_is_chosen_by_what_cannot_be_traced_is_refused(generator):
    with pytest.raises(UnsupportedModule, match="the shape of a result depends on the numbers"):
        add_tvm_dispatch(Selected("flash").double(), tuple(tensors()))


def sized(batch, length):
    made = torch.Generator().manual_seed(batch + length)
    shape = batch, 3, length, 8
    return [torch.randn(shape, generator=made, dtype=torch.float64).requires_grad_() for _ in range(3)]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="shape functions of older versions fix the sizes")
@pytest.mark.parametrize("name", sampled(KERNELS, spread(KERNELS, 3)))
def test_sizes_that_vary(name, generator):
    """One entry for all sizes, if the kernel moves its generator by the rule."""
    generator.advance = captured_draws.attention_advance
    module, eager = Layers(name).double(), Layers(name).double()
    eager.load_state_dict(module.state_dict())
    batch, length = Dim("batch"), Dim("length")
    add_tvm_dispatch(module, tuple(sized(2, 5)), dynamic_shapes=({0: batch, 2: length},) * 3)
    found = []
    for each in (eager, module):
        generator.__init__()
        found.append([step(each, generator, sized(*sizes)) for sizes in ((2, 5), (3, 7), (2, 6), (5, 9))])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
    assert stats(module).hits == 4 and len(stats(module).entries) == 1, stats(module)


def test_another_rule_is_refused_for_sizes_that_vary(generator):
    generator.advance = lambda operator, q, k: 4 * q.numel()
    with pytest.raises(UnsupportedModule, match="known for the sample's sizes alone"):
        add_tvm_dispatch(Layers("flash").double(), tuple(tensors()), dynamic_shapes=({0: Dim("n")},) * 3)


def test_by_keyword(generator):
    """The rate may be given by its name."""

    class Named(nn.Module):
        def forward(self, q, k, v):
            return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p=0.4, scale=SCALE)[0]

    module, leaves = Named(), tensors()
    add_tvm_dispatch(module, tuple(leaves))
    wanted = Named()(*leaves)
    generator.__init__()
    torch.testing.assert_close(module(*leaves), wanted)
    assert stats(module).hits == 1 and generator.offset == 108


def test_threads_draw_one_after_the_other(generator):
    """No two calls get the same numbers, and the generator moves by all of them."""
    module = Layers("flash").double()
    add_tvm_dispatch(module, tuple(tensors()))
    generator.__init__()
    found = []

    def draw():
        for _ in range(5):
            found.append(module(*tensors()).detach())

    threads = [threading.Thread(target=draw) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (generator.seed, generator.offset) == (SEED, 8 + 15 * 300)
    alone = []
    generator.__init__()
    for _ in range(15):
        alone.append(module(*tensors()).detach())
    assert sorted(y.sum().item() for y in found) == sorted(y.sum().item() for y in alone)
