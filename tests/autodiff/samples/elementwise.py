"""Samples of the rules of functions of one, two or three tensors, element by element."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tvm import relax
from tvm.relax import op

from tests.autodiff.gradcheck import draw
from tests.autodiff.samples import KINKS, bools, integers, sample, stops

UNARY = {
    "exp": (op.exp, torch.exp, draw(3, 4)),
    "log": (op.log, torch.log, draw(3, 4, low=0.1)),
    "negative": (op.negative, torch.neg, draw(3, 4)),
    "sin": (op.sin, torch.sin, draw(3, 4)),
    "cos": (op.cos, torch.cos, draw(3, 4)),
    "tan": (op.tan, torch.tan, draw(3, 4, low=-1, high=1)),
    "asin": (op.asin, torch.asin, draw(3, 4, low=-0.9, high=0.9)),
    "acos": (op.acos, torch.acos, draw(3, 4, low=-0.9, high=0.9)),
    "atan": (op.atan, torch.atan, draw(3, 4)),
    "sinh": (op.sinh, torch.sinh, draw(3, 4)),
    "cosh": (op.cosh, torch.cosh, draw(3, 4)),
    "tanh": (op.tanh, torch.tanh, KINKS),
    "asinh": (op.asinh, torch.asinh, draw(3, 4)),
    "acosh": (op.acosh, torch.acosh, draw(3, 4, low=1.1, high=3)),
    "atanh": (op.atanh, torch.atanh, draw(3, 4, low=-0.9, high=0.9)),
    "sigmoid": (op.sigmoid, torch.sigmoid, KINKS),
    "sqrt": (op.sqrt, torch.sqrt, draw(3, 4, low=0.1)),
    "rsqrt": (op.rsqrt, torch.rsqrt, draw(3, 4, low=0.1)),
    "square": (op.square, torch.square, KINKS),
    "abs": (op.abs, torch.abs, KINKS),
    "sign": (op.sign, torch.sign, KINKS),
    "floor": (op.floor, torch.floor, KINKS),
    "ceil": (op.ceil, torch.ceil, KINKS),
    "round": (op.round, torch.round, KINKS),
    "trunc": (op.trunc, torch.trunc, KINKS),
    "erf": (op.erf, torch.erf, KINKS),
    "clip": (
        lambda x: op.clip(x, -1.0, 3.0),
        lambda x: torch.where((x >= -1) & (x <= 3), x, x.detach().clamp(-1.0, 3.0)),
        KINKS,
    ),
    "nn.relu": (op.nn.relu, torch.relu, KINKS),
    "nn.silu": (op.nn.silu, F.silu, KINKS),
    "nn.gelu": (op.nn.gelu, F.gelu, KINKS),
    "nn.gelu_tanh": (op.nn.gelu_tanh, lambda x: F.gelu(x, approximate="tanh"), KINKS),
}

for _name, (_ours, _theirs, _x) in UNARY.items():
    sample(f"relax.{_name}", lambda scope, p, ours=_ours: ours(p), _theirs, _x)
sample("relax.sqrt", lambda scope, p: op.sqrt(p), torch.sqrt, torch.zeros(2, dtype=torch.float64))
sample("relax.tanh", lambda scope, p: op.tanh(p), torch.tanh, torch.tensor(0.3, dtype=torch.float64))
sample(
    "relax.astype",
    lambda scope, p: op.astype(scope.emit(op.astype(p, "int64")), "float64"),
    lambda x: x.long().double() * 1.0 + 0.0 * x,
    draw(3, 4),
)

BINARY = {
    "add": (op.add, torch.add),
    "subtract": (op.subtract, torch.sub),
    "multiply": (op.multiply, torch.mul),
    "divide": (op.divide, torch.div),
    "maximum": (op.maximum, torch.maximum),
    "minimum": (op.minimum, torch.minimum),
    "power": (op.power, torch.pow),
}
_SHAPES = [
    ((3, 4), (3, 4)),
    ((2, 1, 4), (3, 1)),
    ((3, 4), (4,)),
    ((4,), (3, 4)),
    ((3, 1), (1, 4)),
    ((), (3,)),
    ((3,), ()),
    ((1, 3), (3,)),
    ((), ()),
    ((1,), (1, 1)),
]
# Broadcasting is one function: the basic operators try every pair of shapes, the others two.
_BASIC = ("add", "subtract", "multiply", "divide", "maximum")

for _name, (_ours, _theirs) in BINARY.items():
    for _left, _right in _SHAPES if _name in _BASIC else _SHAPES[:2]:
        _a, _b = draw(*_left, low=0.2, seed=1), draw(*_right, low=0.2, seed=2)
        sample(f"relax.{_name}", lambda scope, p, q, ours=_ours: ours(p, q), _theirs, _a, _b)

for _name in ("maximum", "minimum"):  # ties share the gradient
    _a, _b = torch.tensor([1.0, 2.0, 3.0]).double(), torch.tensor([[2.0], [3.0]]).double()
    sample(f"relax.{_name}", lambda scope, p, q, ours=BINARY[_name][0]: ours(p, q), BINARY[_name][1], _a, _b)

for _exponent in (0.0, 1.0, 2.0, 3.0, -1.0, 0.5, 1.5):
    sample(
        "relax.power",
        lambda scope, p, exponent=_exponent: op.power(p, relax.const(exponent, "float64")),
        lambda x, exponent=_exponent: x**exponent,
        KINKS if _exponent == int(_exponent) and _exponent >= 0 else draw(5, low=0.3),
    )
sample(  # at zero and below
    "relax.power",
    lambda scope, p, q: op.power(p, q),
    torch.pow,
    torch.tensor([0.0, 0.0, 0.0, -2.0, -2.0, 1.5]).double(),
    torch.tensor([0.0, 1.0, 2.5, 2.0, 3.0, 0.0]).double(),
)

for _shapes in [((3, 4), (3, 4), (3, 4)), ((3, 1), (4,), ()), ((4,), (3, 1), (2, 1, 1))]:
    _args = bools(*_shapes[0]), draw(*_shapes[1]), draw(*_shapes[2], seed=2)
    sample("relax.where", lambda scope, c, p, q: op.where(c, p, q), torch.where, *_args)

for _name, _theirs in {
    "equal": torch.eq,
    "not_equal": torch.ne,
    "less": torch.lt,
    "less_equal": torch.le,
    "greater": torch.gt,
    "greater_equal": torch.ge,
}.items():
    _ours = getattr(op, _name)
    stops(f"relax.{_name}", lambda s, p, q, f=_ours: f(p, q), _theirs, draw(3, 4), draw(3, 4, seed=1))
for _name in ("isnan", "isinf", "isfinite"):
    _ours = getattr(op, _name)
    stops(f"relax.{_name}", lambda s, p, f=_ours: f(p), getattr(torch, _name), KINKS)
for _name in ("logical_and", "logical_or", "logical_xor"):
    _ours, _theirs = getattr(op, _name), getattr(torch, _name)
    stops(
        f"relax.{_name}",
        lambda s, p, q, c, f=_ours: f(s.emit(op.greater(p, q)), c),
        lambda x, y, c, f=_theirs: f(x > y, c),
        *(draw(3, 4), draw(3, 4, seed=1), bools(3, 4, seed=2)),
    )
stops("relax.logical_not", lambda s, p: op.logical_not(s.emit(op.greater(p, p))), lambda x: ~(x > x), KINKS)
for _name, _theirs in {
    "bitwise_and": torch.bitwise_and,
    "bitwise_or": torch.bitwise_or,
    "bitwise_xor": torch.bitwise_xor,
}.items():
    _ours = getattr(op, _name)
    stops(
        f"relax.{_name}",
        lambda s, p, i, f=_ours: f(s.emit(op.astype(p, "int64")), i),
        lambda x, i, f=_theirs: f(x.long(), i),
        *(draw(3, 4, low=0, high=9), integers(3, 4, below=4)),
    )
stops("relax.bitwise_not", lambda s, p: op.bitwise_not(s.emit(op.astype(p, "int64"))), lambda x: ~x.long(), KINKS)
