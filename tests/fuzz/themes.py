"""Vocabulary of some programs alone: complex numbers, and autograd Functions of the user's own."""

from __future__ import annotations

import random

import torch

from tests.fuzz.pointwise import split_table
from tests.fuzz.scope import Scope

__all__ = ["COMPLEX", "FUNCTIONS", "is_complex", "themes"]

SHARE = {"complex": 0.2, "functions": 0.2}
"""Of the programs, those with a theme."""

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
torch.complex({z}.imag, {z}.real) | {z}.resolve_conj() | torch.roll({z}, 1, 0) | {z}.mH if {z}.dim() == 2 else {z}
"""

READS_COMPLEX = """
{z}.abs() | {z}.real | {z}.imag | torch.view_as_real({z}.resolve_conj()) | ({z} * {z}.conj()).real | {z}.norm()
{z}.imag * {z}.real | {z}.abs().square().mean() | torch.fft.irfft({z}) | ({z} + 9).angle() | {z}.conj().imag + 1
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
    slots = {"x": scope.pick(), "z": scope.pick(is_complex), "w": scope.pick(is_complex)}
    if any(f"{{{name}}}" in template and value is None for name, value in slots.items()):
        return None
    if "{p}" in template:
        of = scope[slots["z"] if "{z}" in template else slots["x"]]
        text = f"torch.randn({tuple(of.shape[-1:])}, dtype=C) * 0.5"
        slots["p"] = scope.define(text, scope.choice(["parameter", "parameter", "buffer"]))
    return template.format(**slots)


COMPLEX = (
    (_expressions(MAKES_COMPLEX), 4.0, True),
    (_expressions(KEEPS_COMPLEX), 7.0, True),
    (_expressions(READS_COMPLEX), 4.0, True),
    (_lines(WRITES_COMPLEX), 1.0, False),
)
"""Proposals, their weights, and whether each is an expression."""

FUNCTIONS = ((_lines(APPLIES), 5.0, False),)
