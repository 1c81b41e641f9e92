"""Arguments that forward writes in place: the caller's tensors get eager's values, and no other memory is written."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bridge import UnsupportedModule, add_tvm_dispatch, lower, stats
from tests.bridge.compare import Function
from tests.device import moved
from tests.sampling import sampled


def numbers(*shape):
    return moved(torch.randn(*shape, dtype=torch.float64))


def counted(x, count):
    count.add_(1)
    return x * count


def cached(x, cache, place):
    """A cache of keys that is passed in: one position is written, all are read."""
    cache[:, 1:3] = x.detach()
    return (x @ cache.mT).softmax(-1) @ cache, cache[0]


def read_before_and_after(x, state):
    before = x * state.clone()
    state.mul_(0.5)
    state[0] += 1
    return before + x * state


def through_views(x, state):
    state.t()[0].fill_(2)
    state.view(-1)[-1] = 3
    return x.sum() * state, state


def of_what_autograd_follows(x, state):
    with torch.no_grad():
        state.lerp_(x.mean(0), 0.1)
    return x - state


def normalized(x, mean, variance):
    return F.batch_norm(x, mean, variance, training=True, momentum=0.2)


def of_images(x, mean, variance):
    return F.instance_norm(x, mean, variance, use_input_stats=True)


USES = {
    "a counter": (counted, lambda: (numbers(3), moved(torch.tensor(2)))),
    "a cache": (cached, lambda: (numbers(2, 2, 4), numbers(2, 5, 4), None)),
    "read before and after": (read_before_and_after, lambda: (numbers(3, 4), numbers(3, 4))),
    "through views": (through_views, lambda: (numbers(3, 4), numbers(3, 4))),
    "in other strides": (read_before_and_after, lambda: (numbers(3, 4), numbers(4, 3).t())),
    "part of the caller's tensor": (read_before_and_after, lambda: (numbers(3, 4), numbers(6, 4)[1:4])),
    "of what autograd follows": (of_what_autograd_follows, lambda: (numbers(3, 4), numbers(4))),
    "running statistics": (normalized, lambda: (numbers(5, 3, 2), numbers(3), numbers(3).abs())),
    "statistics of images": (of_images, lambda: (numbers(5, 3, 4), numbers(3), numbers(3).abs())),
}


def called(module, x, *others):
    """The results of two calls, their arguments afterwards, and the gradient of the first argument."""
    x = x.clone().requires_grad_()
    others = [copy.deepcopy(each) if each is None else _with_its_memory(each) for each in others]
    found = []
    for _ in range(2):
        result = module(x, *others)
        leaves = [result] if isinstance(result, torch.Tensor) else [*result]
        found += [each.detach().clone() for each in leaves]
        (gradient,) = torch.autograd.grad(sum(each.sin().sum() for each in leaves), x)
        found.append(gradient)
    return found, [each if each is None or each._base is None else each._base for each in others], others


def _with_its_memory(tensor):
    """A copy of a tensor inside a copy of its whole storage."""
    if tensor._base is None:
        return tensor.clone()
    return tensor._base.clone().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@pytest.mark.composes(
    "tensors that are passed in and written in place (running statistics, a cache)",
    "works where autograd does not follow the written values; refused by name where it does",
    section="The module stays the user's",
)
@pytest.mark.parametrize("use", sampled(USES, lambda use: use != "statistics of images"))
def test_the_callers_tensor_gets_eagers_values(use):
    function, make = USES[use]
    module = Function(function)
    x, *others = sample = make()
    before = [each.clone() if each is not None else None for each in sample]
    counts = [None if each is None else each._version for each in sample]
    add_tvm_dispatch(module, (x.clone().requires_grad_(), *others))
    for now, then, count in zip(sample, before, counts, strict=True):
        assert now is then is None or (torch.equal(now, then) and now._version == count)
    mine, bases, given = called(module, *sample)
    eagers, others_bases, others_given = called(Function(function), *sample)
    torch.testing.assert_close(mine, eagers, rtol=1e-10, atol=1e-12)
    tensors = [[each for each in some if each is not None] for some in (bases, given, others_bases, others_given)]
    torch.testing.assert_close(tensors[0], tensors[2], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(tensors[1], tensors[3], rtol=1e-10, atol=1e-12)
    assert stats(module).hits == 2
    assert lower(Function(function), (x.clone().requires_grad_(), *others)).check().ok


class Holder(nn.Module):
    def __init__(self, written):
        super().__init__()
        self.tensor, self.listed, self.written = numbers(4), [numbers(4)], written
        self.weight = nn.Parameter(numbers(4))

    def forward(self, x):
        with torch.no_grad():
            self.written(self, x)
        return x * self.tensor * self.listed[0] * self.weight


WRITTEN = {
    "the argument": (lambda m, x: x.mul_(2), lambda m, x: x),
    "the argument, in a list": (lambda m, x: torch._foreach_mul_([x], 2.0), lambda m, x: x),
    "a parameter": (lambda m, x: m.weight.mul_(2), lambda m, x: m.weight),
    "a plain tensor": (lambda m, x: m.tensor.mul_(2), lambda m, x: m.tensor),
    "a tensor in a list": (lambda m, x: m.listed[0].mul_(2), lambda m, x: m.listed[0]),
    "the argument's data": (lambda m, x: x.data.mul_(2), lambda m, x: x),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_an_earlier_graph_that_saved_what_a_call_writes_fails_as_in_eager(name):
    """Autograd compares version counters: a compiled call moves the ones that eager's moves."""
    written, read = WRITTEN[name]

    def fails(module):
        x, factor = numbers(3, 4), numbers(4).requires_grad_()
        earlier = (read(module, x).detach() * factor).sum()
        module(x)
        try:
            earlier.backward()
        except RuntimeError as error:
            return "modified by an inplace operation" in str(error)
        return False

    module = Holder(written)
    add_tvm_dispatch(module, numbers(3, 4))
    assert fails(module) == fails(Holder(written)) == (name != "the argument's data")
    assert stats(module).hits == 1


def test_a_result_that_is_the_argument():
    module = add_tvm_dispatch(Function(lambda x, state: (state.add_(1), x * state)), (numbers(3), numbers(3)))
    x, state = numbers(3), numbers(3)
    wanted = state + 1
    same, product = module(x, state)
    assert same is state and torch.equal(state, wanted)
    torch.testing.assert_close(product, x * wanted)
    assert stats(module).hits == 1


def test_memory_that_two_arguments_share_is_eagers():
    module = add_tvm_dispatch(Function(read_before_and_after), (numbers(3, 4), numbers(3, 4)))
    mine, eagers = (numbers(3, 4) for _ in range(2))
    eagers.copy_(mine)
    torch.testing.assert_close(module(mine, mine), read_before_and_after(eagers, eagers))
    torch.testing.assert_close(mine, eagers)
    (reason,) = stats(module).misses
    assert "shares memory with argument" in reason and "which the call changes" in reason


def test_a_call_that_turns_out_to_be_eagers_writes_once():
    """Numbers that are computed from a parameter are compared by the compiled forward, before anything is written."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, state):
            state.add_(1)
            return state * 2 if (self.weight * state > 0).all() else state * 3

    module = moved(Branches())
    state = moved(torch.ones(3, dtype=torch.float64))
    add_tvm_dispatch(module, state)
    assert torch.equal(state, torch.ones_like(state))
    state.fill_(-4)
    result = module(state)
    assert torch.equal(state, torch.full_like(state, -3)) and torch.equal(result, state * 3)
    assert stats(module).hits == 0 and stats(module).misses.total() == 1


def test_a_second_derivative_reads_what_was_there_before():
    module, x = add_tvm_dispatch(Function(read_before_and_after), (numbers(3, 4).requires_grad_(), numbers(3, 4))), None
    x, state = numbers(3, 4).requires_grad_(), numbers(3, 4)
    found = []
    for call in (module, read_before_and_after):
        own = state.clone()
        (slope,) = torch.autograd.grad(call(x, own).sin().sum(), x, create_graph=True)
        found.append([own, slope, *torch.autograd.grad(slope.square().sum(), x)])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


REFUSED = {
    "what is followed is written": lambda x, state: state.mul_(x.mean()),
    "into a part": lambda x, state: (state[0].copy_(x[0]), state.sum())[1],
    "into what is followed, unseen": lambda x, state: (x.data.add_(1), state * 2)[1],
}


def test_an_argument_without_elements_is_given_twice_and_written():
    """The other name of the written tensor counts its change; there is nothing in it that could have changed."""

    def written(x, state, same):
        state.clamp_(-1, 1)
        return x * (state.sum() + same.sum() + 1)

    x, empty = numbers(3).requires_grad_(), numbers(2, 0)
    ours = add_tvm_dispatch(Function(written), (x, empty, empty))
    (first,) = torch.autograd.grad((ours(x, empty, empty) ** 2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert stats(ours).hits == 1 and torch.equal(second, torch.full_like(x, 2.0))


@pytest.mark.parametrize("use", REFUSED)
def test_what_autograd_follows_is_refused(use):
    x, state = numbers(3, 4).requires_grad_(), numbers(3, 4)
    before = state.clone(), x.detach().clone()
    with pytest.raises(UnsupportedModule, match="passed to the module and that autograd follows"):
        add_tvm_dispatch(Function(REFUSED[use]), (x, state))
    assert torch.equal(state, before[0]) and torch.equal(x, before[1])


def test_a_loop_that_writes_an_argument_leaves_the_sample_alone():
    """Long loops are run once in eager to be recorded."""

    def steps(x, state):
        for _ in range(40):
            x = x * 0.5 + x.sin() * state.mean()
        state.add_(x.detach())
        return x

    x, state = numbers(4), numbers(4)
    before = state.clone()
    module = add_tvm_dispatch(Function(steps), (x.clone().requires_grad_(), state))
    assert torch.equal(state, before)
    mine, eagers = state.clone(), state.clone()
    torch.testing.assert_close(module(x.clone().requires_grad_(), mine), steps(x.clone().requires_grad_(), eagers))
    torch.testing.assert_close(mine, eagers)
    assert stats(module).hits == 1
