"""Loops that are found while forward runs: one step is traced, all is eager's; what is not proven is traced whole."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autodiff.ir import bindings
from autodiff.scan import is_scan, scan_of
from bridge import UnsupportedModule, add_tvm_dispatch, lower, stats
from bridge.capture import LOOP_MARKS
from bridge.capture.loops import attempt, uncomputed
from bridge.lowering import reuse
from tests.bridge.compare import check_module
from tests.device import DEVICE


@pytest.fixture(autouse=True)
def few_operators(monkeypatch):
    """Short loops are recorded, too, and small calls of a kind computed once."""
    monkeypatch.setattr(attempt, "LEAST_OPERATORS", 1)
    monkeypatch.setattr(uncomputed, "LEAST_ELEMENTS", 1)


class Lstm(nn.Module):
    """Gates by hand, with layer norms or without; the second axis is time, gone through forth or back."""

    def __init__(self, norm=False, backwards=False):
        super().__init__()
        self.of_x, self.of_h, self.backwards = nn.Linear(3, 16), nn.Linear(4, 16, bias=False), backwards
        self.norms = nn.ModuleList(nn.LayerNorm(n) if norm else nn.Identity() for n in (16, 16, 4))

    def forward(self, x):
        h = c = x.new_zeros(x.shape[0], 4)
        hs = []
        for step in reversed(range(x.shape[1])) if self.backwards else range(x.shape[1]):
            i, f, g, o = (self.norms[0](self.of_x(x[:, step])) + self.norms[1](self.of_h(h))).chunk(4, 1)
            c = self.norms[2](f.sigmoid() * c + i.sigmoid() * g.tanh())
            h = o.sigmoid() * c.tanh()
            hs.append(h)
        return torch.stack(hs[::-1] if self.backwards else hs, 1), (h, c)


class Gru(nn.Module):
    """Two layers, one after the other; the upper one has a learned state and reads what the lower one made."""

    def __init__(self):
        super().__init__()
        self.cells, self.first = nn.ModuleList([nn.GRUCell(3, 4), nn.GRUCell(4, 4)]), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        parts, state = x.unbind(1), x.new_zeros(x.shape[0], 4)
        for cell in self.cells:
            hs = []
            for part in parts:
                state = cell(part, state)
                hs.append(state)
            parts, state = hs, self.first.expand(x.shape[0], 4)
        return torch.cat(hs, 1), hs[len(hs) // 2], hs[0]


class StateSpace(nn.Module):
    """A selective scan."""

    def __init__(self):
        super().__init__()
        self.decay = nn.Parameter(-torch.rand(3, 2))
        self.rate, self.into, self.outof = (nn.Linear(3, extent) for extent in (3, 2, 2))

    def forward(self, x):
        rate = F.softplus(self.rate(x)).unsqueeze(-1)
        keep, add = torch.exp(rate * self.decay), rate * self.into(x).unsqueeze(2) * x.unsqueeze(-1)
        outof, state, ys = self.outof(x), x.new_zeros(x.shape[0], 3, 2), []
        for step in range(x.shape[1]):
            state = keep[:, step] * state + add[:, step]
            ys.append((state * outof[:, step].unsqueeze(1)).sum(-1))
        return torch.stack(ys, 1)


class Halves(nn.Module):
    """Columns are taken from different places; what a step makes is read two steps later; a loss is summed."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        one = two = x[:, 0, :1].expand(-1, 4)
        loss = 0
        for part in x.split(1, 1):
            made = torch.tanh(self.linear(torch.cat([one[:, 2:], two[:, :2]], 1)) + part.squeeze(1)[:, :1])
            one, two = made, one.detach() if self.training else one
            loss = loss + made.square().mean()
        return loss, one


class Buffers(nn.Module):
    """States are written into tensors that were made before, in time's order and against it; one has a place more."""

    def __init__(self, backwards=False, copies=False):
        super().__init__()
        self.cell, self.backwards, self.copies = nn.GRUCell(3, 4), backwards, copies

    def forward(self, x):
        length, state = x.shape[1], x.new_zeros(x.shape[0], 4)
        states, squares = torch.empty(x.shape[0], length, 4, dtype=x.dtype), x.new_ones(length + 2, x.shape[0], 1)
        for step in reversed(range(length)) if self.backwards else range(length):
            state = self.cell(x[:, step], state)
            if self.copies:
                states.select(1, step).copy_(state)
            else:
                states[:, step, :] = state
            squares[length - step : length - step + 1] = state.square().sum(-1, keepdim=True)[None]
        return states, squares


class Numbers(nn.Module):
    """A step has numbers of its own: of a list, a count, a tensor that is filled with one."""

    def __init__(self):
        super().__init__()
        self.linear, self.rates = nn.Linear(3, 3), [0.1 * (step % 5) - 0.2 for step in range(64)]

    def forward(self, x):
        state = x[:, 0]
        for step in range(x.shape[1]):
            time = torch.full((x.shape[0], 1), 0.5**step, dtype=x.dtype)
            slope = torch.tanh(self.linear(state * self.rates[step]) + x[:, step] / (step + 1) - time)
            state = state + (3 - step) * slope * 0.1
        return state


class Lengths(nn.Module):
    """Sequences of several lengths: a state stays from its sequence's end on, what is made after it is zero."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 4)

    def forward(self, x):
        lengths = x[:, 0].argmax(-1) + 4
        state, states = x.new_zeros(x.shape[0], 4), []
        for step in range(x.shape[1]):
            made, goes_on = self.cell(x[:, step], state), (step < lengths).unsqueeze(-1)
            state = torch.where(goes_on, made, state)
            states.append(made * goes_on)
        return torch.stack(states, 1), state


class Stacked(nn.Module):
    """Layers of one size, their states in a list: in each step all of them, or one after the other."""

    def __init__(self, layer_by_layer=False):
        super().__init__()
        self.cells, self.layer_by_layer = nn.ModuleList(nn.GRUCell(3, 3) for _ in range(3)), layer_by_layer

    def forward(self, x):
        if self.layer_by_layer:
            parts = x.unbind(1)
            for cell in self.cells:
                state, states = x.new_zeros(x.shape[0], 3), []
                for part in parts:
                    state = cell(part, state)
                    states.append(state)
                parts = states
            return torch.stack(parts, 1)
        states, made = [x.new_zeros(x.shape[0], 3) for _ in self.cells], []
        for part in x.unbind(1):
            for layer, cell in enumerate(self.cells):
                states[layer] = part = cell(part, states[layer])
            made.append(part)
        return torch.stack(made, 1), states


class BothWays(nn.Module):
    """Two directions in one loop; weights are shared."""

    def __init__(self):
        super().__init__()
        self.cell = nn.RNNCell(3, 4)

    def forward(self, x):
        there = back = x.new_zeros(x.shape[0], 4)
        theres, backs = [], []
        for step in range(x.shape[1]):
            there, back = self.cell(x[:, step], there), self.cell(x[:, -1 - step], back)
            theres.append(there)
            backs.insert(0, back)
        return torch.cat([torch.stack(theres, 1), torch.stack(backs, 1)], -1)


class Indices(nn.Module):
    """What was computed is an index: such a run computes everything."""

    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(4, 3), nn.Linear(3, 4)

    def forward(self, x):
        state = x[:, 0]
        for step in range(x.shape[1]):
            state = torch.tanh(
                self.embedding((self.linear(state).sigmoid() * 3.99).long()).mean(1) * state + x[:, step]
            )
        return state


class Drops(nn.Module):
    """Two masks for each step, of one before all steps that is the same in each; one more draw before, one after."""

    def __init__(self, backwards=False):
        super().__init__()
        self.cell, self.above, self.drop = nn.GRUCell(3, 4), nn.RNNCell(4, 4), nn.Dropout(0.3)
        self.backwards = backwards

    def forward(self, x):
        low = high = x.new_zeros(x.shape[0], 4)
        every, states = F.dropout(torch.ones_like(low), 0.2, self.training), []
        x = x + 0.1 * torch.randn_like(x)
        for step in reversed(range(x.shape[1])) if self.backwards else range(x.shape[1]):
            low = self.cell(self.drop(x[:, step]), low * every)
            high = self.above(self.drop(low.t()).t(), high)
            states.append(high)
        return self.drop(torch.stack(states, 1)), low


class OneOfTwo(nn.Module):
    """What one loop makes is not returned; what it drops is drawn."""

    def __init__(self):
        super().__init__()
        self.unused, self.used, self.drop = nn.RNNCell(3, 4), nn.RNNCell(3, 4), nn.Dropout(0.3)

    def forward(self, x):
        results = []
        for cell in (self.unused, self.used):
            state = x.new_zeros(x.shape[0], 4)
            for part in x.unbind(1):
                state = cell(self.drop(part), state)
            results.append(state)
        return self.drop(results[1])


class InPlace(nn.Module):
    """Sums, gates and activations are written where they were; ``later``: and after the loop; a list has one tensor at
    each place."""

    def __init__(self, later=False):
        super().__init__()
        self.of_x, self.of_h, self.relu = nn.Linear(3, 4), nn.Linear(4, 4), nn.LeakyReLU(0.1, inplace=True)
        self.later = later

    def forward(self, x):
        state, total, states, totals = x.new_zeros(x.shape[0], 4), x.new_zeros(x.shape[0], 4), [], []
        for step in range(x.shape[1]):
            made = self.of_x(x[:, step])
            made += self.of_h(state)
            made.mul_(0.5 + 0.1 * step).masked_fill_(made.detach() > 1, 0.5)
            state = self.relu(made)
            total += state
            states.append(state + 0.5)
            totals.append(total)
        if self.later:
            states[2].add_(1)
            return torch.stack(states, 1), torch.stack(totals, 1)
        return torch.stack(states, 1), total


MODULES = {
    "lstm": Lstm,
    "layer norm lstm, last part first": lambda: Lstm(norm=True, backwards=True),
    "gru, two layers": Gru,
    "state space": StateSpace,
    "halves": Halves,
}
FORMS = {
    "buffers": Buffers,
    "buffers, last part first": lambda: Buffers(backwards=True),
    "buffers, copied into": lambda: Buffers(copies=True),
    "numbers": Numbers,
    "lengths": Lengths,
    "stacked": Stacked,
    "stacked, layer by layer": lambda: Stacked(layer_by_layer=True),
    "both ways": BothWays,
    "indices": Indices,
    "in place": InPlace,
}
LATER = {"in place, later": lambda: InPlace(later=True)}
DROPS = {"dropout": Drops, "dropout, last part first": lambda: Drops(backwards=True)}
ON_THE_HOST = pytest.mark.cpu("a GPU's masks are drawn step by step")


def marks_of(lowered):
    return [node for node in lowered.captured.graph.nodes if node.target in LOOP_MARKS]


@pytest.mark.parametrize(
    ("name", "steps"),
    [*((name, 9) for name in MODULES), ("gru, two layers", 1), ("halves", 2), ("layer norm lstm, last part first", 64)],
)
def test_numbers_and_gradients_are_eagers(name, steps):
    module = check_module(MODULES[name], lambda: torch.randn(2, steps, 3, requires_grad=True), calls=1)
    assert bool(marks_of(stats(module).entries[0].lowered)) == (steps > 2)


@pytest.mark.parametrize("name", [*FORMS, *LATER])
def test_loops_of_other_forms_are_eagers(name):
    check_module({**FORMS, **LATER}[name], lambda: torch.randn(2, 8, 3, requires_grad=True), calls=1)


@pytest.mark.parametrize("name", DROPS)
@pytest.mark.parametrize("width", [2, 70])
def test_masks_of_all_steps_are_eagers(name, width):
    """Those of few elements are drawn by torch, the others by compiled code."""
    module = check_module(DROPS[name], lambda: torch.randn(width, 8, 3, requires_grad=True))
    draws = stats(module).entries[0].lowered.captured.draws
    assert len(draws) == (4 if DEVICE.type == "cpu" else 19)


@ON_THE_HOST
def test_a_loop_that_the_results_do_not_need_draws():
    module = check_module(OneOfTwo, lambda: torch.randn(2, 8, 3, requires_grad=True), calls=1)
    captured = stats(module).entries[0].lowered.captured
    assert len(captured.draws) == 3 and sum(node.target is LOOP_MARKS[0] for node in captured.graph.nodes) == 1


@pytest.mark.parametrize("name", [*MODULES, *FORMS, pytest.param("dropout", marks=ON_THE_HOST)])
def test_one_step_is_traced_whatever_the_length(name):
    module, sizes, bodies = {**MODULES, **FORMS, **DROPS}[name](), [], []
    for steps in (9, 14):
        lowered = lower(module, torch.randn(2, steps, 3))
        assert {node.target for node in lowered["captured"].ir.nodes} >= set(LOOP_MARKS[2:3])
        sizes.append([stage.size for stage in lowered.stages[:8]])  # the partition weighs bytes of all steps
        scans = [scan_of(value)[0] for _, value in bindings(lowered.forward) if is_scan(value)]
        assert {scan.length for scan in scans} <= {steps, steps - 1, steps - 2} and scans
        bodies.append([scan.body for scan in scans])
    assert sizes[0] == sizes[1] and len(bodies[0]) == len(bodies[1])


class Reads(nn.Module):
    def forward(self, x):
        h = x[0]
        for part in x:
            h = torch.tanh(h + part) if h.sum().item() > -1e9 else h
        return h


class ReadsBack(nn.Module):
    """The state is what was written; views of it are taken before it is written on."""

    def forward(self, x):
        out = torch.zeros_like(x)
        for step in range(1, len(x)):
            out[step] = torch.tanh(out[step - 1] + x[step])
        return out


class WritesOfAView(nn.Module):
    """Another tensor sees what is written."""

    def forward(self, x):
        out = torch.zeros_like(x)
        view, h = out[1:], x[0]
        for step in range(len(x)):
            h = torch.tanh(h + x[step])
            out[step] = h
        return view * 2


class WritesTwice(nn.Module):
    """A row is written again."""

    def forward(self, x):
        out, h = torch.zeros_like(x), x[0]
        for step in range(len(x)):
            h = torch.tanh(h + x[step])
            out[step // 2] = h
        return out


class CopiesOfAView(nn.Module):
    """Views that are written through, and read: before, after, or as one that is kept."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def forward(self, x):
        out, h, kept = torch.zeros_like(x), x[0], []
        for step in range(len(x)):
            h = torch.tanh(h + x[step])
            view = out[step]
            if self.way == "before":
                h = h + view
            view.copy_(h)
            if self.way == "after":
                h = h + view
            if self.way == "kept":
                kept.append(view)
        return out, sum(kept)


class SavedThenWritten(nn.Module):
    """Autograd has saved a value of what is written on."""

    def forward(self, x):
        out, h = torch.zeros_like(x), x[0]
        for step in range(len(x)):
            h = torch.tanh(h + x[step] + out.detach().sum())
            out[step] = h
        return out


class WritesWhatAViewSees(nn.Module):
    """What is written in place is seen by a view that was taken before; by the input's own parts."""

    def __init__(self, of_input):
        super().__init__()
        self.of_input = of_input

    def forward(self, x):
        x, h = x * 1, x[0]
        for part in [x.select(0, step) for step in range(len(x))]:
            made = part if self.of_input else h + part
            view = made[:1]
            made.mul_(0.5)
            h = made + view
        return h, x


class OwnWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(3)) for _ in range(7))

    def forward(self, x):
        h = x[0]
        for part, weight in zip(x, self.weights, strict=False):
            h = torch.tanh(h * weight + part)
        return h


class OtherPowers(nn.Module):
    def forward(self, x):
        h = x[0]
        for step, part in enumerate(x):
            h = torch.tanh((h * h + 1) ** (0.5 * step) + part)
        return h


class SkipsOne(nn.Module):
    def forward(self, x):
        h = x[0]
        for step in (0, 1, 3, 2, 4, 5, 6):
            h = torch.tanh(h + x[step])
        return h


class NoGradLater(nn.Module):
    def forward(self, x):
        h = x[0]
        for step in range(len(x)):
            with torch.set_grad_enabled(step % 2 == 0):
                h = torch.tanh(h + x[step])
        return h


class DropsBySteps(nn.Module):
    def forward(self, x):
        h = x[0]
        for step, part in enumerate(x):
            h = torch.tanh(F.dropout(h, 0.1 * (1 + step % 2), self.training) + part)
        return h


class DropsInPlace(nn.Module):
    def forward(self, x):
        h = x[0]
        for part in x:
            h = torch.tanh(F.dropout(h + part, 0.3, self.training, inplace=True))
        return h


class Noisy(nn.Module):
    def forward(self, x):
        h = x[0]
        for part in x:
            h = torch.tanh(h + part * torch.rand_like(part))
        return h


class KeepsElsewhere(nn.Module):
    """A number out of numpy, which passes no operator."""

    def forward(self, x):
        h, first = x[0], float(x.detach().numpy()[0, 0, 0])
        for part in x:
            h = torch.tanh(h * first + part)
        return h


@pytest.mark.parametrize(
    "kind",
    [
        *(Reads, ReadsBack, WritesOfAView, WritesTwice, SavedThenWritten),
        *(OwnWeights, OtherPowers, SkipsOne, NoGradLater),
        pytest.param(KeepsElsewhere, marks=pytest.mark.cpu("numpy has no tensors of a GPU")),
        *(DropsBySteps, DropsInPlace, Noisy),
        *(partial(CopiesOfAView, way) for way in ("before", "after", "kept")),
        *(partial(WritesWhatAViewSees, of_input) for of_input in (False, True)),
    ],
)
def test_what_is_not_proven_is_captured_as_it_is(kind):
    try:
        module = check_module(kind, lambda: torch.randn(7, 2, 3, requires_grad=True), calls=1)
    except UnsupportedModule:  # by name, as ever
        return
    assert not marks_of(stats(module).entries[0].lowered)


def test_equal_modules_share_what_was_lowered(monkeypatch):
    """Found by one step of each loop; the second module is recorded once, whether it is found or not."""
    seen, recordings = [], []
    observe, run = reuse._observation_key, attempt._RecordedRun.of
    monkeypatch.setattr(reuse, "_observation_key", lambda *given: seen.append(len(given[0].trace)) or observe(*given))
    monkeypatch.setattr(attempt._RecordedRun, "of", lambda *given: recordings.append(1) or run(*given))

    def lowered(module, steps=11):
        return reuse.lower_once(module, (torch.randn(2, steps, 3),), {}, grad=True, partition="min_cut")

    first, again, other = lowered(Numbers()), lowered(Numbers()), Numbers()
    assert again is first and marks_of(first) and len(recordings) == 2
    other.rates[2] = 0.7
    assert lowered(other) is not first and len(recordings) == 3
    longer = lowered(Numbers(), 15)
    assert longer is not first and len({*seen}) == 1


@pytest.mark.cpu("a GPU's runs compute everything")
def test_calls_of_a_kind_are_computed_once_unless_an_index_is_made_of_them():
    def recorder_of(module, x):
        run = attempt._RecordedRun(computes=False)
        try:
            run.of(module, (x,), {})
        except attempt.NotRecordedError:
            pass
        return run._recorder, run.may_compute

    recorders = [recorder_of(Lstm(norm=True), torch.randn(2, steps, 3))[0] for steps in (10, 20)]
    computed = [len(each.calls.rows) - each.uncomputed.left_out for each in recorders]
    views = sum(10 for _ in ("x[:, step]", "chunk"))
    assert computed[1] - computed[0] == views
    assert recorder_of(Indices(), torch.randn(2, 10, 3))[1]


def test_a_call_of_few_operators_is_traced_as_it_is(monkeypatch):
    monkeypatch.setattr(attempt, "LEAST_OPERATORS", 100)
    short, long = (lower(Lstm(), torch.randn(2, steps, 3)) for steps in (6, 12))
    assert not marks_of(short) and marks_of(long)


def test_every_stage_is_checked():
    lowered = lower(Lstm(norm=True).double(), torch.randn(2, 9, 3, dtype=torch.float64, requires_grad=True))
    checked = lowered.check()
    assert checked.ok, str(checked)


def test_python_state_that_forward_sets_is_left_alone():
    module = Lstm()
    module.calls = 0
    module.register_forward_pre_hook(lambda module, args: None)
    add_tvm_dispatch(module, torch.randn(2, 12, 3))
    assert module.calls == 0 and stats(module).entries
