"""Numbers that change from call to call: inputs where that is exact, else a bounded number of compilations."""

import copy
import logging
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bridge import add_tvm_dispatch, stats
from bridge.capture import NotArithmeticError, NumberPlace, with_dynamic_scalars
from bridge.compile import backend_for
from bridge.dispatch import EntryOptions, entries
from bridge.dispatch.compile_entry import compile_entry
from bridge.state import SampleCall
from tests.bridge.compare import Call, assert_same, run
from tests.device import DEVICE
from tests.sampling import sampled

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).to(DEVICE)


class Annealed(nn.Module):
    """A variational autoencoder's loss; the weight is used as it is, and computed with."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 3))
        self.beta = 0.0

    def forward(self, x):
        mean = torch.tanh(x * self.weight)
        kl = (mean**2).sum()
        return ((mean + torch.randn_like(mean) - x) ** 2).sum() + self.beta * kl * (1 - self.beta / 2) + 2 * self.beta


beta = None  # of the same name as the attribute, and none of forward's


@pytest.mark.composes(
    "numbers that change at every call: `self.beta`, `model(x, temperature)`",
    "inputs from the second value on, where they scale and shift tensors",
    section='`on_miss="compile"`',
)
def test_an_annealed_attribute_is_compiled_once_more(caplog):
    global beta
    module = Annealed()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, X, on_miss="compile")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (module, eager)]
    losses = [], []
    with caplog.at_level(logging.INFO, logger="bridge.dispatch"):
        for step in range(40):
            beta = step / 40
            for each, optimizer, curve in zip((module, eager), optimizers, losses, strict=True):
                each.beta = beta
                torch.manual_seed(step)
                loss = each(X)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                curve.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert caplog.text.count("added Entry") == 1 and stats(module).hits == 40 and not stats(module).misses
    assert type(module.beta) is float and module.beta == beta


class Uses(nn.Module):
    """A number as an argument, as an attribute, and as one of a module inside."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.linear.gain = 1.0
        self.shift = 0.5
        self.never_read = 0

    def forward(self, x, temperature=1.0, count: int = 2):
        assert isinstance(temperature, float)
        y = self.linear(x) * self.linear.gain / temperature
        z = (count * y + (-self.shift)).add_(count)
        return torch.softmax(1.5 - z, -1) + (self.shift / 4 - z) * (3 * count + 1)


def test_every_number_becomes_an_input():
    torch.manual_seed(0)
    module = Uses().double()
    eager = copy.deepcopy(module)
    x = X.double().requires_grad_()
    add_tvm_dispatch(module, (x, 1.0, 2), on_miss="compile")
    for step, (name, values) in enumerate([("gain", (0.3, -0.0)), ("shift", (0.1, 0.7)), ("never_read", (1, 2))]):
        for value in values:
            for each in (module, eager):
                setattr(each.linear if name == "gain" else each, name, value)
            call = Call((x, 1.0 + value), {"count": step * 3})
            assert_same(run(module, call), run(eager, call))
    assert stats(module).hits == 6 and len(stats(module).entries) == 1
    (entry,) = stats(module).entries
    assert len(entry.guard.numbers) == 4  # never_read is nothing to the entry
    for odd in (Call((x, 0.5, 2**30)), Call((x, 0.5, True)), Call((x, math.inf, 3)), Call((x, 0.5, -1))):
        assert_same(run(module, odd), run(eager, odd), **CLOSE)


def test_an_int_and_a_float_are_numbers_of_two_kinds(caplog):
    module = Annealed()
    module.beta = 0
    add_tvm_dispatch(module, X, on_miss="compile")
    with caplog.at_level(logging.INFO, logger="bridge.dispatch"):
        for step in range(1, 10):
            module.beta = step / 10
            module(X)
    assert caplog.text.count("added Entry") == 2 and stats(module).hits == 9


def _branch(x, number):
    return x * number if number > 0.5 else x


def _type(x, number):
    return x * number if type(number) is float else x


OTHER_USES = {
    "comparison": _branch,
    "type": _type,
    "dropout": lambda x, number: F.dropout(x, number / 100, training=True) * number,
    "eps": lambda x, number: F.layer_norm(x, (3,), eps=number),
    "math": lambda x, number: x * math.exp(number),
    "power": lambda x, number: x * number**2,
    "clamp": lambda x, number: x.clamp(max=number),
    "alpha": lambda x, number: torch.add(x, x, alpha=number),
    "truth": lambda x, number: x * (number or 1.0),
    "rounded": lambda x, number: x * round(number, 1),
    "divisor": lambda x, number: x * (1.0 / number),
    "half": lambda x, number: (x.half() * number).float(),
    "integers": lambda x, number: torch.arange(3) * number + x,
    "literal": lambda x, number: x * torch.tensor(number),
    "text": lambda x, number: x * float(f"{number}"),
    "shape": lambda x, number: x.repeat(int(number * 10), 1).sum() * x,
}


class OtherUse(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.number = 0.1
        self.use = use

    def forward(self, x):
        return torch.tanh(self.use(x * self.weight, self.number))


ALIKE = ("dropout", "eps", "alpha", "text", "shape")
"""Constants of an operator, as that of "clamp" is; numbers that Python makes, as "rounded" does."""


@pytest.mark.parametrize("use", sampled(OTHER_USES, lambda use: use not in ALIKE))
def test_a_number_that_is_used_otherwise_is_no_input(use):
    module = add_tvm_dispatch(OtherUse(OTHER_USES[use]), X)
    (known,) = stats(module).entries
    module.number = 0.75
    changed = known.guard.changed_numbers(SampleCall(module, (X,), {}))
    assert changed is None if use == "type" else changed == {NumberPlace(float, name="number"): 0.1}
    how = EntryOptions("min_cut", backend_for(None))
    made = changed and compile_entry(SampleCall(module, (X,), {}), how, numbers=(known, changed))
    assert made is None and module.number == 0.75


def test_a_number_that_cannot_be_an_input_is_compiled_for_a_few_times_only(caplog, monkeypatch):
    """A dropout rate that a schedule changes at every step."""
    monkeypatch.setattr(entries, "MAX_WASTED", 3)
    module = OtherUse(OTHER_USES["dropout"])
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, X, on_miss="compile")
    for step in range(3 + 12):
        module.number = eager.number = 0.2 + step / 100
        assert_same(run(module, Call((X,))), run(eager, Call((X,))), **CLOSE)
    assert stats(module).hits == 3 and stats(module).misses.total() == 12
    messages = [each.getMessage() for each in caplog.records if each.name.startswith("bridge") and each.levelno >= 30]
    given_up = [message for message in messages if "from now on" in message]
    assert len(given_up) == 1 and "attribute 'number'" in given_up[0] and "buffer" in given_up[0], messages


def test_a_module_with_a_forward_of_its_own_has_no_twin():
    module = Uses()
    module.forward = module.forward
    with pytest.raises(NotArithmeticError, match="forward"):
        with_dynamic_scalars(module, (X,), {}, [NumberPlace(float, name="shift")])


def test_the_twin_is_the_module_with_objects_of_its_own():
    module = Uses()
    twin, args = with_dynamic_scalars(module, (X, 0.5), {}, [NumberPlace(float, path="linear", name="gain")])
    assert torch.equal(twin(*args), module(X, 0.5))
    assert twin.linear.weight is module.linear.weight and twin.linear is not module.linear
    twin.linear.gain = 7.0
    twin.linear._parameters["bias"] = None
    assert module.linear.gain == 1.0 and module.linear.bias is not None and "forward" not in module.__dict__


def test_a_number_that_is_returned_is_no_input():
    class Returned(OtherUse):
        def forward(self, x):
            return x * self.number, self.number

    module = add_tvm_dispatch(Returned(None), X, on_miss="compile")
    for value in (0.2, 0.3):
        module.number = value
        result, number = module(X)
        assert number == value and type(number) is float
        torch.testing.assert_close(result, X * value)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="sizes of operators of older versions are fixed")
def test_numbers_and_sizes_change_together():
    """The second size is compiled for all sizes; the second number becomes an input of that entry."""
    module = Annealed()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module)
    for step, rows in enumerate((4, 6, 5, 9, 2, 4, 7)):
        x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows))
        module.beta = eager.beta = step / 7
        assert_same(run(module, Call((x,)), seed=step), run(eager, Call((x,)), seed=step), **CLOSE)
    static, varying = stats(module).entries
    assert stats(module).hits == 7 and not stats(module).misses
    assert (static.hits, varying.hits) == (1, 5)  # and one that has made room for it
    assert [place.name for place in varying.guard.numbers] == ["beta"] and varying.bound is not None
    module.beta = eager.beta = 0.25
    x = torch.ones(1, 3)
    assert_same(run(module, Call((x,))), run(eager, Call((x,))), **CLOSE)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="sizes of operators of older versions are fixed")
def test_a_number_that_is_no_input_is_a_constant_beside_sizes():
    class Power(nn.Module):
        def forward(self, x, power):
            return x**power

    module = add_tvm_dispatch(Power())
    for rows, power in [(3, 2.0), (4, 2.0), (5, 3.0), (6, 3.0), (7, 2.0)]:
        x = torch.rand(rows, 3)
        torch.testing.assert_close(module(x, power), x**power, **CLOSE)
    assert [(entry.hits, entry.bound is not None) for entry in stats(module).entries] == [
        (2, True),
        (2, True),
    ]


OUTSIDE = [0.0]
LEAVES = {
    "attribute": lambda m, n: setattr(m, "left", n),
    "computed attribute": lambda m, n: setattr(m, "left", (n * 2, "a")),
    "dictionary": lambda m, n: m.held.update(n=n),
    "list of a file": lambda m, n: OUTSIDE.__setitem__(0, n + 1),
    "tensor in a dictionary": lambda m, n: m.held.update(n=m.linear.bias * n),
}
NUMBERS = {
    "number": (lambda m, x: m.factor, lambda m, x, n: setattr(m, "factor", n / 2) or x),
    "size": (lambda m, x: x.shape[0], lambda m, x, n: x[:n]),
    "count": (lambda m, x: int(m.lengths.max()), lambda m, x, n: m.lengths.fill_(n) is None or x),
}


class Leaving(nn.Module):
    """Leaves a number of this call in Python state."""

    def __init__(self, number, leave):
        super().__init__()
        self.linear, self.factor, self.held, self.number, self.leave = nn.Linear(3, 4), 1.5, {}, number, leave
        self.register_buffer("lengths", torch.tensor([2]))

    def forward(self, x):
        n = self.number(self, x)
        self.leave(self, n)
        y = self.linear(x)
        return (y if "factor" in self.number.__code__.co_names else y[: self.lengths.max()]) * n

    def state(self):
        held = [each.detach().tolist() if isinstance(each, torch.Tensor) else each for each in self.held.values()]
        return getattr(self, "left", None), held, list(OUTSIDE)


@pytest.mark.parametrize("leave", LEAVES)
@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_that_changes_is_left_as_in_eager(number, leave):
    read, change = NUMBERS[number]
    module, x = Leaving(read, LEAVES[leave]).to(DEVICE), torch.randn(8, 3, device=DEVICE)
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, change(module, x, 3), on_miss="compile")
    for n in (3, 5, 4, 6, 3):
        states = []
        for each in (module, eager):
            OUTSIDE[:] = [0.0]
            result = each(change(each, x, n))
            states.append((result, each.state()))
        (ours, left), (theirs, wanted) = states
        torch.testing.assert_close(ours, theirs)
        assert repr(left[0]) == repr(wanted[0]) and left[2] == wanted[2]
        torch.testing.assert_close(left[1], wanted[1])
