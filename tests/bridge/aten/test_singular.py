"""Values and gradients at ties, kinks, zeros, infinities and nan: torch's own derivative formulas are the reference."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bridge import add_tvm_dispatch, stats
from tests.bridge.compare import check_module
from tests.sampling import sampled

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0, 6.0, 20.0, -20.0, 1e3, -1e3]
EXTREME = [float("inf"), float("-inf"), float("nan")]

UNARY = {
    "abs": torch.abs,
    "acos": torch.acos,
    "acosh": torch.acosh,
    "asin": torch.asin,
    "asinh": torch.asinh,
    "atan": torch.atan,
    "atanh": torch.atanh,
    "celu": F.celu,
    "clamp": lambda x: x.clamp(-1, 2),
    "clamp_crossed": lambda x: x.clamp(2, -1),
    "clamp_nan": lambda x: x.clamp(min=float("nan")),
    "clamp_max": lambda x: x.clamp(max=0.5),
    "clamp_min": lambda x: x.clamp(min=0.5),
    "cos": torch.cos,
    "cosh": torch.cosh,
    "cumprod": lambda x: x.reshape(-1, 3).cumprod(1),
    "elu": F.elu,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "erfinv": torch.erfinv,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "fmod": lambda x: torch.fmod(x, 0.75),
    "frac": torch.frac,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardshrink": F.hardshrink,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "leaky_relu": F.leaky_relu,
    "log": torch.log,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "log2": torch.log2,
    "log_softmax": lambda x: F.log_softmax(x.reshape(-1, 3), -1),
    "logit": lambda x: torch.logit(x, 1e-3),
    "logsigmoid": F.logsigmoid,
    "logsumexp": lambda x: x.reshape(-1, 3).logsumexp(-1),
    "mish": F.mish,
    "nan_to_num": torch.nan_to_num,
    "norm": lambda x: x.reshape(-1, 3).norm(dim=1),
    "norm_1": lambda x: x.reshape(-1, 3).norm(p=1, dim=1),
    "norm_3": lambda x: x.reshape(-1, 3).norm(p=3, dim=1),
    "norm_inf": lambda x: x.reshape(-1, 3).norm(p=float("inf"), dim=1),
    "pow_0": lambda x: x**0,
    "pow_1.5": lambda x: x**1.5,
    "pow_2": lambda x: x**2,
    "pow_3": lambda x: x**3,
    "pow_-1": lambda x: x**-1,
    "pow_half": lambda x: x**0.5,
    "pow_of_2": lambda x: 2.0**x,
    "pow_of_0": lambda x: 0.0**x,
    "reciprocal": torch.reciprocal,
    "relu": F.relu,
    "relu6": F.relu6,
    "remainder": lambda x: torch.remainder(x, 0.75),
    "rsqrt": torch.rsqrt,
    "selu": F.selu,
    "sgn": torch.sgn,
    "sigmoid": torch.sigmoid,
    "sign": torch.sign,
    "silu": F.silu,
    "sin": torch.sin,
    "sinc": torch.sinc,
    "sinh": torch.sinh,
    "softmax": lambda x: F.softmax(x.reshape(-1, 3), -1),
    "softplus": F.softplus,
    "softshrink": F.softshrink,
    "softsign": F.softsign,
    "sqrt": torch.sqrt,
    "square": torch.square,
    "std": lambda x: x.reshape(-1, 3).std(1),
    "tan": torch.tan,
    "tanh": torch.tanh,
    "tanhshrink": F.tanhshrink,
    "threshold": lambda x: F.threshold(x, 0.5, 7.0),
}
BINARY = {
    "atan2": torch.atan2,
    "copysign": torch.copysign,
    "div": torch.div,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "hypot": torch.hypot,
    "logaddexp": torch.logaddexp,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "mul": torch.mul,
    "pow": torch.pow,
    "where": lambda x, y: torch.where(x > y, x, y),
    "xlogy": torch.xlogy,
    "clamp_by_tensors": lambda x, y: torch.clamp(x, y - 1, y + 1),
    "huber": lambda x, y: F.huber_loss(x, y, reduction="none"),
    "smooth_l1": lambda x, y: F.smooth_l1_loss(x, y, reduction="none"),
    "l1": lambda x, y: F.l1_loss(x, y, reduction="none"),
}
REDUCTIONS = {
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin(1),
    "argmax": lambda x: (x.argmax(1), x.argmax(), x.argmin(1), x * 1),
    "aminmax": lambda x: torch.aminmax(x, dim=1),
    "cummax": lambda x: x.cummax(1),
    "cumsum": lambda x: x.cumsum(1),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "max": lambda x: x.max(1),
    "max_all": torch.max,
    "median": lambda x: x.median(1),
    "median_all": torch.median,
    "min": lambda x: x.min(1),
    "min_all": torch.min,
    "mode": lambda x: x.mode(1),
    "nansum": lambda x: x.nansum(1),
    "norm_all": torch.norm,
    "prod": lambda x: x.prod(1),
    "prod_all": torch.prod,
    "topk": lambda x: x.topk(2, 1),
    "var": lambda x: x.var(1),
}

if torch.__version__ < "2.12":  # there it has no derivative in eager either
    del REDUCTIONS["aminmax"]


class Functions(nn.Module):
    """Several functions with arguments of their own, compiled at once."""

    def __init__(self, functions, arity=1):
        super().__init__()
        self.functions = functions
        self.arity = arity

    def forward(self, *args):
        pairs = zip(self.functions, zip(*[iter(args)] * self.arity, strict=True), strict=True)
        return tuple(function(*given) for function, given in pairs)


def leaf(values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def chunks(table, size):
    names = sorted(table)
    return [names[i : i + size] for i in range(0, len(names), size)]


SIXTH = pytest.mark.cpu("of float64, the GPU's eager hardswish multiplies by float32's 1/6")


SMOOTH = """
    acos acosh asin asinh atan atanh cos cosh erf erfc erfinv exp exp2 expm1 log log10 log1p log2 sigmoid sin sinh
    softsign tan tanh
""".split()
"""Without a kink or another case: the formula of their derivative holds everywhere."""
GROUPS = [*chunks(UNARY.keys() - SMOOTH, 13), *chunks(SMOOTH, 13)]


@pytest.mark.parametrize(
    "names",
    sampled(
        [pytest.param(names, marks=SIXTH if "hardswish" in names else []) for names in GROUPS],
        lambda names: names[0] not in SMOOTH,
    ),
    ids=lambda names: f"{names[0]}..{names[-1]}",
)
def test_functions_of_one_tensor(names):
    module = Functions([UNARY[name] for name in names])
    inputs = tuple(leaf(SPECIAL + EXTREME) for _ in names)
    check_module(lambda: module, lambda: inputs, calls=1)


@pytest.mark.parametrize("names", chunks(BINARY, 9), ids=lambda names: f"{names[0]}..{names[-1]}")
def test_functions_of_two_tensors(names):
    values = [0.0, -0.0, 1.0, -1.0, 2.0, 0.5, -3.0, *EXTREME]
    module = Functions([BINARY[name] for name in names], arity=2)
    pairs = ([a for a in values for _ in values], [b for _ in values for b in values])
    inputs = tuple(leaf(column) for _ in names for column in pairs)
    check_module(lambda: module, lambda: inputs, calls=1)


@pytest.mark.parametrize("names", chunks(REDUCTIONS, 10), ids=lambda names: f"{names[0]}..{names[-1]}")
def test_reductions(names):
    inf, nan = float("inf"), float("nan")
    rows = [[1.0, 2.0, 2.0], [0.0, 0.0, 0.0], [0.0, 3.0, -3.0], [5.0, 0.0, 0.0], [inf, 1.0, -1.0], [inf, inf, 2.0]]
    for extra in ([], [[nan, 1.0, 2.0], [-inf, -inf, 0.0]]):
        module = Functions([REDUCTIONS[name] for name in names])
        inputs = tuple(leaf(rows + extra) for _ in names)
        check_module(lambda module=module: module, lambda inputs=inputs: inputs, calls=1)


SPREADS = {"std": torch.std, "var": torch.var, "std_mean": lambda x, dim: torch.std_mean(x, dim)[0]}


@pytest.mark.parametrize(
    ("spread", "dim"),
    sampled(itertools.product(SPREADS, (-1, 0, (0, 1))), [("std", -1), ("var", (0, 1)), ("std_mean", 0)]),
    ids=str,
)
def test_the_spread_of_equal_numbers_is_zero_and_so_is_its_gradient(spread, dim):
    """The mean of equal numbers is off by a rounding; a deviation computed from it has a gradient of one."""

    class Spread(nn.Module):
        def forward(self, x):
            return SPREADS[spread](x, dim)

    module = Spread()
    for number in (0.1, 0.37, 2.9):
        x = torch.full((5, 7), number, requires_grad=True)
        add_tvm_dispatch(module, x)
        result = module(x)
        (gradient,) = torch.autograd.grad(result.sum(), x)
        assert not result.any() and not gradient.any()
    assert stats(module).hits == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_norm_of_single_elements_is_their_size_even_where_the_square_overflows(dtype):
    """torch takes the absolute value; also for 0-d tensors, and for the norms inside a cosine similarity."""
    largest, tiny = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    numbers = [largest, -largest / 2, tiny, 0.0, -2.0, float("inf"), float("nan")]
    column = torch.tensor(numbers, dtype=dtype).unsqueeze(-1)
    functions = [
        *(lambda x, order=order: torch.linalg.vector_norm(x, order, -1, keepdim=True) for order in (1, 2, 3)),
        lambda x: torch.nn.functional.cosine_similarity(x, x * 0.5, -1),
        lambda x: torch.stack([row.norm() for row in x[:, 0]]),
        lambda x: torch.stack([row.norm(dim=0) for row in x[:, 0]]),  # an axis of a number: torch squares it
    ]
    inputs = tuple(column.clone().requires_grad_() for _ in functions)
    check_module(lambda: Functions(functions), lambda: inputs, calls=1)


@pytest.mark.parametrize("upstream", [1.0, float("inf"), float("nan")])
def test_prelus_weight_has_nothing_of_what_it_does_not_depend_on(upstream):
    eager = nn.PReLU(dtype=torch.float64)
    x = torch.tensor([float("inf"), 2.0, -1.0], dtype=torch.float64, requires_grad=True)
    dispatched = add_tvm_dispatch(copy.deepcopy(eager), x, on_miss="error")
    grad_out = torch.tensor([upstream, upstream, 2.0], dtype=torch.float64)
    for module in (eager, dispatched):
        module(x).backward(grad_out)
    assert torch.equal(dispatched.weight.grad, eager.weight.grad) and eager.weight.grad.item() == -2
