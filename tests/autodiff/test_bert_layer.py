"""The whole pipeline on a BERT layer: spelled out, masked, differentiated, cleaned."""

from __future__ import annotations

import pytest
import torch

from autodiff import clean, differentiate, mask_dropout, spell_out
from autodiff.ir import bindings, op_name, shape
from tests.autodiff.bert import NAMES, arguments, relax_layer, torch_layer
from tests.autodiff.evaluate import evaluate
from tests.sampling import sampled

MASKS = 3


def _masks(func, count):
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(shape(param), generator=generator) > 0.1 for param in func.params[len(NAMES) :][:count]]


@pytest.mark.parametrize(
    "required",
    sampled([range(len(NAMES)), [2, 5], [0]], [range(len(NAMES))]),
    ids=["all", "some", "input"],
)
def test_forward_and_gradients_equal_torch(required):
    required = [index for index in required if index != 1]
    args = arguments(torch.float64)
    forward = mask_dropout(spell_out(relax_layer(args)))
    assert [param.name for param in forward.params[len(NAMES) :]] == [f"mask_{index}" for index in range(MASKS)]
    joint = clean(differentiate(forward, [0], required))
    masks = _masks(forward, MASKS)

    leaves = [arg.clone().requires_grad_(index in required) for index, arg in enumerate(args)]
    wanted = torch_layer(leaves, masks)
    grad_out = torch.randn(wanted.shape, dtype=wanted.dtype, generator=torch.Generator().manual_seed(2))
    gradients = torch.autograd.grad(wanted, [leaves[index] for index in required], grad_out)

    got, *got_gradients = evaluate(joint, *args, *masks, grad_out)
    torch.testing.assert_close(got, wanted.detach(), rtol=1e-10, atol=1e-12)
    for name, ours, theirs in zip([NAMES[index] for index in required], got_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


def test_forward_names_do_not_depend_on_what_is_required():
    args = arguments(torch.float32)
    forward = clean(mask_dropout(spell_out(relax_layer(args))))
    names = [var.name for var, _ in bindings(forward)]
    for required in ([0], [2, 3], [0, 2, 16]):
        joint = clean(differentiate(forward, [0], required))
        assert [var.name for var, _ in bindings(joint)][: len(names)] == names


def test_what_differentiation_leaves_behind_is_gone():
    forward = mask_dropout(spell_out(relax_layer(arguments(torch.float32))))
    joint = clean(differentiate(forward, [0], [0, *range(2, len(NAMES))]))
    ops = {op_name(value) for _, value in bindings(joint)}
    assert not ops & {
        "relax.zeros",
        "relax.ones",
        "relax.zeros_like",
        "relax.ones_like",
        "relax.collapse_sum_to",
        "relax.collapse_sum_like",
        "relax.expand_dims",
        "relax.squeeze",
        "relax.nn.layer_norm",
        "relax.nn.dropout",
    }


def test_twelve_layers_clean_to_a_fixed_point():
    forward = mask_dropout(spell_out(relax_layer(arguments(torch.float32), layers=12)))
    joint = clean(differentiate(forward, [0], [0, *range(2, len(NAMES))]))
    assert clean(joint) is joint
