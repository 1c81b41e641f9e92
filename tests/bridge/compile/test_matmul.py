"""Matrix products in generated code: every layout, batch and edge against torch in float64, and where results lie."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from tvm.relax import op as R

from bridge import add_tvm_dispatch, stats
from bridge.compile import Launch, MakeView
from bridge.compile.cpu.products import CpuProducts
from bridge.compile.schedule.products import GENERATED
from tests.bridge.compare import check_module
from tests.bridge.compile_helpers import program
from tests.sampling import sampled, spread

SIZES = [(1, 1, 1), (3, 5, 7), (14, 16, 32), (15, 33, 17), (29, 600, 70), (13, 40, 40), (100, 257, 193), (64, 512, 96)]
LAYOUTS = list(itertools.product((False, True), repeat=2))


@pytest.fixture(autouse=True)
def generated_everywhere(monkeypatch):
    """Every product of these tests is generated code, whatever the processor and the size."""
    monkeypatch.setattr(CpuProducts, "choose", lambda policy, product: GENERATED)


def operand(shape, transposed, dtype):
    """A tensor that is ``shape`` after its last two dimensions are swapped, if ``transposed``."""
    return torch.randn((*shape[:-2], shape[-1], shape[-2]) if transposed else shape, dtype=dtype)


def multiply(a, b, transposed=(False, False), order=None):
    """``(a @ b).permute(order)`` and its program, operands swapped first where they are stored transposed."""

    def swap(emit, x):
        rank = len(x.ty.shape)
        return emit(R.permute_dims(x, [*range(rank - 2), rank - 1, rank - 2]))

    def body(emit, *operands):
        x, y = (swap(emit, v) if turned else v for v, turned in zip(operands, transposed, strict=True))
        z = emit(R.matmul(x, y))
        return [z if order is None else emit(R.permute_dims(z, order))]

    dtype = str(a.dtype).removeprefix("torch.")
    compiled = program([(tuple(a.shape), dtype), (tuple(b.shape), dtype)], body)
    return compiled([a, b])[0], compiled


def reference(a, b, transposed=(False, False)):
    a, b = (v.mT if turned else v for v, turned in zip((a, b), transposed, strict=True))
    return a.double() @ b.double(), a @ b


def assert_near(ours, exact, theirs):
    """Within twice the distance of torch's own product; in float64, where that is zero, to 1e-12."""
    distance = (ours.double() - exact).abs().max()
    floor = 1e-12 if ours.dtype is torch.float64 else 4 * torch.finfo(ours.dtype).eps
    allowed = 2 * (theirs.double() - exact).abs().max() + floor * exact.abs().max()
    assert distance <= allowed, (float(distance), float(allowed))


@pytest.mark.parametrize("transposed", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_layout_and_edge(size, dtype, transposed):
    torch.manual_seed(0)
    m, k, n = size
    a, b = operand((m, k), transposed[0], dtype), operand((k, n), transposed[1], dtype)
    ours, compiled = multiply(a, b, transposed)
    assert [step.name for step in compiled.steps] == [f"product_{str(dtype).removeprefix('torch.')}"]
    assert_near(ours, *reference(a, b, transposed))


@pytest.mark.parametrize("transposed", LAYOUTS)
@pytest.mark.parametrize(
    "batches",
    [((3,), (3,)), ((2, 3), (2, 3)), ((2, 3), ()), ((), (2, 3)), ((2, 1), (1, 3)), ((2, 1, 2), (1, 3, 1))],
    ids=str,
)
def test_batches_and_broadcasts(batches, transposed):
    torch.manual_seed(1)
    a = operand((*batches[0], 19, 24), transposed[0], torch.float32)
    b = operand((*batches[1], 24, 35), transposed[1], torch.float32)
    ours, _ = multiply(a, b, transposed)
    assert_near(ours, *reference(a, b, transposed))


ORDERS = list(itertools.permutations(range(4)))


@pytest.mark.parametrize("order", sampled(map(pytest.param, ORDERS), spread(ORDERS)), ids=str)
def test_the_result_is_written_in_the_order_in_which_it_is_read(order):
    torch.manual_seed(2)
    a, b = torch.randn(2, 3, 18, 24), torch.randn(2, 3, 24, 21)
    ours, compiled = multiply(a, b, order=list(order))
    exact, theirs = reference(a, b)
    assert ours.is_contiguous()
    assert_near(ours, exact.permute(order), theirs.permute(order))
    assert len(compiled.steps) == (1 if order[-1] in (2, 3) else 2), str(compiled)


def test_heads_are_split_and_joined_without_a_copy():
    """(batch, sequence, heads, width) products as an attention makes them: two products, nothing else."""
    torch.manual_seed(3)
    q, k = torch.randn(2, 16, 3, 8), torch.randn(2, 16, 3, 8)

    def body(emit, q, k):
        scores = emit(R.matmul(emit(R.permute_dims(q, [0, 2, 1, 3])), emit(R.permute_dims(k, [0, 2, 3, 1]))))
        mixed = emit(R.matmul(scores, emit(R.permute_dims(k, [0, 2, 1, 3]))))
        return [emit(R.reshape(emit(R.permute_dims(mixed, [0, 2, 1, 3])), (32, 24)))]

    compiled = program([((2, 16, 3, 8), "float32")] * 2, body)
    assert [type(step) for step in compiled.steps if not isinstance(step, MakeView)] == [Launch, Launch]
    heads = [x.double().permute(0, 2, 1, 3) for x in (q, k)]
    exact = (heads[0] @ heads[1].mT @ heads[1]).permute(0, 2, 1, 3).reshape(32, 24)
    torch.testing.assert_close(compiled([q, k])[0].double(), exact, rtol=1e-4, atol=1e-4)


def test_nan_and_infinity_pass_through():
    a, b = torch.ones(16, 20), torch.ones(20, 40)
    a[3, 5], b[7, 11] = float("nan"), float("inf")
    ours, _ = multiply(a, b)
    torch.testing.assert_close(ours, a @ b, equal_nan=True)
    assert ours[3].isnan().all() and ours[0, 11].isinf()


def test_the_result_does_not_depend_on_the_number_of_threads():
    torch.manual_seed(4)
    a, b = torch.randn(300, 520), torch.randn(520, 260)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(multiply(a, b)[0])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("dtype", sampled([torch.float32, torch.float64], [torch.float32]))
def test_a_transformer_layer_trains_as_in_eager(dtype):
    def layer():
        return nn.TransformerEncoderLayer(24, 3, 40, dropout=0.1, batch_first=True)

    check_module(layer, lambda: torch.randn(2, 18, 24).requires_grad_(), dtype=dtype)


def test_parameters_may_move_between_calls():
    """The kernel reads the call's addresses."""
    torch.manual_seed(5)
    linear = nn.Linear(24, 40)
    x = torch.randn(20, 24)
    add_tvm_dispatch(linear, x)
    for _ in range(3):
        linear.weight.data = torch.randn(40, 24)
        linear.bias.data = torch.randn(40)
        torch.testing.assert_close(linear(x), nn.functional.linear(x, linear.weight, linear.bias), rtol=1e-4, atol=1e-4)
    assert stats(linear).hits == 3
