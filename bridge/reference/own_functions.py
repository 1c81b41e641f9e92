"""A user's own Function in an interpreted graph: torch's autograd runs the backward that the graph holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

__all__ = ["own_gradient", "with_own_gradient"]

Evaluate = Callable[[fx.Node, Mapping[fx.Node, Any]], Any]
"""A node, and the values of those that it reads → its value."""


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gradients: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]], count: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.gradients, ctx.others = gradients, len(tensors) - count
        return tuple(torch.zeros_like(each) for each in tensors[count:])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.gradients(grads), *[None] * ctx.others


class _With(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, grad


def own_gradient(node: fx.Node, env: Mapping[fx.Node, Any], evaluate: Evaluate) -> tuple[torch.Tensor, ...]:
    """The value of a ``custom_gradient`` node; backward, what depends on its tangents is computed from gradients."""
    inputs, gradients, tangents = node.args
    known = {each: value.detach() if isinstance(value, torch.Tensor) else value for each, value in env.items()}

    def backward(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        values = {**known, **dict(zip(tangents, grads, strict=True))}
        again = set(tangents)
        for each in node.graph.nodes:
            if each is node:
                break
            if each not in again and any(read in again for read in each.all_input_nodes):
                again.add(each)
                values[each] = evaluate(each, values)
        return [values[each] for each in gradients]

    return _Own.apply(backward, len(inputs), *(env[each] for each in (*inputs, *tangents)))


def with_own_gradient(output: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """The value of a ``with_gradient`` node."""
    return output.detach().clone() if gradient is None else _With.apply(output, gradient)
