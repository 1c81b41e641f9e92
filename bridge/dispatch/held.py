"""Held tensors: a call's inputs and draws that only an eager backward reads → these, unchanged, when it comes.

Autograd does not save them for the compiled backward: a change in place, which is none of its concern, is an error of
the eager one alone. An argument that autograd follows is saved by a node of its own, as autograd saves: hooks on saved
tensors see it, and what it becomes by a change in place keeps no graph alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from bridge.capture import Captured

__all__ = ["VERSION", "Held", "held_apart", "saved_apart", "saved_of", "tensors_of"]

Held = tuple[Sequence[torch.Tensor | None], Sequence[int] | None, torch.Tensor | None]
"""What one call holds: tensors in order, how often each had been changed in place (some number for those that are
``None``), and the result of :class:`_Followed` for these."""

_CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of shape "
    "{shape}, which the backward of a module dispatched to TVM reads under create_graph=True or is_grads_batched=True, "
    "is at version {now}; version {then} is wanted."
)
_UNCOUNTED = (
    "create_graph=True or is_grads_batched=True through a module dispatched to TVM that was called with an inference "
    "tensor, of which torch does not count changes."
)

VERSION: Callable[[torch.Tensor], int] = attrgetter("_version")
"""How often a tensor has been changed in place."""


def saved_of(node: Any) -> Sequence[torch.Tensor]:
    """What the autograd node of a call saved, of the types that it saved, whatever hooks on saved tensors made of them:
    eager's operators take masks and indices of other types, too."""
    saved, types = node.saved_tensors, node.types
    return saved if types is None else [each.to(kind) for each, kind in zip(saved, types, strict=True)]


def tensors_of(held: Held) -> list[torch.Tensor]:
    """The tensors of a call. ``RuntimeError`` if one was changed in place since the call: an element of it."""
    tensors, versions, token = held
    if versions is None:
        raise RuntimeError(_UNCOUNTED)
    followed = iter(() if token is None else token.grad_fn.saved_tensors)
    found = []
    for tensor, then in zip(tensors, versions, strict=True):
        if tensor is not None and tensor._version != then and tensor.numel():
            raise RuntimeError(_CHANGED.format(shape=tuple(tensor.shape), now=tensor._version, then=then))
        found.append(next(followed) if tensor is None else tensor)
    return found


class _Followed(torch.autograd.Function):
    """Saves its inputs. Nothing goes backward through it."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return tensors[0].new_empty(0)


def held_apart(
    tensors: Sequence[torch.Tensor], copied: Sequence[int], followed: Sequence[int]
) -> tuple[list[torch.Tensor | None], list[torch.Tensor], torch.Tensor | None]:
    """What a call holds, where some of the tensors are not held as they are: first and last of :data:`Held`, and
    between them the tensors that tell how often each has been changed.

    Args:
        copied: places of those that the call changes; ``followed``: of those that :class:`_Followed` is for.
    """
    found: list[Any] = list(tensors)
    for place in copied:
        found[place] = tensors[place].clone()
    token = None
    if followed:
        with torch.enable_grad():
            token = _Followed.apply(*[tensors[place] for place in followed])
        for place in followed:
            found[place] = None
    return found, [token if each is None else each for each in found], token


def saved_apart(captured: Captured) -> tuple[set[int], set[int]]:
    """Inputs that are saved in other tensors than the caller's, for what becomes of those until the backward.

    First: not parameters, of which eager saves what it has computed of them: copies. Second: of which eager saves a
    view, which does not follow ``tensor.data = other``.
    """
    observation, owned = captured.observation, captured.module_tensors
    parameters = {index for index, each in enumerate(owned) if each.kind == "parameter"}
    count = len(owned) + len(captured.arguments)
    as_eagers = observation.saved | observation.saved_views | observation.checkpointed.keys() | parameters
    return set(range(count)) - as_eagers, set(range(count)) - observation.saved - observation.checkpointed.keys()
