"""Gradients of a gather with one index in each row, as a loss has: a comparison in a kernel, nothing is scattered.

The generated test over all rules and torch's own samples check the numbers.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from autodiff.ir import results
from bridge import add_tvm_dispatch, lower, stats
from tests.sampling import sampled


class Gather(torch.nn.Module):
    def forward(self, x, index):
        return torch.exp(torch.gather(x, 1, index))


class Loss(torch.nn.Module):
    def forward(self, x, index):
        return F.cross_entropy(x, index[:, 0])


def operators(module, columns, count):
    x = torch.randn(5, columns, requires_grad=True, dtype=torch.float64)
    lowered = lower(module, (x, torch.randint(0, columns, (5, count))))
    return str(lowered.backward), lowered


@pytest.mark.parametrize("module", [Gather(), Loss()], ids=["gather", "cross-entropy"])
def test_one_index_in_a_row_is_compared(module):
    text, lowered = operators(module, 7, 1)
    assert "scatter" not in text and "R.equal" in text
    lowered.check()


def test_several_are_added_up():
    text, lowered = operators(Gather(), 3, 6)
    assert "scatter" in text
    lowered.check()


class Rows(torch.nn.Module):
    """Log-softmax along an axis; one number of a row is read, or all; cast between, as under a GPU's autocast."""

    def __init__(self, all_are_read: bool, cast: torch.dtype | None = None):
        super().__init__()
        self.all_are_read, self.cast = all_are_read, cast

    def forward(self, x, index):
        y = F.log_softmax(x, 1)
        loss = F.nll_loss(y if self.cast is None else y.to(self.cast), index, ignore_index=1)
        return (loss, y) if self.all_are_read else loss


@pytest.mark.parametrize(
    ("all_are_read", "dtype", "cast"),
    sampled(
        [
            (all_are_read, *types)
            for all_are_read in (False, True)
            for types in ((torch.float64, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32))
        ],
        lambda case: not case[0] or case[2] is not None,
    ),
)
def test_a_loss_keeps_numbers_of_a_row(all_are_read, dtype, cast):
    """Two to recompute the row, and the picked number: the forward writes no rows, and the backward sums none."""
    x = torch.randn(2, 7, 3, 2, requires_grad=True, dtype=dtype)
    lowered = lower(Rows(all_are_read, cast), (x, torch.randint(0, 7, (2, 3, 2))))
    lowered.check()
    if all_are_read:
        return
    kept = [shape_of(var) for var in saved_tensors(lowered)]
    assert kept.count([2, 1, 3, 2]) == 3 and [2, 7, 3, 2] not in kept
    assert "R.nn.log_softmax" not in str(lowered.forward) and "R.sum" not in str(lowered.backward)


def test_of_widened_rows_one_number_is_read_narrow():
    """As under autocast: a bfloat16 product, whose cross-entropy is computed in float32."""

    class Widened(torch.nn.Module):
        def forward(self, x, index):
            return F.cross_entropy((x * 2).float().view(5, 7), index)

    x = torch.randn(5, 1, 7, requires_grad=True, dtype=torch.bfloat16)
    lowered = lower(Widened(), (x, torch.randint(0, 7, (5,))))
    lowered.check()
    (gather,) = [line for line in str(lowered.forward).splitlines() if "R.gather_elements(" in line]
    assert 'R.Tensor((5, 1), dtype="bfloat16")' in gather


def saved_tensors(lowered):
    return results(lowered.forward)[lowered.num_results :]


def shape_of(var):
    return list(map(int, var.ty.shape.values))


def test_one_row_of_as_many_classes_as_a_call_has():
    module, labels = Loss(), torch.zeros(1, 1, dtype=torch.long)
    dims = ({1: torch.export.Dim("classes")}, {})
    add_tvm_dispatch(module, (torch.randn(1, 6, requires_grad=True), labels), dynamic_shapes=dims)
    x = torch.randn(1, 9, requires_grad=True)
    loss = module(x, labels)
    torch.testing.assert_close(loss, F.cross_entropy(x, labels[:, 0]))
    torch.testing.assert_close(torch.autograd.grad(loss, x)[0], x.detach().softmax(1) - F.one_hot(labels[0], 9))
    assert stats(module).hits == 1
