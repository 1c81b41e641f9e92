"""Fused dropout, as on a GPU: its observed draws, its masks by torch, and the results.

``native_dropout`` called by name is the same operator on the CPU, so most of this needs no GPU.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, lower, stats
from bridge.base.modes import while_active
from bridge.base.torch_fakes import fake_mode
from bridge.capture import Draw, DropoutOperand, StepMasks
from bridge.capture.draws import DrawRecorder, IsolatedRNG
from bridge.compile import Gpu
from bridge.rng.computed import NATIVE_DROPOUT, FusedDropout, FusedSteps
from bridge.rng.draws import Draws
from tests.bridge.compare import Call, Function, assert_same, run
from tests.sampling import sampled


def dropped(x, rate, train=True):
    return *torch.native_dropout(x, rate, train), torch.rand(3)


def among_others(x):
    y, mask = torch.native_dropout(F.dropout(x, 0.2), 0.15, True)
    return F.dropout(y, 0.3) * torch.rand(3, 1, 1), mask


ROUNDED = [(rate, dtype) for rate in (0.1, 0.15) for dtype in (torch.float64, torch.float32, torch.bfloat16)]
ALWAYS = [(0.1, torch.float64), (0.15, torch.float32), (0.15, torch.bfloat16)]


@pytest.mark.parametrize(("rate", "dtype"), sampled(ROUNDED, ALWAYS))
def test_masks_values_gradients_and_generator_are_eagers(rate, dtype):
    """For a rate of 0.15, ``1 / (1 - rate)`` is another float32 number if ``1 - rate`` is rounded first."""
    ours, eager = Function(lambda x: dropped(x, rate)), Function(lambda x: dropped(x, rate))
    x = torch.randn(7, 33, dtype=dtype, requires_grad=True)
    add_tvm_dispatch(ours, x)
    for seed in range(3):
        assert_same(run(ours, Call((x,)), seed=seed), run(eager, Call((x,)), seed=seed), rtol=0, atol=0)
    assert stats(ours).hits == 3 and not stats(ours).misses


@pytest.mark.parametrize("layout", [lambda x: x.t(), lambda x: x[:, 1:], lambda x: x[1].expand(5, 33)])
def test_masks_of_any_layout(layout):
    def function(x):
        return torch.native_dropout(layout(x), 0.4, True)[0]

    ours, eager, x = Function(function), Function(function), torch.randn(7, 33, dtype=torch.float64, requires_grad=True)
    add_tvm_dispatch(ours, x)
    assert_same(run(ours, Call((x,))), run(eager, Call((x,))), rtol=1e-10, atol=1e-12)
    assert stats(ours).hits == 1


def test_the_masks_of_a_loops_steps_are_one_draw():
    layouts = [((3, 5), (5, 1)), ((2, 3), (1, 2))] * 4
    each = [
        Draw(NATIVE_DROPOUT, shape, stride, torch.bool, (0.4, True), operand=DropoutOperand(torch.float64, stride))
        for shape, stride in layouts
    ]
    steps = StepMasks((15, 6), (0.6, 0.6), torch.float64, tuple(each))
    whole = Draw("aten.bernoulli_.float", (4, 21), (21, 1), torch.bool, (0.6,), steps=steps)
    found = []
    for masks in ([FusedDropout(draw) for draw in each], [FusedSteps(whole)]):
        torch.manual_seed(0)
        drawn = [mask.reshape(-1) for maker in masks for mask in maker.draw(None, [])]
        found.append((torch.cat(drawn), torch.get_rng_state()))
    assert all(map(torch.equal, *found)) and 0 < found[0][0].sum() < 84


def test_in_eagers_order_among_other_draws():
    ours, eager, x = Function(among_others), Function(among_others), torch.randn(3, 20, 9, dtype=torch.float64)
    x.requires_grad_()
    add_tvm_dispatch(ours, x)
    assert_same(run(ours, Call((x,))), run(eager, Call((x,))), rtol=1e-10, atol=1e-12)
    assert lower(ours, x).check().ok


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_a_draw_that_decides_nothing_is_refused(rate):
    """Eager still moves the generator. ``torch.nn.functional.dropout`` draws nothing."""
    with pytest.raises(UnsupportedModule, match=f"a mask for the rate {rate}"):
        add_tvm_dispatch(Function(lambda x: dropped(x, rate)), torch.randn(3))
    ours, eager, x = (*(Function(lambda x: F.dropout(x, rate)) for _ in range(2)), torch.randn(3))
    add_tvm_dispatch(ours, x)
    assert_same(run(ours, Call((x,))), run(eager, Call((x,))), rtol=0, atol=0)


def test_outside_of_training_nothing_is_drawn():
    ours, eager, x = (*(Function(lambda x: dropped(x * 2, 0.5, False)) for _ in range(2)), torch.randn(4, 5))
    add_tvm_dispatch(ours, x)
    assert_same(run(ours, Call((x,))), run(eager, Call((x,))), rtol=0, atol=0)


def test_a_call_that_fails_is_eagers_from_the_same_state():
    class Reads(nn.Module):
        def forward(self, x, flag):
            y = torch.native_dropout(x, 0.5, True)[0]
            return y * 2 if flag.sum() > 3 else y + torch.rand_like(x)

    ours, eager, x = Reads(), Reads(), torch.randn(40, 3)
    add_tvm_dispatch(ours, (x, torch.ones(5)))
    for flag in (torch.ones(5), torch.zeros(5)):
        assert_same(run(ours, Call((x, flag))), run(eager, Call((x, flag))), rtol=0, atol=0)
    assert stats(ours).hits == 1 and sum(stats(ours).misses.values()) == 1


# A GPU's behaviour, on fake tensors


def observed(function, *inputs):
    draws, complaints = [], []
    with (mode := fake_mode(allow_non_fake_inputs=True)):
        tensors = [torch.empty_strided(*layout, device="cuda", dtype=torch.float16) for layout in inputs]
        recorder = DrawRecorder(draws, lambda *words: complaints.append(words), tensors)
        with while_active(mode, through=partial(recorder.on_fakes, mode)):
            function(*tensors)
    return draws, complaints


GPU = torch.device("cuda", 0)


def test_dropout_on_a_gpu_is_observed_with_the_layout_of_what_it_reads():
    def function(x):
        F.dropout(x * 2, 0.1)
        F.dropout(x.t(), 0.2)
        F.dropout(x.narrow(0, 2, 5).narrow(1, 3, 3), 0.3)
        F.dropout((x * 2).narrow(1, 3, 3), 0.4)

    draws, complaints = observed(function, ((8, 6), (6, 1)))
    half = torch.float16
    wanted = [
        ((8, 6), (6, 1), 0.1, DropoutOperand(half, (6, 1))),
        ((6, 8), (1, 6), 0.2, DropoutOperand(half, (1, 6), 0, 0)),
        ((5, 3), (3, 1), 0.3, DropoutOperand(half, (6, 1), 30, 0)),
        ((8, 3), (3, 1), 0.4, DropoutOperand(half, (6, 1), 6)),
    ]
    assert not complaints
    for draw, (shape, stride, rate, operand) in zip(draws, wanted, strict=True):
        assert draw == Draw(NATIVE_DROPOUT, shape, stride, torch.bool, (rate, True), (), GPU, operand)
        assert (draw.operand.stride, draw.operand.offset, draw.operand.of) == (
            operand.stride,
            operand.offset,
            operand.of,
        )


def test_of_inputs_in_one_memory_it_is_the_one_that_is_read():
    """Other calls may pass inputs in separate memories."""
    draws, memory = [], torch.empty(48, dtype=torch.float16)
    inputs = [memory[:6], memory[6:30].view(4, 6), memory[30:]]
    with IsolatedRNG(run=DrawRecorder(draws, lambda *words: None, inputs).called):
        for read in (inputs[1], inputs[1][2:], inputs[2], inputs[0]):
            torch.native_dropout(read, 0.1, True)
    assert [(draw.operand.of, draw.operand.offset) for draw in draws] == [(1, 0), (1, 24), (2, 0), (0, 0)]


def test_attention_draws_where_it_is_asked_for_dropout():
    def function(q):
        torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, None, True, 0.0)
        torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, None, True, dropout_p=0.1)

    (draw,), complaints = observed(function, ((2, 3, 8, 16), (384, 128, 16, 1)))
    assert not complaints and draw.is_placed and not draw.is_computed and draw.args == (0.1,)


def test_a_kernel_that_draws_by_itself_is_refused():
    def function(q):
        torch.ops.aten._efficient_attention_forward(q, q, q, None, None, None, None, None, 0.1, 0)

    draws, ((op, reason),) = observed(function, ((2, 3, 8, 16), (384, 128, 16, 1)))
    assert not draws and "efficient_attention" in op and "takes no generator" in reason


def test_every_draw_has_its_device():
    draws, _ = observed(lambda x: (torch.rand(3, device="cuda"), torch.rand(3), torch.randn_like(x)), ((4,), (1,)))
    assert [draw.device for draw in draws] == [GPU, torch.device("cpu"), GPU]


@pytest.mark.parametrize("of, offset, first", [(None, 0, 0), (None, 36, 2), (0, 0, 6), (0, 4, 0), (1, 16, 5)])
def test_the_tensor_to_draw_for_lies_as_eagers(of, offset, first):
    """Its address is equal modulo 16, for inputs at any address."""
    memory = torch.empty(64, dtype=torch.bfloat16)
    inputs = [memory[6:], memory[29:]]
    draw = Draw(
        NATIVE_DROPOUT,
        (4, 3),
        (3, 1),
        torch.bool,
        (0.5, True),
        operand=DropoutOperand(torch.bfloat16, (5, 1), offset, of),
    )
    like = FusedDropout(draw)._like_operand(inputs)
    assert (like.shape, like.stride(), like.dtype) == ((4, 3), (5, 1), torch.bfloat16)
    assert like.data_ptr() % 16 == 2 * first


@pytest.mark.parametrize(
    "count, threads, advance",
    [
        (1, 256, 4),
        (256, 256, 4),
        (257, 512, 4),
        (270336 * 4, 270336, 4),
        (270336 * 4 + 1, 270336, 8),
        (10**8, 270336, 372),
    ],
)
def test_the_launch_on_an_h200(count, threads, advance):
    gpu = Gpu(processors=132, threads=2048)
    assert (gpu.launched(count), gpu.advance(count)) == (threads, advance)


def test_a_draw_of_the_host_is_moved_to_the_program():
    """Only used draws; the others are made in eager's order, and stay on the host."""
    draw = Draw("aten.randn.default", (3,), (1,), torch.float32, ((3,),), (("device", torch.device("cpu")),))
    torch.manual_seed(0)
    made = Draws([draw, draw], [], [1], "Module", device=torch.device("meta")).make()
    state = torch.get_rng_state()
    torch.manual_seed(0)
    torch.randn(3), torch.randn(3)
    assert [tensor.device.type for tensor in made] == ["meta"]
    assert torch.equal(torch.get_rng_state(), state)
