"""The device that parity is tested on: ``TEST_DEVICE=cuda`` moves modules and inputs there; the CPU otherwise."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["DEVICE", "generators", "moved", "set_generators"]

DEVICE = torch.device(os.environ.get("TEST_DEVICE", "cpu"))


def generators() -> torch.Tensor:
    """The state of the default generators, of the CPU and of the device."""
    states = [torch.get_rng_state()]
    return torch.cat([*states, torch.cuda.get_rng_state(DEVICE)] if DEVICE.type == "cuda" else states)


def set_generators(state: torch.Tensor) -> None:
    """Puts back what :func:`generators` gave."""
    own = len(torch.get_rng_state())
    torch.set_rng_state(state[:own])
    if DEVICE.type == "cuda":
        torch.cuda.set_rng_state(state[own:], DEVICE)


def moved(tree: Any) -> Any:
    """A tree with its tensors on the device, of the same ``requires_grad``; one that occurs twice still does."""
    if DEVICE.type == "cpu":
        return tree
    seen: dict[int, torch.Tensor] = {}

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in seen:
            seen[id(leaf)] = leaf.detach().to(DEVICE).requires_grad_(leaf.requires_grad)
        return seen[id(leaf)]

    return pytree.tree_map(move, tree)
