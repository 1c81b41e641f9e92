"""Attention by its formula: torch's numbers; which fused attentions become one."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from tvm import relax

from autodiff.attention import spell_attention
from autodiff.ir import StringImm, bindings, library_name
from autodiff.library import call
from tests.autodiff.evaluate import evaluate, function, tensor_type
from tests.sampling import sampled

SCALE = 0.3


def fused(q, k, v, mask=None, causal=False, kernel="efficient", result=0):
    """A function of one fused attention: minus its result, or the other one."""
    masks = [] if mask is None else [mask]
    batch, heads, rows, width = q.shape
    out = tensor_type(q.new_empty(batch, rows, heads, width))
    sums = tensor_type(q.new_empty(batch, heads, 32).float())

    def build(scope, q, k, v, *masks):
        args = [StringImm(kernel), q, k, v, relax.prim_value(len(masks)), *masks]
        args += [relax.prim_value(int(causal)), relax.prim_value(SCALE)]
        pair = scope.emit(call("attention", args, relax.TupleType([out, sums])))
        return relax.op.negative(scope.emit(relax.TupleGetItem(pair, result)))

    return function(build, q, k, v, *masks)


def fused_on_a_cpu(q, k, v, mask=None, causal=False, dropout=0.0):
    """The result of the CPU's kernel, in the queries' memory layout."""
    masks = [] if mask is None else [mask]
    result = relax.TupleType([tensor_type(q), tensor_type(q[..., 0].float())])

    def build(scope, q, k, v, *masks):
        args = [q, k, v, relax.prim_value(len(masks)), *masks, relax.prim_value(dropout)]
        args += [relax.prim_value(int(causal)), relax.prim_value(SCALE)]
        pair = scope.emit(call("scaled_dot_product_flash_attention", args, result))
        return relax.op.negative(scope.emit(relax.TupleGetItem(pair, 0)))

    return function(build, q, k, v, *masks)


def heads(queries=5, keys=7, dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(2, 3, rows, 4, dtype=dtype) for rows in (queries, keys, keys)]


def library_calls(func):
    return [name for _, value in bindings(func) if (name := library_name(value)) is not None]


@pytest.mark.parametrize(
    ("fused", "masked"),
    sampled(
        [(kernel, masked) for kernel in (fused, fused_on_a_cpu) for masked in ("", "hidden rows", "causal")],
        [(fused, "causal"), (fused, "hidden rows"), (fused_on_a_cpu, "hidden rows")],
    ),
)
def test_torchs_numbers(fused, masked):
    q, k, v = heads()
    mask, causal = None, masked == "causal"
    if masked == "hidden rows":
        mask = torch.randn(2, 1, 5, 7, dtype=torch.float64)
        mask[0, :, 2] = -torch.inf
        mask[1, :, :, 3:] = -torch.inf
    spelled = spell_attention(fused(q, k, v, mask, causal), 0)
    assert library_calls(fused(q, k, v, mask, causal)) and not library_calls(spelled)
    (found,) = evaluate(spelled, *[each for each in (q, k, v, mask) if each is not None])
    wanted = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=SCALE)
    wanted = wanted if found.shape == q.shape else wanted.transpose(1, 2)
    torch.testing.assert_close(-found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "left_alone",
    [
        lambda: fused(*heads(dtype=torch.bfloat16), kernel="flash"),
        lambda: fused(*heads(dtype=torch.float16)),
        lambda: fused(*heads(), result=1),
        lambda: fused(*(torch.empty(2, 3, 4096, 4) for _ in range(3))),
        lambda: fused_on_a_cpu(*heads(dtype=torch.bfloat16)),
        lambda: fused_on_a_cpu(*heads(), dropout=0.1),
        lambda: fused_on_a_cpu(*(torch.empty(2, 3, 2048, 4) for _ in range(3))),
    ],
    ids=["flash", "half", "its sums are read", "too many scores", "half, CPU", "dropout", "too many scores, CPU"],
)
def test_left_alone(left_alone):
    before = left_alone()
    assert spell_attention(before, 0) is before
