"""Every operator of the loop generator, the library and the fallback, against torch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from tvm import relax
from tvm.relax import op as R

from tests.bridge.compile_helpers import assert_same, run
from tests.sampling import sampled

SHAPE = (6, 10, 21)
UNARY = {
    "exp": (R.exp, torch.exp),
    "log": (R.log, torch.log),
    "tanh": (R.tanh, torch.tanh),
    "erf": (R.erf, torch.erf),
    "sigmoid": (R.sigmoid, torch.sigmoid),
    "sqrt": (R.sqrt, torch.sqrt),
    "rsqrt": (R.rsqrt, torch.rsqrt),
    "negative": (R.negative, torch.neg),
    "abs": (R.abs, torch.abs),
    "sign": (R.sign, torch.sign),
    "square": (R.square, torch.square),
    "floor": (R.floor, torch.floor),
    "ceil": (R.ceil, torch.ceil),
    "round": (R.round, torch.round),
    "trunc": (R.trunc, torch.trunc),
    "sin": (R.sin, torch.sin),
    "cos": (R.cos, torch.cos),
    "tan": (R.tan, torch.tan),
    "atan": (R.atan, torch.atan),
    "sinh": (R.sinh, torch.sinh),
    "asinh": (R.asinh, torch.asinh),
    "gelu": (R.nn.gelu, torch.nn.functional.gelu),
    "gelu_tanh": (R.nn.gelu_tanh, lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    "silu": (R.nn.silu, torch.nn.functional.silu),
    "relu": (R.nn.relu, torch.relu),
    "softmax": (lambda x: R.nn.softmax(x, -1), lambda x: torch.softmax(x, -1)),
    "softmax_first": (lambda x: R.nn.softmax(x, 0), lambda x: torch.softmax(x, 0)),
    "log_softmax": (lambda x: R.nn.log_softmax(x, -1), lambda x: torch.log_softmax(x, -1)),
    "clip": (lambda x: R.clip(x, -0.5, 0.7), lambda x: torch.clamp(x, -0.5, 0.7)),
    "cube": (lambda x: R.power(x, relax.const(3.0, str(x.ty.dtype))), lambda x: x**3),
    "power": (lambda x: R.power(R.abs(x), relax.const(1.7, str(x.ty.dtype))), lambda x: x.abs() ** 1.7),
    "mean": (lambda x: R.mean(x, -1), lambda x: x.mean(-1)),
    "mean_all": (R.mean, torch.mean),
    "sum_first": (lambda x: R.sum(x, 0), lambda x: x.sum(0)),
    "sum_middle": (lambda x: R.sum(x, 1, keepdims=True), lambda x: x.sum(1, keepdim=True)),
    "sum_outer": (lambda x: R.sum(x, [0, 2]), lambda x: x.sum((0, 2))),
    "max": (lambda x: R.max(x, -1), lambda x: x.amax(-1)),
    "min_all": (R.min, torch.amin),
    "prod": (lambda x: R.prod(x, 1), lambda x: x.prod(1)),
    "permute": (lambda x: R.permute_dims(x, [2, 0, 1]), lambda x: x.permute(2, 0, 1).contiguous()),
    "permute_reshape": (
        lambda x: R.reshape(R.permute_dims(x), (SHAPE[0] * SHAPE[1] * SHAPE[2],)),
        lambda x: x.permute(2, 1, 0).reshape(-1),
    ),
    "slice": (
        lambda x: R.strided_slice(x, [1, 2], [1, -9], [9, -1], [1, 2]),
        lambda x: x[:, 1:9, -9:-1:2].contiguous(),
    ),
    "broadcast": (lambda x: R.broadcast_to(R.mean(x, 1, keepdims=True), x.ty.shape), None),
    "concat": (lambda x: R.concat([x, x], 1), lambda x: torch.cat([x, x], 1)),
    "split": (
        lambda x: (lambda parts: R.add(parts[0], parts[1]))(R.split(x, 2, 0)),
        lambda x: torch.add(*x.split(x.shape[0] // 2, 0)),
    ),
    "cumsum": (lambda x: R.cumsum(x, 1), lambda x: x.cumsum(1)),
    "cumsum_exclusive": (lambda x: R.cumsum(x, 1, exclusive=True), lambda x: x.cumsum(1) - x),
    "flip": (lambda x: R.flip(x, 1), lambda x: x.flip(1)),
    "isnan": (R.isnan, torch.isnan),
    "astype": (lambda x: R.astype(x, "int32"), lambda x: x.to(torch.int32)),
    "to_bool": (lambda x: R.astype(x, "bool"), lambda x: x.bool()),
    "full": (lambda x: R.full(x.ty.shape, relax.const(2.5, "float32")), lambda x: torch.full(x.shape, 2.5)),
    "cos_chain": (lambda x: R.cos(R.multiply(x, x)), lambda x: torch.cos(x * x)),
}
POSITIVE = {"log", "sqrt", "rsqrt"}


def reference(name: str):
    if name == "broadcast":
        return lambda x: x.mean(1, keepdim=True).expand_as(x).contiguous()
    return UNARY[name][1]


#: Functions of a number, which float64 computes otherwise; the others are the same loops.
OF_A_NUMBER = [*list(UNARY)[: list(UNARY).index("softmax")], "power"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    sampled(
        itertools.product(UNARY, [torch.float32, torch.float64]),
        lambda case: case[1] is torch.float32 or case[0] in OF_A_NUMBER,
    ),
)
def test_unary(name, dtype):
    torch.manual_seed(0)
    x = torch.randn(SHAPE, dtype=dtype)
    x = x.abs() + 0.1 if name in POSITIVE else x
    (ours,) = run([x], lambda emit, p: [emit(UNARY[name][0](p))])
    wanted = reference(name)(x)
    if dtype is torch.float64 and wanted.dtype is torch.float64:
        assert_same(ours, wanted, rtol=1e-10, atol=1e-12)
    else:
        assert_same(ours, wanted, rtol=2e-5, atol=1e-5)


BINARY = {
    "add": (R.add, torch.add),
    "subtract": (R.subtract, torch.sub),
    "multiply": (R.multiply, torch.mul),
    "divide": (R.divide, torch.div),
    "maximum": (R.maximum, torch.maximum),
    "minimum": (R.minimum, torch.minimum),
    "equal": (R.equal, torch.eq),
    "not_equal": (R.not_equal, torch.ne),
    "less": (R.less, torch.lt),
    "less_equal": (R.less_equal, torch.le),
    "greater": (R.greater, torch.gt),
    "greater_equal": (R.greater_equal, torch.ge),
    "atan2": (R.atan2, torch.atan2),
}


SHAPES = [((7, 33), (7, 33)), ((7, 33), (33,)), ((7, 1), (1, 33)), ((), (40,)), ((), ())]


@pytest.mark.parametrize(
    ("name", "shapes"),
    sampled(
        itertools.product(BINARY, SHAPES), lambda case: case[1] == SHAPES[0] or case[0] in ("divide", "less", "atan2")
    ),
)
def test_binary(name, shapes):
    torch.manual_seed(0)
    a, b = (torch.randn(shape) for shape in shapes)
    ours, theirs = BINARY[name]
    (result,) = run([a, b], lambda emit, p, q: [emit(ours(p, q))])
    assert_same(result, theirs(a, b), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "name"),
    sampled(
        itertools.product(
            [torch.int32, torch.int64],
            ["add", "subtract", "multiply", "maximum", "minimum", "less"],
        ),
        lambda case: case[0] is torch.int64,
    ),
)
def test_integers(dtype, name):
    a = torch.arange(-50, 50, dtype=dtype)
    b = torch.tensor([-7, -3, -1, 1, 2, 5, 9, -4, 3, 8], dtype=dtype).repeat(10)
    ours, theirs = BINARY[name]
    (result,) = run([a, b], lambda emit, p, q: [emit(ours(p, q))])
    assert_same(result, theirs(a, b))


@pytest.mark.parametrize("name", ["logical_and", "logical_or", "logical_xor"])
def test_booleans(name):
    a, b = torch.tensor([0, 0, 1, 1] * 9).bool(), torch.tensor([0, 1] * 18).bool()
    (ours,) = run([a, b], lambda emit, p, q: [emit(getattr(R, name)(p, q))])
    assert_same(ours, getattr(torch, name)(a, b))


def test_where_and_cast_of_a_mask():
    torch.manual_seed(0)
    mask, x = torch.rand(5, 40) > 0.3, torch.randn(5, 40)
    zero = relax.const(0.0, "float32")
    a, b, c = run(
        [mask, x],
        lambda emit, m, p: [
            emit(R.where(m, p, zero)),
            emit(R.multiply(p, emit(R.astype(m, "float32")))),
            emit(R.logical_not(m)),
        ],
    )
    assert_same(a, torch.where(mask, x, 0.0))
    assert_same(b, x * mask)
    assert_same(c, ~mask)


def test_special_values():
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([inf, -inf, nan, 0.0, -0.0, 1e-40, 3e38, -3e38] * 3)
    zero = relax.const(0.0, "float32")
    ours = run(
        [x, x.flip(0)],
        lambda emit, p, q: [
            emit(R.maximum(p, q)),
            emit(R.minimum(p, q)),
            emit(R.multiply(p, zero)),
            emit(R.nn.relu(p)),
            emit(R.isinf(p)),
            emit(R.isfinite(p)),
            emit(R.max(p)),
            emit(R.abs(p)),
        ],
    )
    y = x.flip(0)
    wanted = [torch.maximum(x, y), torch.minimum(x, y), x * 0.0, torch.relu(x)]
    wanted += [x.isinf(), x.isfinite(), x.amax(), x.abs()]
    for our, their in zip(ours, wanted, strict=True):
        assert_same(our, their)


@pytest.mark.parametrize("shape", [(1,), (3, 67)], ids=["one", "many"])
@pytest.mark.parametrize("source", ["float64", "float32", "float16", "bfloat16"])
def test_numbers_that_fit_no_integer_become_eagers(source, shape):
    numbers = [float("nan"), float("inf"), -float("inf"), 1e20, -1e20, 3e9, 2.0**31, 2.0**32 + 512, 300.0, -1.5, 6e4]
    x = torch.tensor(numbers, dtype=torch.float64).to(getattr(torch, source)).repeat_interleave(math.prod(shape))
    x = x.reshape(len(numbers), *shape)
    targets = ["int64", "int32", "int16", "int8", "uint8", "bool"]
    got = run([x], lambda emit, p: [emit(R.astype(p, target)) for target in targets])
    for target, result in zip(targets, got, strict=True):
        assert torch.equal(result, x.to(getattr(torch, target))), target


@pytest.mark.parametrize(
    "shapes",
    [
        ((5, 7), (7, 3)),
        ((2, 5, 7), (7, 3)),
        ((2, 5, 7), (2, 7, 3)),
        ((2, 4, 5, 7), (2, 4, 7, 3)),
        ((2, 1, 5, 7), (4, 7, 3)),
        ((5, 7), (2, 7, 3)),
        ((7,), (7, 3)),
        ((5, 7), (7,)),
        ((7,), (7,)),
        ((2, 5, 7), (7,)),
        ((2, 5, 0), (0, 3)),
    ],
)
def test_matmul(shapes):
    torch.manual_seed(0)
    a, b = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    (ours,) = run([a, b], lambda emit, p, q: [emit(R.matmul(p, q))])
    assert_same(ours, torch.matmul(a, b), rtol=1e-10, atol=1e-12)


def test_matmul_of_transposed_and_sliced_operands_copies_nothing():
    torch.manual_seed(0)
    a, b = torch.randn(9, 5, dtype=torch.float64), torch.randn(3, 14, dtype=torch.float64)

    def body(emit, p, q):
        left = emit(R.permute_dims(p))
        right = emit(R.permute_dims(emit(R.strided_slice(q, [1], [2], [11]))))
        return [emit(R.matmul(left, right))]

    (ours,) = run([a, b], body)
    assert_same(ours, a.T @ b[:, 2:11].T, rtol=1e-10, atol=1e-12)


def test_indexing():
    torch.manual_seed(0)
    x, j = torch.randn(6, 9), torch.randint(0, 9, (6, 4))
    (b,) = run([x, j], lambda emit, p, r: [emit(R.gather_elements(p, r, 1))])
    assert_same(b, x.gather(1, j))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_round_where_torch_rounds(dtype):
    torch.manual_seed(0)
    x, y = torch.randn(8, 70).to(dtype), torch.randn(70).to(dtype)
    ours = run(
        [x, y],
        lambda emit, p, q: [
            emit(R.multiply(emit(R.add(p, q)), p)),
            emit(R.nn.gelu(p)),
            emit(R.sum(p, -1)),
            emit(R.sum(p, 0)),
            emit(R.nn.softmax(p, -1)),
            emit(R.astype(p, "float32")),
        ],
    )
    assert torch.equal(ours[0], (x + y) * x)
    assert_same(ours[1], torch.nn.functional.gelu(x))
    assert_same(ours[2], x.float().sum(-1).to(dtype))
    assert_same(ours[3], x.float().sum(0).to(dtype))
    assert_same(ours[4], torch.softmax(x.float(), -1).to(dtype))
    assert torch.equal(ours[5], x.float())


@pytest.mark.parametrize("extents", [(3, 5), (64, 300)], ids=["small", "large"])
def test_by_torch(extents):
    """Operators that are not generated here."""
    torch.manual_seed(0)
    x = torch.randn(extents)
    padded, flipped = run([x], lambda emit, p: [emit(R.nn.pad(p, [1, 2, 0, 3], "constant", 0.5)), emit(R.flip(p, 1))])
    assert_same(padded, torch.nn.functional.pad(x, (0, 3, 1, 2), value=0.5))
    assert torch.equal(flipped, x.flip(1))


def test_constants_inside():
    table = torch.arange(12.0).view(3, 4)
    (ours,) = run([torch.ones(3, 4)], lambda emit, p: [emit(R.add(p, relax.const(table.numpy())))])
    assert_same(ours, table + 1)


def test_an_operator_without_a_translation_is_named():
    with pytest.raises(NotImplementedError, match=r"relax\.image\.resize2d has no translation"):
        run([torch.ones(1, 2, 4, 4)], lambda emit, p: [emit(R.image.resize2d(p, (8, 8)))])


def test_a_library_function_without_a_kernel_is_named():
    with pytest.raises(NotImplementedError, match=r"library\.no_such_thing"):
        run(
            [torch.ones(3)],
            lambda emit, p: [emit(relax.op.call_pure_packed("library.no_such_thing", p, ty_args=p.ty))],
        )
