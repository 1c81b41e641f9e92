"""A program's promises about memory, inputs, results and threads."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch
from tvm import relax
from tvm.relax import op as R

from bridge.base.session import SESSION
from bridge.compile import CallLibrary, Launch, MakeView, compile_function
from tests.bridge.compile_helpers import assert_same, function, program, run
from tests.sampling import sampled
from tests.threads import together

FLOAT = "float32"


def layer(emit, x, w, b):
    h = emit(R.add(emit(R.matmul(x, emit(R.permute_dims(w)))), b))
    h = emit(R.nn.gelu(h))
    centred = emit(R.subtract(h, emit(R.mean(h, -1, keepdims=True))))
    variance = emit(R.mean(emit(R.multiply(centred, centred)), -1, keepdims=True))
    normalized = emit(R.multiply(centred, emit(R.rsqrt(emit(R.add(variance, relax.const(1e-5)))))))
    return emit(R.add(emit(R.multiply(normalized, b)), b))


def layer_eager(x, w, b):
    return torch.nn.functional.layer_norm(torch.nn.functional.gelu(x @ w.T + b), b.shape, b, b)


SHAPES = [((64, 48), FLOAT), ((80, 48), FLOAT), ((80,), FLOAT)]


def inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape, _ in SHAPES]


def test_results_of_a_call_survive_the_next():
    compiled = program(SHAPES, lambda emit, *p: [layer(emit, *p)])
    (first,) = compiled(inputs(0))
    copy = first.clone()
    (second,) = compiled(inputs(1))
    assert torch.equal(first, copy)
    assert first.data_ptr() != second.data_ptr()
    assert_same(second, layer_eager(*inputs(1)), rtol=1e-4, atol=1e-4)


def test_threads_do_not_share_an_arena():
    compiled = program(SHAPES, lambda emit, *p: [layer(emit, *p)])
    wanted = [layer_eager(*inputs(seed)) for seed in range(4)]
    failures = []

    def work(seed):
        for _ in range(50):
            (result,) = compiled(inputs(seed))
            if not torch.allclose(result, wanted[seed], rtol=1e-4, atol=1e-4):
                failures.append(seed)

    together(*(partial(work, seed) for seed in range(4)))
    assert not failures


def test_equal_functions_share_a_program_and_equal_kernels_are_built_once():
    SESSION.reset("programs")
    first = program(SHAPES, lambda emit, *p: [layer(emit, *p)])
    assert program(SHAPES, lambda emit, *p: [layer(emit, *p)]) is first
    SESSION.reset("programs")
    assert program(SHAPES, lambda emit, *p: [layer(emit, *p)]) is not first


def test_steps_tell_what_runs():
    def body(emit, x, w, b):
        return [layer(emit, x, w, emit(R.concat([emit(R.strided_slice(b, [0], [0], [30])), b])))]

    compiled = program([((64, 48), FLOAT), ((110, 48), FLOAT), ((80,), FLOAT)], body)
    kinds = [type(step) for step in compiled.steps]
    assert kinds.count(CallLibrary) >= 1 and MakeView in kinds and kinds[-1] is Launch, str(compiled)
    assert "erf" in compiled.steps[-1].ops and compiled.steps[-1].ops.count("sum") == 2
    assert "T.prim_func" in compiled.source(compiled.steps[-1].name)
    assert set(compiled.timings) == {"translate", "fuse", "generate", "build", "plan"}
    assert all(step.name in str(compiled) for step in compiled.steps)
    with pytest.raises(KeyError):
        compiled.source("no such kernel")


def test_inputs_of_any_strides_and_alignment():
    x, w, b = inputs()
    compiled = program(SHAPES, lambda emit, *p: [layer(emit, *p)])
    wanted = layer_eager(x, w, b)
    strided = x.T.contiguous().T
    shifted = torch.empty(b.numel() + 1)[1:].copy_(b)
    expanded = b[:1].expand(80)
    assert_same(compiled([strided, w, shifted])[0], wanted, rtol=1e-4, atol=1e-4)
    assert_same(compiled([x, w, expanded])[0], layer_eager(x, w, expanded), rtol=1e-4, atol=1e-4)
    odd = torch.empty(x.numel() + 3)[3:].view_as(x).copy_(x)
    assert_same(compiled([odd, w, b])[0], wanted, rtol=1e-4, atol=1e-4)


def test_parameters_that_require_grad_are_read_without_a_graph():
    x, w, b = inputs()
    (result,) = program(SHAPES, lambda emit, *p: [layer(emit, *p)])([x, torch.nn.Parameter(w), torch.nn.Parameter(b)])
    assert not result.requires_grad
    assert_same(result, layer_eager(x, w, b), rtol=1e-4, atol=1e-4)


def test_wrong_inputs_are_named():
    compiled = program(SHAPES, lambda emit, *p: [layer(emit, *p)])
    x, w, b = inputs()
    with pytest.raises(ValueError, match="wanted 3 inputs, got 2"):
        compiled([x, w])
    with pytest.raises(ValueError, match=r"input 1 .* has shape \(48, 80\)"):
        compiled([x, w.T.contiguous(), b])
    with pytest.raises(ValueError, match=r"torch.float64 on cpu, wanted"):
        compiled([x.double(), w, b])
    assert_same(compiled([x, w, b])[0], layer_eager(x, w, b), rtol=1e-4, atol=1e-4)


def test_a_parameter_as_result_is_the_input_object():
    x = torch.randn(3, 4).T
    one, two, three = run([x], lambda emit, p: [p, emit(R.negative(p)), p])
    assert one is x and three is x
    assert_same(two, -x)


def test_views_as_results_are_dense_and_not_of_the_inputs():
    x = torch.randn(3, 4)

    def body(emit, p):
        y = emit(R.exp(p))
        return [
            emit(R.permute_dims(p)),
            emit(R.reshape(p, (12,))),
            emit(R.permute_dims(y)),
            emit(R.reshape(y, (2, 6))),
            emit(R.strided_slice(y, [0], [1], [3])),
            emit(R.broadcast_to(emit(R.reshape(y, (1, 12))), (2, 12))),
        ]

    ours = run([x], body)
    y = x.exp()
    wanted = [x.T, x.reshape(12), y.T, y.reshape(2, 6), y[1:3], y.reshape(1, 12).expand(2, 12)]
    for our, their in zip(ours, wanted, strict=True):
        assert_same(our, their.contiguous())
        assert our.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_constants_as_results():
    a, b, c = run(
        [torch.ones(2)],
        lambda emit, p: [
            emit(R.zeros((2, 3), FLOAT)),
            emit(R.full((4,), relax.const(7, "int64"))),
            emit(R.arange(0, 5, 1, "int64")),
        ],
    )
    assert_same(a, torch.zeros(2, 3))
    assert_same(b, torch.full((4,), 7))
    assert_same(c, torch.arange(5))


def test_scalars():
    x, y = torch.tensor(2.0), torch.tensor(3.0)
    total, mean = run([x, y], lambda emit, p, q: [emit(R.add(p, q)), emit(R.mean(emit(R.multiply(p, q))))])
    assert_same(total, torch.tensor(5.0))
    assert_same(mean, torch.tensor(6.0))


def test_empty_tensors():
    x = torch.empty(0, 5)
    y, total, columns, rows, largest = run(
        [x],
        lambda emit, p: [
            emit(R.exp(p)),
            emit(R.sum(p)),
            emit(R.sum(p, 0)),
            emit(R.sum(p, 1)),
            emit(R.matmul(emit(R.permute_dims(p)), p)),
        ],
    )
    assert_same(y, x)
    assert_same(total, torch.tensor(0.0))
    assert_same(columns, torch.zeros(5))
    assert_same(rows, torch.empty(0))
    assert_same(largest, torch.zeros(5, 5))


def test_large_reductions():
    """Two-stage rows, chunked columns, and both at once, where the sizes are not round."""
    torch.manual_seed(0)
    x = torch.randn(1037, 301, dtype=torch.float64)
    y = torch.randn(3, 700, 130, dtype=torch.float64)
    ours = run(
        [x, y],
        lambda emit, p, q: [
            emit(R.sum(p)),
            emit(R.sum(p, 0)),
            emit(R.max(p, 0)),
            emit(R.sum(q, 1)),
            emit(R.sum(q, [0, 1])),
            emit(R.sum(q, [0, 2])),
            emit(R.min(q)),
        ],
    )
    wanted = [x.sum(), x.sum(0), x.amax(0), y.sum(1), y.sum((0, 1)), y.sum((0, 2)), y.amin()]
    for our, their in zip(ours, wanted, strict=True):
        assert_same(our, their, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "length", sampled([1, 2, 15, 16, 17, 31, 64, 65, 100, 1024, 1030], [1, 2, 15, 16, 17, 65, 1030])
)
def test_rows_of_every_remainder(length):
    torch.manual_seed(0)
    x = torch.randn(5, length, dtype=torch.float64)
    ours = run([x], lambda emit, p: [emit(R.nn.softmax(p, -1)), emit(R.sum(p, -1)), emit(R.sum(p, 0))])
    for our, their in zip(ours, [x.softmax(-1), x.sum(-1), x.sum(0)], strict=True):
        assert_same(our, their, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("length", [4095, 4096, 4097, 9000, 300_007])
def test_flat_kernels_of_every_remainder(length):
    x = torch.randn(length + 2, dtype=torch.float64)[1:-1]
    (ours,) = run([x], lambda emit, p: [emit(R.tanh(p))])
    assert_same(ours, torch.tanh(x), rtol=1e-12, atol=0)


def test_row_fusion_makes_one_kernel():
    def backward(emit, g, x, w):
        mean = emit(R.mean(x, [-1], keepdims=True))
        centred = emit(R.subtract(x, mean))
        variance = emit(R.mean(emit(R.multiply(centred, centred)), [-1], keepdims=True))
        rstd = emit(R.rsqrt(emit(R.add(variance, relax.const(1e-5, FLOAT)))))
        normal = emit(R.multiply(centred, rstd))
        gw = emit(R.multiply(g, w))
        first = emit(R.mean(gw, [-1], keepdims=True))
        second = emit(R.mean(emit(R.multiply(gw, normal)), [-1], keepdims=True))
        inner = emit(R.subtract(emit(R.subtract(gw, first)), emit(R.multiply(normal, second))))
        return [
            emit(R.multiply(inner, rstd)),
            emit(R.sum(emit(R.multiply(g, normal)), [0, 1])),
            emit(R.sum(g, [0, 1])),
        ]

    shapes = [((8, 64, 96), FLOAT), ((8, 64, 96), FLOAT), ((96,), FLOAT)]
    compiled = compile_function(function(shapes, backward), name="backward")
    assert len(compiled.steps) == 1, str(compiled)
    torch.manual_seed(0)
    g, x, w = (torch.randn(shape) for shape, _ in shapes)
    mean, rstd = x.mean(-1, keepdim=True), (x.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
    wanted = torch.ops.aten.native_layer_norm_backward(g, x, (96,), mean, rstd, w, w, (True, True, True))
    for our, their in zip(compiled([g, x, w]), wanted, strict=True):
        assert_same(our, their, rtol=1e-3, atol=1e-4)


def test_a_bias_is_added_while_heads_are_transposed():
    def heads(emit, x, b):
        y = emit(R.reshape(emit(R.add(x, b)), (2, 16, 4, 8)))
        turned = emit(R.permute_dims(y, [0, 2, 1, 3]))
        return [emit(R.matmul(turned, emit(R.permute_dims(turned, [0, 1, 3, 2]))))]

    compiled = program([((32, 32), FLOAT), ((32,), FLOAT)], heads)
    kernels = [step for step in compiled.steps if isinstance(step, Launch)]
    assert kernels and all("copy" not in step.ops for step in kernels), str(compiled)
    torch.manual_seed(0)
    x, b = torch.randn(32, 32), torch.randn(32)
    turned = (x + b).reshape(2, 16, 4, 8).permute(0, 2, 1, 3)
    assert_same(compiled([x, b])[0], turned @ turned.mT, rtol=1e-5, atol=1e-5)


def test_consumed_inputs_are_let_go_after_their_last_use(monkeypatch):
    params = [((8, 8), "float32")] * 3
    compiled = program(params, lambda emit, p, q, r: [emit(R.matmul(emit(R.matmul(p, q)), r))])
    alive: list[list[bool]] = []
    inputs = [torch.ones(8, 8) for _ in params]
    references = [weakref.ref(tensor) for tensor in inputs]

    def watched(action):
        def run_and_look(frame):
            alive.append([reference() is not None for reference in references])
            action(frame)

        return run_and_look

    executor = compiled.executor
    monkeypatch.setattr(executor, "actions", tuple((watched(action), dead) for action, dead in executor.actions))
    (result,) = compiled(inputs, consume=True)
    assert inputs == []
    assert alive == [[True, True, True], [False, False, True]]
    assert_same(result, torch.full((8, 8), 64.0))


def test_inputs_that_are_results_survive_consumption():
    compiled = program([((4,), "float32")], lambda emit, p: [p, emit(R.add(p, p))])
    given = torch.arange(4.0)
    same, twice = compiled([given], consume=True)
    assert same is given
    assert_same(twice, 2 * given)


def test_an_input_on_another_device_is_refused():
    x, w, b = inputs()
    with pytest.raises(ValueError, match=r"on meta, wanted .* on cpu"):
        program(SHAPES, lambda emit, *p: [layer(emit, *p)])([x.to("meta"), w, b])
