"""Shapes that numbers in arguments decide: compiled for the sample's count, which each call compares with its own."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from tests.bridge.compare import Call, Function, assert_same, check_module, run
from tests.sampling import sampled

ROWS, WIDTH = 6, 5


class Picked(nn.Module):
    """A layer around a function of its result and of the arguments."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x, mask, *others):
        return self.function(self.linear(x), mask, *others)


def arguments(mask=(1, 0, 1, 1, 0, 1)):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.tensor(mask, dtype=torch.bool)


def _assigned(y, mask):
    y = y * 1
    y[mask] = torch.ones(4, WIDTH, dtype=y.dtype) * y[~mask].sum()
    return y


FORMS = {
    "rows": lambda y, mask: y[mask].tanh(),
    "elements": lambda y, mask: y[mask[:, None] & (torch.arange(WIDTH) > 1)],
    "between other items": lambda y, mask: y[None, mask, 1:],
    "masked_select": lambda y, mask: torch.masked_select(y, mask[:, None]).exp(),
    "nonzero": lambda y, mask: y[mask.nonzero().squeeze(1)] * 2,
    "nonzero of integers": lambda y, mask: y[torch.nonzero(mask.long(), as_tuple=True)],
    "argwhere": lambda y, mask: y.index_select(0, torch.argwhere(mask)[:, 0]),
    "where": lambda y, mask: y[torch.where(mask)[0]].sum(0),
    "a loss of some rows": lambda y, mask: F.cross_entropy(y[mask], mask[mask].long()),
    "equal parts": lambda y, mask: y[mask].reshape(2, -1, WIDTH).mean(1),
    "written": _assigned,
    "repeats": lambda y, mask: torch.repeat_interleave(y, mask.long() + 1, dim=0).sin(),
    "a result": lambda y, mask: (y, mask.nonzero()),
    "bins": lambda y, mask: y.sum(0)[:2] / torch.bincount(mask.long()),
    "bins of a kind": lambda y, mask: y[:3] * mask.to(torch.uint8).bincount(minlength=3)[:, None],
}


ALIKE = ("nonzero of integers", "argwhere", "a loss of some rows", "equal parts", "bins of a kind")
"""Of rows, of positions, of bins: another one is here."""


@pytest.mark.parametrize("name", sampled(FORMS, lambda name: name not in ALIKE))
def test_it_is_eagers_result(name):
    check_module(lambda: Picked(FORMS[name]), arguments, calls=1)


def test_another_count_is_a_miss_and_another_mask_of_the_same_count_is_not():
    torch.manual_seed(0)
    eager = Picked(FORMS["rows"]).double()
    module = add_tvm_dispatch(Picked(FORMS["rows"]).double(), arguments())
    module.load_state_dict(eager.state_dict())
    for mask, hits in (
        ((0, 1, 1, 1, 1, 0), 1),
        ((1, 1, 1, 1, 1, 0), 1),
        ((0, 0, 0, 0, 0, 0), 1),
        ((1, 1, 0, 0, 1, 1), 2),
    ):
        call = Call(arguments(mask))
        assert_same(run(module, call), run(eager, call))
        assert stats(module).hits == hits
    (reason,) = [each for each in stats(module).misses if "called with 5" in each]
    assert "compiled for 4" in reason and "test_counted_sizes.py" in reason


def test_another_count_is_compiled_where_that_is_asked_for():
    module = add_tvm_dispatch(Picked(FORMS["rows"]).double(), arguments(), on_miss="compile")
    for _ in range(2):
        for mask in ((1, 1, 1, 1, 1, 0), (0, 1, 1, 1, 1, 0)):
            module(*arguments(mask)).sum().backward()
    assert len(stats(module).entries) == 2 and stats(module).hits == 4


def test_bins_of_what_parameters_decide_are_as_many_as_were_asked_for_or_a_miss():
    """As the load of a mixture's experts. What falls into a further bin makes another length."""
    torch.manual_seed(0)
    module = Picked(lambda y, mask: (y * 1e-3, torch.bincount(y.argmax(1), minlength=3)))
    x = arguments()[0].requires_grad_()

    def fall_into(bins):
        nn.init.zeros_(module.linear.weight)
        with torch.no_grad():
            module.linear.bias.copy_(torch.eye(WIDTH)[bins - 1])

    module.double()
    fall_into(2)
    add_tvm_dispatch(module, (x, x))
    for bins in (1, 3, 5, 2):
        fall_into(bins)
        y, load = module(x, x)
        assert load.tolist() == [ROWS * (bins == k + 1) for k in range(max(bins, 3))] and y.requires_grad
    assert stats(module).hits == 3 and stats(module).misses.total() == 1


def test_a_negative_number_has_no_bin_in_eager_either():
    module, (x, mask) = Picked(lambda y, mask: y.sum() * torch.bincount(mask, minlength=3)).double(), arguments()
    add_tvm_dispatch(module, (x, mask.long()))
    with pytest.raises(RuntimeError, match="non-negative"):
        module(x, mask.long() - 1)
    module(x, 1 - mask.long())
    assert stats(module).hits == 1 and stats(module).misses.total() == 1


def test_a_mask_of_nothing():
    check_module(lambda: Picked(FORMS["rows"]), lambda: arguments((0,) * ROWS), calls=1)


def test_a_mask_that_the_module_owns():
    class Owner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("kept", arguments()[1])

        def forward(self, x):
            return self.linear(x)[self.kept]

    check_module(Owner, lambda: arguments()[0], calls=1)


@pytest.mark.parametrize(
    "function",
    [
        lambda y, mask: y[y[:, 0] > 0],
        lambda y, mask: y[F.dropout(mask.double(), 0.5, True) > 0],
        lambda y, mask: torch.unique(mask.long()) * y.sum(),
    ],
)
def test_counts_that_every_call_computes_anew_are_refused(function):
    with pytest.raises(UnsupportedModule, match="the shape of what comes out depends on"):
        add_tvm_dispatch(Picked(function).double(), arguments())


def test_a_mask_that_does_not_fit_is_eagers_error():
    with pytest.raises(IndexError):
        add_tvm_dispatch(Function(lambda x, mask: x[mask[:3]]), arguments())
