"""Comparing a gradient rule with torch.autograd, in float64 and to rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from autodiff import clean, differentiate
from autodiff.ir import Function
from bridge.reference.relax import interpret
from tests.autodiff.evaluate import function


def interpreted(func: Function, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of a function, operator by operator in torch."""
    return interpret(func, args).results


def check(
    build: Callable,
    reference: Callable,
    *args: torch.Tensor,
    run: Callable = interpreted,
    rtol: float = 1e-10,
    atol: float = 1e-11,
) -> None:
    """Values and vector-Jacobian products of ``build(scope, *params)`` against ``reference(*args)``.

    Both return a tensor or a list of tensors. Floating point arguments are differentiated; so are floating point
    results. ``run(func, args)`` computes the results of a function.
    """
    func = function(build, *args)
    required = [index for index, arg in enumerate(args) if arg.is_floating_point()]
    leaves = [arg.clone().requires_grad_() if arg.is_floating_point() else arg for arg in args]
    wanted = reference(*leaves)
    wanted = list(wanted) if isinstance(wanted, list | tuple) else [wanted]
    outputs = [index for index, value in enumerate(wanted) if value.is_floating_point()]
    generator = torch.Generator().manual_seed(7)
    grad_outs = [torch.randn(wanted[i].shape, generator=generator, dtype=torch.float64) for i in outputs]
    grad_outs = [grad.to(wanted[i].dtype) for grad, i in zip(grad_outs, outputs, strict=True)]
    differentiated = [(wanted[i], grad) for i, grad in zip(outputs, grad_outs, strict=True) if wanted[i].requires_grad]
    gradients = torch.autograd.grad(
        [value for value, _ in differentiated],
        [leaves[index] for index in required],
        [grad for _, grad in differentiated],
        allow_unused=True,
    )
    joint = clean(differentiate(func, outputs, required))
    got = run(joint, [*args, *grad_outs])
    for ours, theirs in zip(got, wanted, strict=False):
        torch.testing.assert_close(ours, theirs.detach(), rtol=rtol, atol=atol, equal_nan=True)
    for index, ours, theirs in zip(required, got[len(wanted) :], gradients, strict=True):
        theirs = torch.zeros_like(args[index]) if theirs is None else theirs
        torch.testing.assert_close(
            ours, theirs, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text, i=index: f"gradient of p{i}: {text}"
        )


def draw(*extents: int, low: float = -2.0, high: float = 2.0, seed: int = 0) -> torch.Tensor:
    """Uniform float64 numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(extents, generator=generator, dtype=torch.float64) * (high - low) + low
