"""Python's operators on tensors and numbers, shifts, remainders, positions in sorted numbers, repetition, booleans."""

import itertools
import operator

import pytest
import torch

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from tests.bridge.compare import Function, check_module
from tests.device import ASSERTS
from tests.sampling import sampled, spread


def leaf(*values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def check(function, *args):
    check_module(lambda: Function(function), lambda: args, calls=1)


ARITHMETIC = [operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow]
NOT_DIFFERENTIABLE = [operator.floordiv, operator.mod]  # in eager: the latter where a number is on the left
BITWISE = [operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift]
COMPARISONS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]


@pytest.mark.parametrize(
    "function", sampled(ARITHMETIC, lambda f: f not in (operator.sub, operator.mul)), ids=lambda f: f.__name__
)
def test_arithmetic_of_tensors_and_numbers(function):
    def forward(x, y, i, j):
        if function in NOT_DIFFERENTIABLE:
            x, y = x.detach(), y.detach()
        tensors = [function(a, b) for a, b in ((x, y), (i, j), (x, j), (i, y))]
        return [
            *tensors,
            *(function(a, n) for a in (x, i) for n in (2, 2.5)),
            *(function(n, a) for a in (x, j) for n in (2, 2.5)),
        ]

    i = torch.tensor([-7, 0, 3, 2**31])
    check(forward, leaf(0.5, 1.5, 3.25, 2.0), leaf(2.0, 0.25, 1.5, 3.0), i, torch.tensor([3, 1, 2, 5]))


@pytest.mark.parametrize(
    ("dtype", "function"),
    sampled(
        itertools.product((torch.int64, torch.int8, torch.uint8), BITWISE),
        [
            *((torch.int64, function) for function in (operator.and_, operator.lshift, operator.rshift)),
            *((torch.uint8, function) for function in (operator.or_, operator.xor, operator.rshift)),
        ],
    ),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_bits_of_tensors_and_numbers(dtype, function):
    i, j = torch.tensor([5, 0, 3, 100], dtype=dtype), torch.tensor([0, 1, 2, 7], dtype=dtype)
    check(lambda i, j: [function(i, j), function(i, 3), function(3, i), function(i, j.long())], i, j)


@pytest.mark.parametrize("count", [0, 1, 31, 63, 64, -1])
def test_shifts_by_any_count(count):
    x = torch.tensor([0, 1, -3, 2**62, -(2**63)])
    check(
        lambda x, y: [x << count, x >> count, torch.bitwise_left_shift(x, count), x << y, x >> y, count << y], x, x % 64
    )


EXTREMA = [torch.maximum, torch.minimum, torch.fmax, torch.fmin]


@pytest.mark.parametrize("function", sampled([*COMPARISONS, *EXTREMA], spread([*COMPARISONS, *EXTREMA])))
def test_booleans_are_ordered(function):
    check(function, torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False]))


def test_extrema_and_signs_of_booleans():
    x = torch.tensor([[True, True, False], [False, False, False]])
    check(lambda x: [x.amax(1), x.amin(1), x.amax(), *x.aminmax(dim=1), x.sign(), x.sgn(), x.signbit()], x)


def test_any_and_all_of_uint8_are_uint8():
    x = torch.tensor([[3, 250, 0], [1, 2, 200]], dtype=torch.uint8)
    check(lambda x: [x.any(), x.all(), x.any(1), x.all(1), x.any(0, keepdim=True)], x)


@pytest.mark.cpu("an integer divided by zero is no error on a GPU")
@pytest.mark.parametrize(
    "function",
    [
        operator.floordiv,
        operator.mod,
        torch.fmod,
        lambda x, y: 7 % y,
        lambda x, y: 7 // y,
        lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    ],
)
def test_division_of_integers_by_zero_is_eagers_error(function):
    module, x = Function(function), torch.tensor([7, -7, 0])
    add_tvm_dispatch(module, (x, torch.tensor([2, 3, 1])))
    for divisors in ([1, 0, 2], [0, 0, 0]):
        with pytest.raises(Exception) as eager:
            function(x, torch.tensor(divisors))
        with pytest.raises(type(eager.value)) as ours:
            module(x, torch.tensor(divisors))
        assert str(ours.value) == str(eager.value)
    assert torch.equal(module(x, torch.tensor([-3, 5, 2])), function(x, torch.tensor([-3, 5, 2])))
    assert stats(module).hits == 1


@pytest.mark.parametrize("function", [lambda x: x // 2, lambda x: x // (x + 1), lambda x: 7.5 % x])
def test_what_has_no_derivative_is_eagers_error(function):
    module, x = Function(function), leaf(1.0, 2.5)
    add_tvm_dispatch(module, x)
    y = module(x)
    assert torch.equal(y, function(x))
    with pytest.raises(RuntimeError, match=r"derivative for aten::(floor_divide|remainder) is not implemented"):
        y.sum().backward()
    assert stats(module).hits == 1


def test_gradients_of_remainders():
    check(lambda x, y: [x % 2, x % 0.75, x % y, torch.fmod(x, 2), torch.fmod(x, y)], leaf(-3.5, 0.5), leaf(2.0, -0.3))


def test_signbit():
    special = (0.0, -0.0, float("nan"), -float("nan"), float("inf"), -float("inf"), -5e-324)
    check(
        lambda x, i: [torch.signbit(x), torch.signbit(i), x * torch.signbit(x)], leaf(*special), torch.tensor([-1, 0])
    )


@pytest.mark.parametrize("options", [{}, {"right": True}, {"out_int32": True}], ids=str)
def test_positions_in_sorted_numbers(options):
    def forward(x, edges):
        edges = edges.detach()
        return [
            torch.bucketize(x, edges, **options),
            torch.bucketize(1.0, edges, **options),
            torch.searchsorted(edges, x, **options),
            torch.searchsorted(edges, 0.5, **options),
            torch.searchsorted(edges.flip(0), x, sorter=torch.arange(edges.numel() - 1, -1, -1), **options),
            x * edges[torch.bucketize(x, edges[:-1])],
        ]

    check(forward, leaf(-1.0, 0.0, 0.5, 1.0, 9.0, float("nan")), leaf(0.0, 0.5, 1.0, 2.0))


def test_nonzero_of_a_given_length():
    def forward(x):
        found = torch.nonzero_static(x, size=3)
        return found, x * found.sum()

    check(forward, leaf(0.0, 2.0, -1.0))


def test_common_divisors_and_histograms():
    i, j = torch.tensor([12, 0, -8]), torch.tensor([18, 5, 12])
    check(lambda i, j, x: [torch.gcd(i, j), torch.lcm(i, j), x.detach().histc(4) * x.sum()], i, j, leaf(1.0, 2.0, 5.0))


@ASSERTS
def test_repeat_interleave_of_a_given_length():
    repeats = torch.tensor([1, 0, 3])

    def forward(x, repeats):
        return [
            x.repeat_interleave(2),
            x.repeat_interleave(3, dim=1),
            x.repeat_interleave(repeats, dim=0, output_size=4),
            x.repeat_interleave(repeats[:1], dim=1, output_size=2),
            torch.repeat_interleave(repeats, output_size=4),
        ]

    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    module = check_module(lambda: Function(forward), lambda: (x, repeats), calls=1)
    for wrong in ([1, 1, 1], [1, -1, 4], [1, 0, 4]):
        with pytest.raises(Exception) as eager:
            forward(x, torch.tensor(wrong))
        with pytest.raises(type(eager.value)) as ours:
            module(x, torch.tensor(wrong))
        assert str(ours.value) == str(eager.value)


def test_xlogy_of_numbers():
    def forward(x):
        return [torch.xlogy(x, 2.0), torch.xlogy(2.0, x), torch.special.xlog1py(0, x), torch.special.xlog1py(x, 1)]

    check(forward, leaf(0.0, 0.5, 3.0))


def test_a_number_that_the_type_does_not_hold_is_refused_by_name():
    """Eager converts it, with the type's overflow."""
    with pytest.raises(UnsupportedModule, match="300 as int8"):
        add_tvm_dispatch(Function(lambda x: x * 300), torch.tensor([100, 3], dtype=torch.int8))
