"""Vocabulary: element-wise operators, casts, and random draws. Each function proposes an expression, or ``None``."""

from __future__ import annotations

import torch

from tests.fuzz.scope import Scope, is_int

UNARY = """
torch.tanh({x}) | torch.sigmoid({x}) | torch.erf({x}) | torch.exp(-{x}.abs()) | torch.log1p({x}.abs()) | F.relu({x})
torch.sqrt({x}.abs() + 0.5) | torch.rsqrt({x} * {x} + 0.5) | F.gelu({x}) | F.gelu({x}, approximate="tanh") | F.silu({x})
F.softplus({x}) | F.softplus({x}, beta=2, threshold=1) | F.elu({x}) | F.selu({x}) | F.celu({x}, 0.5) | F.mish({x})
F.leaky_relu({x}, 0.1) | F.hardtanh({x}) | F.logsigmoid({x}) | torch.sin({x}) | torch.cos({x}) | torch.atan({x})
{x}.square() | {x}.abs() | -{x} | torch.sign({x}) | torch.floor({x}) | torch.round({x}) | torch.trunc({x}) | {x}.frac()
1 / ({x}.abs() + 1) | {x}.clamp(-0.5, 0.7) | {x}.clamp(min=0.1) | {x}.clamp(max=torch.tensor(0.3, dtype={x}.dtype))
{x} ** 2 | {x} ** 3 | {x}.abs() ** 1.5 | ({x}.abs() + 0.3) ** -0.5 | 2.0 ** {x}.clamp(max=3) | torch.expm1(-{x}.abs())
torch.asinh({x}) | F.hardswish({x}) | F.hardsigmoid({x}) | F.softsign({x}) | F.tanhshrink({x}) | F.relu6({x})
F.threshold({x}, 0.1, 0.5) | torch.nan_to_num({x}) | torch.logit(torch.sigmoid({x}), eps=1e-3) | torch.sinc({x})
torch.erfc({x}) | torch.exp2(-{x}.abs()) | torch.log2({x}.abs() + 1) | torch.log10({x}.abs() + 1) | +{x} | {x}.exp()
torch.deg2rad({x}) | F.softshrink({x}, 0.2) | F.hardshrink({x}, 0.3) | torch.sinh({x}) | torch.cosh({x}) | {x}.sgn()
torch.tan({x} * 0.3) | torch.acos({x}.tanh() * 0.9) | torch.atanh({x}.tanh() * 0.9) | torch.lgamma({x}.abs() + 1)
{x}.detach() | {x}.detach() * {x} | {x}.contiguous() | {x}.clone() | {x} - {x}.detach() | torch.zeros_like({x}) + {x}
torch.ones_like({x}) | torch.full_like({x}, 0.5) * {x} | {x} * 0 | {x} * 1 | {x} + 0 | F.rrelu({x}, training=False)
torch.special.i0({x}) | torch.special.entr({x}.abs() + 0.1) | torch.digamma({x}.abs() + 1)
torch.erfinv({x}.tanh() * 0.9)
{x}.heaviside({x}.new_zeros(())) | torch.where({x} > 0, {x}, -0.3 * {x}) | torch.where({x} > 0, 1.0, 0.0)
torch.masked_fill({x}, {x} < 0, 0.25) | {x}.masked_fill({x} > 0.5, float("-inf")).sigmoid() | {x}.ceil()
"""

BINARY = """
{x} + {y} | {x} - {y} | {x} * {y} | {x} / ({y}.abs() + 0.5) | torch.maximum({x}, {y}) | torch.minimum({x}, {y})
torch.where({x} > {y}, {x}, {y}) | torch.atan2({x}, {y}.abs() + 0.2) | torch.lerp({x}, {y}, {c}) | {x}.lerp({y}, {y})
torch.addcmul({x}, {y}, {x}, value={c}) | torch.addcdiv({x}, {y}, {x}.abs() + 1) | torch.fmod({x}, {y}.abs() + 0.7)
torch.hypot({x}, {y} + 3) | torch.logaddexp({x}, {y}) | torch.copysign({x}, {y}) | torch.xlogy({x}, {y}.abs() + 0.5)
{x} + {c} * {y} | {c} - {x} * {y} | torch.add({x}, {y}, alpha={c}) | torch.rsub({x}, {y}, alpha=2) | ({x} > {y}) * {x}
{x} * ({y} > 0) | torch.where({y} > 0, {x}, {c}) | {x}.pow({y}.clamp(0, 2).round()) | ({x}.abs() + 0.5) ** {y}
torch.remainder({x}, {y}.abs() + 0.7) | torch.floor_divide({x}, {y}.abs() + 0.7).detach() + {x} | F.mse_loss({x}, {y})
F.smooth_l1_loss({x}, {y}) | F.l1_loss({x}, {y}, reduction="none") | F.huber_loss({x}, {y}, delta=0.3)
torch.fmax({x}, {y})
torch.nextafter({x}, {y}) | torch.clamp({x}, {y} - 1, {y}) | F.kl_div({x}, {y}.sigmoid(), reduction="batchmean")
"""

SCALAR = """
{x} + {c} | {x} * {c} | {c} - {x} | {c} / ({x}.abs() + 1) | {x} / 3 | {x} // 0.7 | {x} % 0.9 | {x} * True | {x} + 2
{x}.mul(math.sqrt(2)) | {x} * {x}.shape[-1] | {x} / {x}.numel() | {x} * len({x}) | torch.mul({c}, {x}) | {x} - 1
"""

LOGIC = """
{x} > {c} | {x} <= {y} | ({x} > 0) & ({y} < 0.5) | ({x} > 0) | ({y} > 0) | ~({x} > 0) | torch.isfinite({x}) | {x} == {y}
torch.logical_xor({x} > 0, {y} > 0) | ({x} * 3).long() | ({x} * 3).int() | {x}.bool() | {x}.isnan() | {x} != {x}
torch.logical_not({x}) | torch.signbit({x}) | ({x} > 0).to(torch.uint8) | torch.isclose({x}, {y})
"""

INTEGER = """
{i} + 1 | {i} * 2 | {i} % 3 | {i} // 2 | -{i} | {i}.abs() | {i}.clamp(0, 2) | {i} & 3 | {i} ^ 1 | {i} << 1 | {i} >> 1
{i}.to(D) | {i} * 0.5 | {i} / 2 | {i}.float() | {i}.sum() | {i}.max() | {i}.cumsum(0) | {i} > 1 | {i}.double().sin()
F.one_hot({i}.clamp(0, 3), 4) | torch.bitwise_not({i}) | {i}.square() | torch.div({i}, 3, rounding_mode="floor")
torch.div({i}, 3, rounding_mode="trunc") | {i}.float().mean() | {i}.flip(0) | {i}.sign() | ~{i} | {i} == 1
{i}.cummax(0)[0]
"""

BOOLEAN = """
{b}.to(D) | {b}.sum() | {b}.any() | {b}.all() | ~{b} | {b}.float().mean() | {b} * 2 | {b}.long().cumsum(0) | {b} | {b}
torch.where({b}, 1.0, 0.5) | {b}.int() - 1 | {b} ^ True | {b}.count_nonzero() | {b}.logical_and({b})
"""

CASTS = """
{x}.float() | {x}.double() | {x}.to(torch.bfloat16) | {x}.half().to(D) | {x}.to(D) | {x}.type_as({y})
{x}.float().to(D)
{x}.to(torch.bfloat16).to(D) | {x} * {y}.float() | {x}.double() + {y} | {x}.detach().long().to(D) + {x}
torch.softmax({x}.float(), -1).to({x}.dtype) | {x}.float().pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt().to({x}.dtype)
"""

RANDOM = """
F.dropout({x}, 0.3, self.training) | F.dropout({x}, 0.5) | F.dropout({x} + 1, 0.1, self.training) * 2
torch.rand_like({x})
{x} + 0.1 * torch.randn_like({x}) | {x} * torch.rand({x}.shape, dtype=D) | torch.randn(3, 2, dtype=D)
F.alpha_dropout({x}, 0.2)
torch.bernoulli(torch.full_like({x}, 0.4)) | {x} * torch.bernoulli(torch.full_like({x}, 0.4))
torch.randint(0, 4, {x}.shape)
torch.empty_like({x}).uniform_(-1, 1) | {x}.new_empty({x}.shape).bernoulli_(0.6) * {x}
torch.randn({x}.shape[-1:]) + {x}
F.dropout({x}, 0.0, True) | F.dropout({x}, 1.0, True) | F.dropout({x}, 0.4, False)
torch.normal(0.0, 1.0, {x}.shape) + {x}
F.feature_dropout({x}, 0.3) | F.dropout({x}.t(), 0.3) | F.dropout({x}.transpose(0, -1), 0.25) | torch.randperm(5)
torch.empty_like({x}).exponential_() * {x} | {x} + torch.zeros_like({x}).normal_(0.0, 0.3) | F.rrelu({x}, training=True)
F.dropout({x}, 0.3).detach() + {x} | torch.rand_like({x}, dtype=torch.float32) * {x} | F.gumbel_softmax({x}, dim=-1)
torch.nn.init.uniform_(torch.empty(4)) | F.dropout(F.dropout({x}, 0.2), 0.2)
torch.randn_like({x}).to(torch.bfloat16) * {x}
"""


def split_table(table: str) -> list[str]:
    """Templates of a table, separated by `` | `` outside of brackets (inside, ``|`` is an operator)."""
    found, depth, current = [], 0, ""
    for word in table.replace("\n", " | ").split(" | "):
        current = f"{current} | {word}" if depth else word
        depth = current.count("(") - current.count(")")
        if not depth and current.strip():
            found.append(current.strip())
    return found


def _table(table: str):
    templates = split_table(table)

    def propose(scope: Scope) -> str | None:
        template = scope.choice(templates)
        slots = {"c": scope.number()}
        if "{x}" in template:
            slots["x"] = scope.pick()
        if "{y}" in template:
            slots["y"] = scope.partner(slots["x"]) if slots.get("x") else None
        if "{i}" in template:
            slots["i"] = scope.pick(is_int)
        if "{b}" in template:
            slots["b"] = scope.pick(lambda t: t.dtype == torch.bool)
        return None if None in slots.values() else template.format(**slots)

    return propose


PROPOSALS = {
    _table(UNARY): 5.0,
    _table(BINARY): 5.0,
    _table(SCALAR): 2.0,
    _table(LOGIC): 1.0,
    _table(INTEGER): 1.0,
    _table(BOOLEAN): 0.7,
    _table(CASTS): 0.7,
    _table(RANDOM): 1.2,
}
"""Functions that propose an expression, with their weights."""
