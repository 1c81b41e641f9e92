"""Loops of few operators in the record of a call: steps that are proven to be a loop, steps that stay unrolled."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autodiff.ir import bindings
from autodiff.scan import is_scan, scan_of
from bridge import add_tvm_dispatch, lower, stats
from tests.bridge.compare import check_module
from tests.device import DEVICE
from tests.sampling import sampled

STEPS = 6


class Steps(nn.Module):
    """A loop over the rows of ``x`` [steps, 2, 4]; ``loop``: the loop, which gets the module, a state and ``x``."""

    def __init__(self, loop):
        super().__init__()
        self.loop = loop
        self.linear, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.light, self.heavy = nn.Dropout(0.2), nn.Dropout(0.6)

    def forward(self, x):
        return self.loop(self, x.mean(0), x)

    def cell(self, h, part):
        return torch.tanh(self.linear(h) + part)


def forward(module, h, x):
    ys = []
    for part in x:
        h = module.cell(h, part)
        ys.append(h)
    return h, torch.cat(ys)


def backward(module, h, x):
    """From the last part to the first; results in the order of the parts."""
    ys = []
    for index in reversed(range(len(x))):
        h = module.cell(h, x[index])
        ys.append(h)
    return torch.cat(ys[::-1]), torch.cat(ys)


def some_results(module, h, x):
    """Some results are read one by one, some together."""
    ys = []
    for part in x.unbind():
        h = module.cell(h, part)
        ys.append(h)
    return ys[1] + ys[4], torch.cat(ys[2:5]), ys[0]


def looks_back(module, h, x):
    """A step reads the states of the two steps before it."""
    before = 2 * h
    for part in x:
        h, before = module.cell(h * before, part), h
    return h, before


def looks_far_back(module, h, x):
    """A step reads the state of the fifth step before it: two steps are one."""
    made = [h] * 5
    for _ in range(10):
        made.append(module.cell(made[-5], x[0]))
    return torch.stack(made[-5:])


def of_middle_axis(module, h, x):
    """Parts of two rows of the second axis; results are joined along it."""
    wide, ys = torch.cat([x, x]).transpose(0, 1).contiguous(), []
    state = torch.stack([h, h], 1)
    for index in range(STEPS):
        state = module.cell(state, wide[:, 2 * index : 2 * index + 2])
        ys.append(state)
    return torch.cat(ys, 1)


def other_steps_first(module, h, x):
    """The first and the last step differ from the others."""
    h = module.cell(h, x[0]) * h
    for part in x[1:]:
        h = module.cell(h, part)
    return h.exp()


def first_step_again(module, h, x):
    """Every step reads the first step's state."""
    first = h = module.cell(h, x[0])
    for _ in range(STEPS):
        h = module.cell(h + first, x[0])
    return h


def two_loops(module, h, x):
    """The second loop reads the first one's results."""
    last, ys = h, []
    for part in x:
        h = module.cell(h, part)
        ys.append(h)
    for y in ys:
        last = torch.sin(last + y)
    return last


def reshaped_twice(module, h, x):
    """A step's result is reshaped in the loop, and again after it, as Jamba's state-space layers do."""
    ys = []
    for part in x:
        h = module.cell(h, part)
        ys.append(h.sin().reshape(8))
    return torch.cat([each.reshape(4, 2) for each in ys])


def of_a_deeper_network(module, h, x):
    """Most operators are in no loop."""
    for factor in range(2, 32):
        h = module.other(h).sin() ** factor
    for part in x:
        h = module.cell(h, part)
    return h


def infinite_numbers(module, h, x):
    """Numbers that JSON lacks."""
    for part in x:
        h = torch.clamp(module.cell(h, part), float("-inf"), 0.3)
    return h


def several_rates(module, h, x):
    """Two masks of other rates in a step."""
    for part in x:
        h = module.heavy(module.cell(module.light(h), part))
    return h


def draws(module, h, x):
    """A draw of probabilities that the step computes, and a mask."""
    for part in x:
        h = module.light(module.cell(h, part))
        h = h * torch.bernoulli(h.sigmoid())
    return h + torch.rand(4, dtype=h.dtype)


def masks_behind_a_draw(module, h, x):
    """A draw before the loop decides where the generator stands in it."""
    h = h * torch.bernoulli(h.sigmoid())
    for part in x:
        h = module.light(module.cell(h, part))
    return h


def complex_states(module, h, x):
    """A rotation with a real input."""
    state = torch.complex(h, 0.5 * h)
    for part in x:
        state = state * torch.polar(torch.ones_like(part), module.cell(h, part)) + part
    return torch.view_as_real(state)


LOOPS = {
    **dict.fromkeys((forward, backward, looks_back, of_middle_axis, first_step_again), (STEPS,)),
    **dict.fromkeys((reshaped_twice, of_a_deeper_network, infinite_numbers, several_rates, complex_states), (STEPS,)),
    **dict.fromkeys((some_results, other_steps_first), (STEPS - 1,)),
    looks_far_back: (5,),
    two_loops: (STEPS, STEPS),
}
DRAWS = (draws, masks_behind_a_draw)
ALIKE = (backward, looks_back, of_middle_axis, other_steps_first, reshaped_twice, infinite_numbers)


def scans_of(lowered):
    return [scan_of(value)[0].length for _, value in bindings(lowered["imported"].function) if is_scan(value)]


def sequence():
    return torch.randn(STEPS, 2, 4, requires_grad=True)


@pytest.mark.parametrize("loop", sampled(list(LOOPS), lambda loop: loop not in ALIKE))
def test_a_loop_is_found_and_computes_the_same(loop):
    (entry,) = stats(check_module(lambda: Steps(loop), sequence)).entries
    assert scans_of(entry.lowered) == [*LOOPS[loop]]


@pytest.mark.cpu("a GPU's states lie on the host, one for each draw")
@pytest.mark.parametrize("loop", DRAWS)
def test_steps_that_draw_from_a_state_carry_it(loop):
    (entry,) = stats(check_module(lambda: Steps(loop), sequence)).entries
    assert scans_of(entry.lowered) == [STEPS - (loop is draws)]  # the first mask is drawn before the call


def other_numbers(module, h, x):
    for index in range(STEPS):
        h = module.cell(h, x[0]) ** (index + 2)
    return h


def skipped_part(module, h, x):
    for index in (0, 1, 2, 4, 3, 5):
        h = module.cell(h, x[index])
    return h


def independent(module, h, x):
    return torch.cat([module.cell(h, part) for part in x])


def few(module, h, x):
    for part in x[:3]:
        h = module.cell(h, part)
    return h


@pytest.mark.parametrize("loop", [other_numbers, skipped_part, independent, few])
def test_what_is_no_loop_stays(loop):
    assert not scans_of(lower(Steps(loop), sequence().detach()))


def test_weights_of_their_own_are_not_copied_together():
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(STEPS)))
    assert not scans_of(lower(layers, torch.randn(2, 4)))


@pytest.mark.cpu("a GPU's entries are of one size each")
def test_a_short_loop_does_not_hold_up_entries_of_all_sizes():
    module = Euler().to(DEVICE)
    add_tvm_dispatch(module, torch.randn(2, 4, device=DEVICE), on_miss="compile")
    for batch in (3, 5, 7):
        x = torch.randn(batch, 4, device=DEVICE)
        torch.testing.assert_close(module(x), module.steps(x))
    (entry,) = stats(module).entries
    assert entry.hits == 3


class Euler(nn.Module):
    """Few steps of a differential equation, for any batch."""

    def __init__(self):
        super().__init__()
        self.slope = nn.Linear(4, 4)

    def forward(self, x):
        return self.steps(x)

    def steps(self, x):
        for _ in range(STEPS):
            x = x + 0.1 * torch.tanh(self.slope(x))
        return x
