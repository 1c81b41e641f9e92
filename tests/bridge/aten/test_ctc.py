"""CTC loss: lengths as tensors and numbers, padded and concatenated targets, reductions, infinite losses, errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bridge import add_tvm_dispatch, lower, stats
from tests.bridge.compare import Call, Function, assert_same, run
from tests.device import DEVICE
from tests.sampling import sampled

STEPS, BATCH, LETTERS, LONGEST = 12, 3, 5, 4
LENGTHS, COUNTS = torch.tensor([12, 10, 8]), torch.tensor([4, 3, 2])
ROWS = torch.tensor([[1, 2, 2, 4], [3, 1, 3, 1], [4, 4, 1, 1]])
LINE = torch.cat([row[:count] for row, count in zip(ROWS, COUNTS, strict=True)])
TOO_SHORT = torch.tensor([12, 10, 1])


def frames(*extents, dtype=torch.float64):
    return torch.randn(*(extents or (STEPS, BATCH, LETTERS)), dtype=dtype, requires_grad=True)


def loss(**options):
    return lambda x, *given: F.ctc_loss(x.log_softmax(-1), *given, **options)


def of_numbers(kind):
    lengths, counts = kind(LENGTHS.tolist()), kind(COUNTS.tolist())
    return lambda x, targets: nn.CTCLoss()(x.log_softmax(-1), targets, lengths, counts)


def unbatched(x, targets):
    return F.ctc_loss(x.log_softmax(-1), targets, (STEPS,), (LONGEST,), reduction="none")


GIVEN = (ROWS, LENGTHS, COUNTS)
CASES = {
    "mean": (loss(), frames, GIVEN),
    "sum": (loss(reduction="sum"), frames, GIVEN),
    "none": (loss(reduction="none"), frames, GIVEN),
    "blank": (loss(blank=2), frames, (ROWS.where(ROWS != 2, 0), LENGTHS, COUNTS)),
    "in a line": (loss(), frames, (LINE, LENGTHS, COUNTS)),
    "int32": (loss(), frames, tuple(each.int() for each in GIVEN)),
    "tuples": (of_numbers(tuple), frames, (ROWS,)),
    "lists, in a line": (of_numbers(list), frames, (LINE,)),
    "unbatched": (unbatched, lambda: frames(STEPS, LETTERS), (ROWS[0],)),
    "torch.ctc_loss": (lambda x, *given: torch.ctc_loss(x.log_softmax(-1), *given, 0, 2), frames, GIVEN),
    "computed lengths": (lambda x, t, n, m: loss()(x, t, n // 2 + 4, (t > 1).sum(1)), frames, GIVEN),
    "infinite": (loss(reduction="none"), frames, (ROWS, TOO_SHORT, COUNTS)),
    "infinite, zero": (loss(zero_infinity=True), frames, (ROWS, TOO_SHORT, COUNTS)),
    "frames alone": (loss(), lambda: frames().detach(), GIVEN),
}


ALIKE = ("sum", "in a line", "torch.ctc_loss")


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    sampled(
        [(name, *kind) for name in CASES for kind in ((torch.float64, 1e-10), (torch.float32, 1e-5))],
        lambda case: case[0] not in ALIKE if case[1] == torch.float64 else case[0] == "infinite, zero",
    ),
)
def test_losses_and_gradients(name, dtype, tolerance):
    function, make, given = CASES[name]
    x = make().detach().to(dtype).requires_grad_(make().requires_grad)
    ours, eager = Function(function), Function(function)
    add_tvm_dispatch(ours, (x, *given))
    assert_same(run(ours, Call((x, *given))), run(eager, Call((x, *given))), rtol=tolerance, atol=tolerance)
    assert stats(ours).hits == 1 and not stats(ours).misses


def test_other_lengths_are_the_same_entry():
    ours, eager, x = Function(loss()), Function(loss()), frames()
    add_tvm_dispatch(ours, (x, *GIVEN))
    for lengths, counts in (([12, 12, 12], [1, 2, 3]), ([9, 4, 7], [2, 2, 4]), ([1, 1, 1], [1, 1, 4])):
        call = Call((x, ROWS, torch.tensor(lengths), torch.tensor(counts)))
        assert_same(run(ours, call), run(eager, call), rtol=1e-10, atol=1e-12)
    assert stats(ours).hits == 3


@pytest.mark.parametrize(
    "lengths, counts, words",
    [([12, 10, 13], [4, 3, 2], "input_length"), ([12, 10, 8], [4, 3, 5], "target"), ([12, 10], [4, 3, 2], "length")],
)
def test_lengths_that_do_not_fit_are_eagers_error(lengths, counts, words):
    ours, eager, x = Function(loss()), Function(loss()), frames()
    add_tvm_dispatch(ours, (x, *GIVEN))
    found = []
    for module in (ours, eager):
        with pytest.raises(RuntimeError, match=words) as raised:
            module(x, ROWS, torch.tensor(lengths), torch.tensor(counts))
        found.append(str(raised.value))
    assert found[0] == found[1]


@pytest.mark.cpu("CUDA's autocast leaves the loss in a half type, which its kernel does not know")
def test_under_autocast_half_types_are_computed_in_float32():
    ours, eager, x = Function(F.ctc_loss), Function(F.ctc_loss), frames(dtype=torch.bfloat16)
    found = []
    for module in (ours, eager):
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            if module is ours:
                add_tvm_dispatch(ours, (x, *GIVEN))
            result = module(x, *GIVEN)
        found.append((result, *torch.autograd.grad(result, x)))
    assert stats(ours).hits == 1 and found[1][0].dtype == torch.float32
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["mean", "tuples", "infinite, zero"])
def test_the_stages_agree_with_each_other(name):
    function, make, given = CASES[name]
    found = lower(Function(function), (make(), *given)).check()
    assert found.ok, found
