"""Packed sequences around ``nn.LSTM``, ``nn.GRU``, ``nn.RNN``: lengths are data, numbers and gradients are eager's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from bridge import UnsupportedModule, add_tvm_dispatch, examine, stats
from tests.bridge.compare import Call, assert_same, run
from tests.sampling import sampled

BATCH, STEPS, WIDTH, SIZE = 4, 6, 3, 5


class Packed(nn.Module):
    """Packed, through layers, padded again."""

    def __init__(self, kind, is_sorted=False, total=None, padding=0.0, **options):
        super().__init__()
        self.layer = kind(WIDTH, SIZE, **options).double()
        self.is_sorted, self.total, self.padding = is_sorted, total, padding

    def forward(self, x, lengths, *states):
        first = self.layer.batch_first
        rows = pack_padded_sequence(x, lengths.cpu(), first, self.is_sorted)
        y, last = self.layer(rows, (states if len(states) == 2 else states[0]) if states else None)
        y, again = pad_packed_sequence(y, first, self.padding, self.total)
        return y, last, again.to(y.device)


def sample(lengths, first=True, states=0, directions=1):
    x = torch.randn(BATCH, STEPS, WIDTH, dtype=torch.float64)
    x[torch.arange(STEPS) >= torch.tensor(lengths).unsqueeze(1)] = torch.nan  # nothing may look at it
    x = x if first else x.transpose(0, 1).contiguous()
    given = [torch.randn(directions, BATCH, SIZE, dtype=torch.float64).requires_grad_() for _ in range(states)]
    return Call((x.requires_grad_(), torch.tensor(lengths), *given))


CASES = {
    "both ways": (
        lambda: Packed(nn.LSTM, bidirectional=True, batch_first=True),
        [[2, 6, 1, 4], [6, 6, 6, 6], [1, 1, 6, 1]],
        {"states": 2, "directions": 2},
    ),
    "shorter than the batch, padded": (
        lambda: Packed(nn.GRU, total=7, padding=-1.5, num_layers=2),
        [[5, 3, 2, 5], [1, 5, 1, 1]],
        {"first": False, "states": 1, "directions": 2},
    ),
    "sorted": (
        lambda: Packed(nn.RNN, is_sorted=True, nonlinearity="relu", bias=False, batch_first=True),
        [[6, 4, 4, 1], [6, 1, 1, 1]],
        {},
    ),
}


@pytest.mark.composes(
    "`pack_padded_sequence`, recurrent layers, `pad_packed_sequence`",
    "works: lengths are data; that of the longest sequence is read before the call",
    section="Guards",
)
@pytest.mark.parametrize(("make", "lengths", "options"), CASES.values(), ids=CASES)
def test_lengths_are_data(make, lengths, options):
    module = make()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, sample(lengths[0], **options).args, on_miss="error")
    for each in lengths:
        call = sample(each, **options)
        ours, theirs = run(module, call), run(eager, call)
        assert_same(ours, theirs, rtol=1e-10, atol=1e-12)
    assert stats(module).hits == len(lengths)


@pytest.mark.parametrize("is_sorted", sampled([False, True], [True]))
def test_lengths_on_the_host_beside_a_gpus_tensors(is_sorted):
    """As loaders give them, for ``pack_padded_sequence`` wants them there."""
    module = Packed(nn.LSTM, is_sorted, batch_first=True)
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, on_miss="compile")
    for lengths in ([6, 4, 4, 1], [6, 6, 3, 3]):
        call = sample(lengths)
        call = Call((call.args[0], call.args[1].cpu()))
        assert_same(run(module, call), run(eager, call), rtol=1e-10, atol=1e-12)
    assert stats(module).hits == 2 and len(stats(module).entries) == 1


def test_another_longest_sequence_is_another_entry_and_wrong_lengths_are_eagers_error():
    module = Packed(nn.GRU, is_sorted=True, batch_first=True)
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, on_miss="compile")
    for lengths in ([6, 3, 1, 1], [4, 4, 2, 1], [6, 2, 2, 1]):
        call = sample(lengths)
        assert_same(run(module, call), run(eager, call), rtol=1e-10, atol=1e-12)
    assert stats(module).hits == 3 and len(stats(module).entries) == 2
    for lengths in ([3, 6, 1, 1], [6, 3, 1, 0]):
        with pytest.raises(RuntimeError) as theirs:
            eager(*sample(lengths).args)
        with pytest.raises(RuntimeError) as ours:
            module(*sample(lengths).args)
        assert str(ours.value) == str(theirs.value)


class Used(nn.Module):
    """Does something with packed rows."""

    def __init__(self, use, **options):
        super().__init__()
        self.layer, self.use = nn.LSTM(WIDTH, SIZE, **options).double(), use

    def forward(self, x, lengths):
        rows, _ = self.layer(pack_padded_sequence(x, lengths.cpu(), True, False))
        return self.use(rows)


def _padded(rows):
    return pad_packed_sequence(rows)[0]


USES = {
    "rows": (lambda rows: rows.data.square().sum(), {}),
    "how many rows": (lambda rows: _padded(rows) / rows.data.shape[0], {}),
    "a result": (lambda rows: rows, {}),
    "a layer of its own": (lambda rows: _padded(PackedSequence(rows.data.tanh(), *rows[1:])), {}),
    "dropout between layers": (_padded, {"num_layers": 2, "dropout": 0.5}),
    "a projection": (_padded, {"proj_size": 2}),
}


@pytest.mark.parametrize(("use", "options"), USES.values(), ids=USES)
def test_rows_are_for_layers_alone(use, options):
    module, call = Used(use, **options), sample([2, 6, 1, 4])
    with pytest.raises(UnsupportedModule, match="packed sequence") as refused:
        add_tvm_dispatch(module, call.args)
    (problem,) = refused.value.ops
    assert ("dropout" in problem.op) == ("dropout" in options)
    assert problem.where.startswith("forward's result" if use is USES["a result"][0] else __file__)
    assert examine(module, call.args).unsupported
