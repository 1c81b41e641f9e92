"""Vocabulary of some programs: complex numbers, custom autograd Functions, sizes by numbers, state in attributes,
caches, control flow."""

from __future__ import annotations

import random

import torch

from tests.fuzz.pointwise import split_table
from tests.fuzz.scope import Scope

SHARE = {"complex": 0.25, "functions": 0.25, "counts": 0.1, "state": 0.15, "texts": 0.05, "pads": 0.05}
SHARE |= {"computed": 0.06, "caches": 0.06, "control": 0.06, "derivatives": 0.1}
"""The share of programs with each theme."""

MAKES_COMPLEX = """
torch.complex({x}, {x} * 0.5) | torch.complex({x}.sin(), {x}) | torch.polar({x}.abs() + 0.1, {x}) | {x} * 1j
torch.view_as_complex(torch.stack([{x}, {x}.cos()], -1)) | {x} * {p} | {x}.to(C) | {x} + (1 - 2j) | torch.fft.rfft({x})
torch.fft.fft({x}) | {x} * torch.tensor(0.5 + 1j, dtype=C) | {x}.to(C) * {p}
"""

KEEPS_COMPLEX = """
{z} * {w} | {z} + {w} | {z} - {w} | {z} / ({w}.abs() + 1) | {z}.conj() | {z} * {w}.conj() | -{z} | {z} * {x} | {z} + {x}
{z} * (0.5 - 0.2j) | {z}.sin() | {z}.tanh() | {z}.mean(0) | {z}.sum(-1, keepdim=True) | {z}.transpose(0, -1) | {z} ** 2
{z}.flatten() | {z}.unsqueeze(0) | {z} @ {z}.mH | torch.fft.fft({z}) | torch.fft.ifft({z}, dim=0) | {z}.sgn()
{z}.square() | {z}.clone() | torch.where({x} > 0, {z}, {w}) | torch.cat([{z}, {w}]) | torch.stack([{z}, {z}.conj()])
(-{z}.abs()).exp() * {z} | ({z} + 9).sqrt() | ({z} * {z}.conj() + 1).log() | {z}.reciprocal() * {z}.abs().square()
{z}[..., :1] | {z}[0] * {w} | {z}.flip(0) | {z}.expand(2, *{z}.shape) | {z}.cumsum(0) | torch.exp(1j * {z}.real)
torch.add({z}, {w}, alpha=0.3) | {z}.masked_fill({z}.real > 0, 1j) | {z}.detach() * {z} | {z} * {p} | {z} / (2 + 1j)
{z} / {w} | torch.reciprocal({z} + 2) | {z}.exp() | ({z} + 3).pow(1.5) | {z}.prod(-1) | {z} @ {x}.to({z}.dtype).mT
{z}[{x} > 0] if {x}.shape == {z}.shape else {z} | {z} - {w} * 2 | 1 / ({z} + 1.5) | {z}.conj() / {w} | {z} * 0.5
torch.addcmul({z}, {w}, {w}, value=0.5) | torch.linalg.solve({z} @ {z}.mH + 2 * torch.eye(len({z})), {z}) | 2 - {z}
{z}.index_select(0, torch.tensor([0, -1 % len({z})])) | {z}.gather(-1, torch.zeros_like({z}.real, dtype=torch.long))
torch.complex({z}.abs(), {z}.angle()) | torch.polar({z}.abs(), {z}.angle()) | torch.einsum("...i,...j->...ij", {z}, {w})
{z}.cumprod(-1) | {z}.cosh() | {z}.sigmoid() | torch.nn.functional.pad({z}, (1, 0)) | {z}.diff(dim=-1)
torch.view_as_complex(torch.view_as_real({z}) * 0.5) | {z}.mean(-1, keepdim=True) - {z} | {z}.unfold(0, 1, 1)
torch.complex({z}.imag, {z}.real) | {z}.resolve_conj() | torch.roll({z}, 1, 0) | {z}.mH if {z}.dim() == 2 else {z}
"""

READS_COMPLEX = """
{z}.abs() | {z}.real | {z}.imag | torch.view_as_real({z}.resolve_conj()) | ({z} * {z}.conj()).real | {z}.norm()
{z}.imag * {z}.real | {z}.abs().square().mean() | torch.fft.irfft({z}) | ({z} + 9).angle() | {z}.conj().imag + 1
{z}.angle() | {z}.abs().max() | torch.linalg.vector_norm({z}, 1, dim=-1) | ({z} == {w}).sum() * {z}.real
{z}.var(0) | {z}.std() | ({z} != 0).to(D) * {z}.imag | torch.linalg.matrix_norm({z}) | torch.fft.irfft({z}, n=6)
torch.linalg.vector_norm({z}) | {z}.sum().real * {z}.abs() | {z}.real.tanh()
"""

WRITES_COMPLEX = r"""
{z}.mul_({w})
{z}.add_({x})
{z}[0] = 0.5j
{z} *= 0.5
{z}[..., -1] = {w}[..., 0]
{z}.real.mul_(2)
{z}.zero_()
{z}.copy_({w})
{z}.view(-1)[0] += 1j
{z}.imag.copy_({z}.real)
{z}.div_(2j)
torch.view_as_real({z})[..., 1].mul_(0.5)
{z}.conj().mul_(1j)
{z}.masked_fill_({z}.real > 0, 0.5 - 1j)
{z}.index_add_(0, torch.tensor([0]), {w}[:1])
{z}[{z}.real > 0.3] *= 1j
{z}.transpose(0, -1)[0] = 1 + 2j
"""

APPLIES = r"""
{v} = Squashed.apply({x}, 0.7)
{v} = Straight.apply({x})
{v}, other = Pairwise.apply({x}, {y})
{v}, other = Pairwise.apply({x}, {y})\n{v} = torch.where(other, {v}, 0.5)
{v} = Inner.apply({x})
{v} = Doubled.apply({x}) * Squashed.apply({x}, -1.5)
{v} = Squashed.apply(Inner.apply({x}), 0.4)
{v} = Once.apply({x}) + {x}
with torch.no_grad():\n    {v} = Doubled.apply({x})
{v} = Straight.apply({x} * 3) * {x}
{v} = Weighted.apply({x}, {y}, 2)
{v} = Weighted.apply({y}.detach(), {x}, 2)
{v} = Reversed.apply({x}, 0.3)
{v} = Reversed.apply({x}.t(), 2) * {y}
{v}, other = Parted.apply({x})
{v}, other = Parted.apply({x})\n{v} = {v} + other
{v} = Parted.apply({x})[1]
{v} = Written.apply({x} * 1)
{v} = {x} * 2\nWritten.apply({v})
{v} = Masked.apply({x})
{v} = Masked.apply(Reversed.apply({x} * {y}, 1)).cumsum(-1)
{v} = checkpoint(lambda t: Squashed.apply(t, 1.1), {x}, use_reentrant=False)
{v} = torch.stack([Squashed.apply(row, 0.3) for row in {x}])
{v} = Sized.apply({x}.to(C))
{v} = Turned.apply(torch.complex({x}, {x}.cos()), 1 - 2j).abs()
"""

APPLIES_COMPLEX = r"""
{v} = Sized.apply({z})
{v} = Turned.apply({z}, 0.5 + 1j)
{v} = Turned.apply(Turned.apply({z}.conj(), 1j), 2)
{v} = Reversed.apply({z}, 0.7)
{v} = Doubled.apply({z})
{v} = Sized.apply({z} * {w}) * {z}
"""

COUNTED = r"""
{v} = {x}[{x} > 0]
{v} = {x}[{x} > 0].sum() * {y}
{v} = {x}[{x}.detach() > 0.1] * 2
{v} = {x}.masked_select({y} > 0).cumsum(0)
row = torch.where({x}.flatten() > 0)[0]\n{v} = {x}.flatten()[row] * row
row = ({x} > 0.2).flatten().nonzero()[:, 0]\n{v} = {x}.flatten().detach().index_add(0, row, {x}.flatten()[row])
{v} = {x}.clone()\n{v}[{x} > 0] = {x}[{x} > 0] * 3
{v} = {x}.clone()\n{v}[{x} < 0] = 0.5
{v} = {x}.repeat_interleave(({x}.flatten()[: len({x})] > 0).long() + 1, dim=0)
{v} = {x}[({x}.sum(-1) > 0)].mean(0)
{v} = torch.argwhere({x} > 0.5).sum() * {y}
{v} = {x}.masked_scatter({x} > 0, {x}.flatten() * 2)
{v} = {x}[torch.isfinite({x})].tanh()
row = ({x} > 0).sum()\n{v} = F.pad({y}, (0, row)).cumsum(-1)
row = ({x} > 0).sum()\n{v} = torch.cat([{y}.flatten(), {y}.new_zeros(row + 1)]) * 2
{v} = {y}.flatten()[: int(({x} > 0).sum())].sum() * torch.arange(int(({x} > 0).sum()) + 1)
n = int(({x} > 0).sum(-1).max())\n{v} = {y}[..., :n] * 2
{v} = torch.bincount(({x}.flatten() * 2).long().clamp(0, 5)).to(D) * {y}.mean()
{v} = torch.bincount(({x} > 0).long().flatten(), minlength=4).to(D).sum() * {y}
row = ({x} > 0).sum()\n{v} = {y}.new_zeros(2, row + 1).cumsum(1) + {y}.sum()
row = ({x} > 0).sum()\n{v} = torch.arange(row) * {y}.mean()
{v} = {x}[{x} > 0]\n{v} = {v}[{v} < 0.5] * 2
n = ({x} > 0).sum(0).flatten().tolist()\n{v} = torch.stack([{y}.sum() * k for k in n])
n = (({x}.flatten()[:3] > 0).long() + 1).tolist()\n{v} = {y}.flatten()[: sum(n)].split(n)[-1].sum() * {y}
row = ({x}.flatten()[:4] > 0).long() + 1\n{v} = {y}.mean() * torch.arange(len(row)).repeat_interleave(row)
{v} = torch.unique(({x}.detach() * 2).long()).sum() * {y}
{v} = {y}[torch.nonzero({x}.flatten()[: len({y})] > 0, as_tuple=True)[0]].sum(0)
{v} = {y}.flatten()[: ({x} > 0).sum()] * 2
{v} = {y} * 1\nfor k in range(int(({x} > 0).sum() % 4)):\n    {v} = {v}.sin() + k
"""

STATE = r"""
torch.randn(()).to(D).requires_grad_() ; {v} = {x} * {a}
torch.randn(1, dtype=D).requires_grad_() ; {v} = {x} * {a} + {a}.exp()
torch.randn(1, dtype=D) ; {v} = {x} * {a}
[torch.randn(1, dtype=D), torch.randn(1, dtype=D).requires_grad_()] ; {v} = {x} * {a}[0] + {a}[1]
[torch.randn(1, dtype=D) for _ in range(3)] ; {v} = sum({x} * each for each in {a})
(torch.randn(1, dtype=D).requires_grad_(), 2) ; {v} = {x} * {a}[0] * {a}[1]
{{"a": torch.randn(1, dtype=D), "b": [torch.randn(1, dtype=D), 1.5]}} ; {v} = {x} * {a}["a"] + {a}["b"][0] * {a}["b"][1]
None ; if {a} is None:\n    {a} = torch.arange(3, dtype=D)\n{v} = {x} * {a}[1]
None ; {a} = {x} * 2\n{v} = {a} + 1
None ; {a} = {x}.detach().mean()\n{v} = {x} - {a}
{{}} ; if "k" not in {a}:\n    {a}["k"] = torch.ones(2, dtype=D).cumsum(0)\n{v} = {x} * {a}["k"][1]
{{}} ; if {x}.shape not in {a}:\n    {a}[{x}.shape] = torch.ones({x}.numel(), dtype=D)\n{v} = {x} * {a}[{x}.shape].sum()
[] ; {a}.append({x}.mean())\n{v} = {x} * {a}.pop()
"""
"""An attribute's value → its use as ``{a}``."""

COMPUTED = r"""
{p} * 2 ; {v} = {x} * {a}
{p}.tanh() ; {v} = {x} * {a} + {a}
{p} + 0 ; {v} = {x} - {a}.exp()
[{p} * 2, {p}.sin()] ; {v} = {x} * {a}[0] + {a}[1]
({p}.sigmoid(), 1.5) ; {v} = {x} * {a}[0] * {a}[1]
{{"k": {p}.cos(), "l": [{p}.detach() * 2]}} ; {v} = {x} * {a}["k"] + {a}["l"][0]
Box({p} * 2, {p}.tanh()) ; {v} = {x} * {a}.first + {a}.all[1]
{p}.detach() * 3 ; {v} = {x} * {a}
{p}.softmax(-1) ; {v} = ({x} * {a}).sum(-1, keepdim=True)
{p}.mean() ; {v} = {a} * {x} if {a} > -50 else {x}
F.dropout({p}, 0.5) ; {v} = {x} + {a}
torch.stack([{p}, {p} * 2]) ; {v} = {x} * {a}[0] - {a}[1].tanh()
"""
"""An attribute that the training loop computes of a parameter before each call → its use."""

CACHED = r"""
{v} = {x} * ramp({x}.shape[-1], {x}.dtype)
{v} = {x} + from_dict({x}.shape[-1], {x}.dtype)
{v} = {x} * from_thread({x}.shape[-1], {x}.dtype)
{v} = {x} - from_context({x}.shape[-1], {x}.dtype)
{v} = {x} * from_function({x}.shape[-1], {x}.dtype)
{v} = {x} * of_module(self, {x}.shape[-1], {x}.dtype)
{v} = ramp({x}.shape[-1], {x}.dtype) * {y} + ramp({x}.shape[0], {x}.dtype).sum()
{v} = {x} * ramp({x}.numel(), D).sum() + from_dict(3, D)[1]
{v} = ({x} * from_dict({x}.shape[-1], {x}.dtype)).cumsum(-1) * from_dict({x}.shape[-1], {x}.dtype)
{v} = {x} * ramp(int(({x} > 0).sum()) + 1, D)[-1]
{v} = checkpoint(lambda t: t * ramp(t.shape[-1], t.dtype).exp(), {x}, use_reentrant=False)
with torch.no_grad():\n    {v} = ramp({x}.shape[-1], {x}.dtype) * 2\n{v} = {v} * {x}
"""

KEEPS = r"""
Rotary() ; {v} = {a}({x})
Box(torch.randn(1, dtype=D).requires_grad_(), torch.randn(1, dtype=D)) ; {v} = {x} * {a}.first + {a}.all[1]
Box(torch.ones(1, dtype=D), torch.ones(2, dtype=D)) ; {v} = {x} * {a}.all[1][0]\n{a}.first = {x}.detach()
[[torch.randn(1, dtype=D)], (torch.randn(1, dtype=D),)] ; {v} = {x} * {a}[0][0] - {a}[1][0]
functools.lru_cache(lambda n: torch.arange(n, dtype=D)) ; {v} = {x} * {a}({x}.shape[-1])
"""
"""An attribute's value → its use as ``{a}``: objects with tensors, caches."""

CONTROL = r"""
{v}, other = torch.cond({x}.sum() > 0, lambda a, b: (a * 2, b.sin()), lambda a, b: (a.sin(), b * a.mean()), ({x}, {y}))
{v} = torch.cond({y}.mean() > 0, lambda t: torch.cond(t.sum() > 0, torch.sin, torch.cos, (t,)), lambda t: t * 2, ({x},))
{v} = torch.cond({x}.isnan().any(), lambda t: t * 2, lambda t: t.clone(), ({x},))
{v} = scan(lambda h, t: ({{"a": h["a"] + t}}, h["a"] * t), {{"a": torch.zeros_like({x}[0])}}, {x})[1]
{v} = scan(lambda h, t: (h * 0.5 + t[0], t[1] * h), {x}[0] * 1, ({x}, {x} * 2))[1]
{v} = scan(lambda h, t: (h + t.sin(), h * t), torch.zeros_like({x}.select(-1, 0)), {x}, dim=-1)[1]
{v} = scan(lambda h, t: (torch.cond(t.sum() > 0, torch.sin, torch.cos, (h,)) + t, h + 1), {x}[0] * 1, {x})[0]
{v} = scan(lambda h, t: (h.tanh() + t * {y}.mean(), h * t), {x}[0] * 1, {x}, reverse=True)[1]
{v} = while_loop(lambda i, t: (t.abs().sum() < 20) & (i < 8), lambda i, t: (i + 1, t * 1.5), (torch.tensor(0), {x}))[1]
{v} = while_loop(lambda i, s, t: i < 3, lambda i, s, t: (i + 1, s + t, t.sin()), (torch.tensor(0), {x}, {x} * 2))[1]
{v} = mapped(lambda t: (t[0].sin(), t[1] * t[0].sum()), ({x}, {x} * 2))[1]
{v} = mapped(lambda t: scan(lambda h, u: (h + u, h * u), torch.zeros_like(t[0]), t)[1], {x})
{v} = associative_scan(lambda s, t: s + t, {x}, 0, reverse=True, combine_mode="generic")
q = {x}.detach().view(1, 1, -1, {x}.shape[-1])\n{v} = flex_attention(q, q, q) * {y}.mean()
q = {x}.detach().view(1, 1, -1, {x}.shape[-1])\n{v} = flex_attention(q, q, q, lambda s, *at: s + at[-1]) + {y}.sum()
"""

TEXTS = r"""
{v} = {x} * len(f"{{tuple({x}.shape)}}")
{v} = {x} * (2 if "64" in str({x}.dtype) else 3)
{v} = {x} * float(f"{{({x} > -1e30).sum().item()}}")
{v} = {x} + float(str(({y}.detach() * 0 + 0.5).mean().item()))
{v} = {x} * len(str(({x} > 0).any().item()))
{v} = {x} * (1 if repr({x}.requires_grad) == "True" else 2)
{v} = {x} * int("{{}}".format({x}.dim() + 1))
{v} = {x} * len(f"{{int({x}.sum() > 0)}}" + type(self).__name__)
{v} = {x} * len(f"{{({x} > 0).any()}}")
{v} = {x} * len(f"{{({x} > -1e30).sum():03d}}")
{v} = {x} * len("%d" % ({x} > 0).sum())
{v} = {x} * (2 if "True" in repr({x}.isfinite()) else 3)
{v} = {x} * len(str(({x} > 0).sum(-1).tolist()))
{v} = {x} * len(f"{{list({x}.shape)}} of {{{y}.dim()}}")
"""

PADS = r"""
{v} = F.pad({x}, (0, 2)) + F.pad({x}, (2, 0))
{v} = F.pad({x}[:1], (0, 2)) + F.pad({y}, (2, 0))
{v} = F.pad({x}, (0, 1)) - F.pad({y}.detach(), (1, 0)) * F.pad({x}, (1, 0))
{v} = F.pad({x}, (0, 2)) + F.pad({x} * 2, (1, 1)) + F.pad({y}, (2, 0))
{v} = F.pad({x}[..., :1], (0, {x}.shape[-1])) + F.pad({x}, (1, 0))
{v} = F.pad({x}, (0, 0, 0, 1)) + F.pad({x}[:, :1], (0, 0, 1, 0))
{v} = F.affine_grid({x}.mean() * torch.eye(2, 3, dtype=D)[None], (1, 1, 2, 3))
"""

DERIVATIVES = """
slope({x}, {y}) | slope({x}, {y}, False) | slope({x}, {x}.tanh()) | slope({x} * 0.5, {y}) | slope({x}, {y}).tanh()
slope({x}, {y}) + {x} | slope({x}, slope({x}, {y})) | at_leaf({x}, lambda t: (t * 0.7).sin() * t)
at_leaf({x}, lambda t: F.gelu(t)) | at_leaf({x}, lambda t: F.layer_norm(t * t, t.shape[-1:]))
at_leaf({x}, lambda t: F.dropout(t.sigmoid(), 0.3)) | at_leaf({x}, lambda t: t.softmax(-1) @ t.mT)
at_leaf({x}, lambda t: t * {x}.mean(), False) | at_leaf({x}, lambda t: F.softplus(t).cumsum(0))
at_leaf({x}, lambda t: (t.unsqueeze(0) - t.unsqueeze(1)).square().sum(-1).add(0.1).sqrt())
at_leaf({x}, lambda t: at_leaf(t, lambda s: s.sin() * t)) | at_leaf({x}, lambda t: F.elu(t) * {x}.detach())
"""


def themes(seed: int) -> set[str]:
    """The themes of a seed's program, mostly none."""
    rng = random.Random(f"themes of {seed}")
    return {name for name, share in SHARE.items() if rng.random() < share}


def is_complex(value: torch.Tensor) -> bool:
    return value.is_complex()


def _expressions(table: str):
    templates = split_table(table)

    def propose(scope: Scope) -> str | None:
        return _filled(scope, scope.choice(templates))

    return propose


def _lines(table: str):
    templates = [line.replace("\\n", "\n") for line in table.strip().splitlines()]

    def propose(scope: Scope) -> str | None:
        template = scope.choice(templates)
        if "{z}" in template:
            return _filled(scope, template)
        x = scope.pick()
        y = scope.partner(x) if x else None
        return None if y is None else template.format(x=x, y=y, v=scope.fresh("v"))

    return propose


def _filled(scope: Scope, template: str) -> str | None:
    x = scope.pick()
    y = scope.partner(x) if "{y}" in template and x else None
    slots = {"v": scope.fresh("v"), "x": x, "y": y, "z": scope.pick(is_complex), "w": scope.pick(is_complex)}
    if any(f"{{{name}}}" in template and value is None for name, value in slots.items()):
        return None
    if "{p}" in template:
        of = scope[slots["z"] if "{z}" in template else slots["x"]]
        text = f"torch.randn({tuple(of.shape[-1:])}, dtype=C) * 0.5"
        slots["p"] = scope.define(text, scope.choice(["parameter", "parameter", "buffer"]))
    return template.format(**slots)


def _with_attributes(table: str):
    pairs = [line.replace("\\n", "\n").split(" ; ") for line in table.strip().splitlines()]

    def propose(scope: Scope) -> str | None:
        made, use = scope.choice(pairs)
        x = scope.pick()
        if x is None:
            return None
        return use.format(x=x, v=scope.fresh("v"), a=scope.define(made.replace("{{", "{").replace("}}", "}")))

    return propose


def _computed(scope: Scope) -> str | None:
    """The use of an attribute that is computed before each call."""
    made, use = scope.choice([line.replace("\\n", "\n").split(" ; ") for line in COMPUTED.strip().splitlines()])
    x = scope.pick()
    if x is None:
        return None
    extents = tuple(scope[x].shape[-1:])
    raw = scope.define(f"torch.randn({extents}, dtype=D)", scope.choice(["parameter", "parameter", "frozen"]))
    return use.format(x=x, v=scope.fresh("v"), a=scope.compute(made.format(p=raw)))


def _hyper(scope: Scope) -> str | None:
    """A layer whose weight the training loop computes before each call."""
    x = scope.pick(lambda t: t.dtype == scope.dtype and t.dim() >= 1)
    if x is None or not scope[x].shape[-1]:
        return None
    n, k = scope[x].shape[-1], scope.integer(1, 4)
    raw = scope.define(f"torch.randn({k}, {n}, dtype=D) * 0.4", "parameter")
    layer = scope.define(f"nn.Linear({n}, {k}, dtype=D)")
    scope.extend(f"del {layer}.weight")
    scope.before.append(f"{layer}.weight = {raw}.tanh()")
    exec(scope.before[-1], scope.names)
    return f"{scope.fresh('v')} = {layer}({x})"


COMPLEX = (
    (_expressions(MAKES_COMPLEX), 4.0, True),
    (_expressions(KEEPS_COMPLEX), 7.0, True),
    (_expressions(READS_COMPLEX), 4.0, True),
    (_lines(WRITES_COMPLEX), 1.0, False),
)
"""Proposals, their weights, and whether each is an expression."""

VOCABULARY = {
    "complex": COMPLEX,
    "functions": ((_lines(APPLIES), 5.0, False), (_lines(APPLIES_COMPLEX), 1.0, False)),
    "counts": ((_lines(COUNTED), 5.0, False),),
    "state": ((_with_attributes(STATE), 6.0, False),),
    "texts": ((_lines(TEXTS), 6.0, False),),
    "pads": ((_lines(PADS), 6.0, False),),
    "computed": ((_computed, 10.0, False), (_hyper, 3.0, False)),
    "caches": ((_lines(CACHED), 9.0, False), (_with_attributes(KEEPS), 6.0, False)),
    "control": ((_lines(CONTROL), 15.0, False),),
    "derivatives": ((_expressions(DERIVATIVES), 6.0, True),),
}
"""By theme."""
