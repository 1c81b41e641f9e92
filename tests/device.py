"""The device that the suite runs on: ``TEST_DEVICE=cuda`` puts modules and inputs there; the CPU otherwise."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.models
from torch import nn
from torch.jit import _builtins
from torch.utils import _pytree as pytree

ASSERTS = pytest.mark.cpu("what is refused in the run is an assertion on a GPU, which ends the process's context")

DEVICE = torch.device(os.environ.get("TEST_DEVICE", "cpu"))

AUTOCAST = "autocast" if DEVICE.type == "cpu" else "CUDA autocast"
"""The device's autocast in the words of a guard's failure."""

FACTORIES = (
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "zeros",
)
"""Functions of torch that make tensors from numbers."""

_CALLERS = tuple(
    str(Path(file).parent) for file in (__file__, nn.modules.__file__, transformers.models.__file__) if file is not None
)
"""Folders whose calls without a device are redirected: tests, and constructors of modules."""


@contextmanager
def factories_on(device: torch.device) -> Iterator[None]:
    """Tests and constructors of modules make their tensors on a device, where they name none.

    The tested code would see torch's own function mode for this (``torch.set_default_device``), which would move
    tensors that the package itself makes. A generator of the CPU draws there, and its draws are moved.
    """
    with torch.device("cpu"):
        torch.empty(0)  # torch notes which functions follow a default device when it first has one: not the patched
    importlib.import_module("torch._decomp.decompositions_for_jvp")  # TorchScript compiles it at the first ``jvp``
    with pytest.MonkeyPatch.context() as patch:
        for name in FACTORIES:
            placed = _placed(getattr(torch, name), device)
            patch.setattr(torch, name, placed)
            patch.setitem(_builtins._get_builtin_table(), id(placed), f"aten::{name}")  # TorchScript's own
        yield


def _placed(factory: Callable[..., torch.Tensor], device: torch.device) -> Callable[..., torch.Tensor]:
    """The factory with ``device`` by default for callers in tests. Like torch's own it reads no ``type``: forward may
    call it."""
    kind = device.type

    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.compiler.is_dynamo_compiling():  # Dynamo knows no frames
            return factory(*args, **{"device": device, **kwargs})
        caller = sys._getframe(1).f_code.co_filename
        if kwargs.get("device") is not None or not caller.startswith(_CALLERS):
            return factory(*args, **kwargs)
        generator = kwargs.get("generator")
        if generator is None or str(generator.device).startswith(kind):
            return factory(*args, **{**kwargs, "device": device})
        requires_grad = kwargs.pop("requires_grad", False)
        return factory(*args, **kwargs).to(device).requires_grad_(requires_grad)

    make.__name__, make.__doc__ = factory.__name__, factory.__doc__  # not wraps: unwrapping would find no source
    return make


def generators() -> torch.Tensor:
    """The state of the default generators, of the CPU and of the device."""
    states = [torch.get_rng_state()]
    return torch.cat([*states, torch.cuda.get_rng_state(DEVICE)] if DEVICE.type == "cuda" else states)


def set_generators(state: torch.Tensor) -> None:
    """Restores a state from :func:`generators`."""
    own = len(torch.get_rng_state())
    torch.set_rng_state(state[:own])
    if DEVICE.type == "cuda":
        torch.cuda.set_rng_state(state[own:], DEVICE)


def forked_generators() -> AbstractContextManager:
    """A context after which the default generators, of the CPU and of the device, are where they were."""
    return torch.random.fork_rng(devices=[DEVICE] if DEVICE.type == "cuda" else [])


def moved(tree: Any) -> Any:
    """A tree with its tensors on the device, of the same ``requires_grad``; equal objects stay one object."""
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    if all(tensor.device.type in (DEVICE.type, "meta") for tensor in tensors):
        return tree  # itself: a table that a test changes is the package's
    seen: dict[int, torch.Tensor] = {}

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device.type == "meta":
            return leaf
        if id(leaf) not in seen:
            seen[id(leaf)] = leaf.detach().to(DEVICE).requires_grad_(leaf.requires_grad)
        return seen[id(leaf)]

    return pytree.tree_map(move, tree)
