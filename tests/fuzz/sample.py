"""A module and its sample → the dispatched module, without side effects, also if the dispatch fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bridge import UnsupportedModule, add_tvm_dispatch
from tests.device import generators, set_generators
from tests.fuzz.closeness import identical
from tests.fuzz.play import copied
from tests.fuzz.program import Arguments
from tests.fuzz.verdict import EagerRaises, Wrong, words

DISPATCH_STATE = ("_compiled_call_impl", "_forward_hooks_with_kwargs")
"""Attributes of each module that hold its dispatch."""


def add(module: nn.Module, arguments: Arguments, options: Mapping[str, Any]) -> None:
    """Adds the dispatch and checks that parameters, attributes, generators and the sample stay as they were.

    Raises:
        EagerRaises: eager raises the same error.
        Wrong: a change.
        Exception: any error of ``add_tvm_dispatch``.
    """
    before = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    attributes = {path: _attributes(child) for path, child in module.named_modules()}
    torch.manual_seed(11)
    generator = generators()
    versions = [leaf._version for leaf in arguments.leaves]
    try:
        add_tvm_dispatch(module, arguments.args, sample_kwargs=arguments.kwargs, **options)
    except Exception as error:
        if not isinstance(error, UnsupportedModule) and _raises_alike(module, arguments, generator, error):
            raise EagerRaises from error
        raise
    finally:
        after = module.state_dict()
        if after.keys() != before.keys() or not all(identical(after[name], before[name]) for name in before):
            raise Wrong("add_tvm_dispatch changed a parameter or a buffer")
        if {path: _attributes(child) for path, child in module.named_modules()} != attributes:
            raise Wrong("add_tvm_dispatch changed an attribute")
        if not torch.equal(generators(), generator):
            raise Wrong("add_tvm_dispatch moved the generator")
        if [leaf._version for leaf in arguments.leaves] != versions or any(
            x.grad is not None for x in arguments.leaves
        ):
            raise Wrong("add_tvm_dispatch changed its sample")


def _raises_alike(module: nn.Module, arguments: Arguments, generator: Tensor, error: Exception) -> bool:
    """Whether eager raises the same error at a state of the generators; restores that state."""
    set_generators(generator)
    try:
        copied(module)(*arguments.args, **arguments.kwargs)
    except Exception as own:  # noqa: BLE001 - compared below
        return type(own) is type(error) and words(own) == words(error)
    finally:
        set_generators(generator)
    return False


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes: objects by identity, containers and plain values by their contents (tracing renews them)."""
    return {name: _key(value) for name, value in module.__dict__.items() if name not in DISPATCH_STATE}


def _key(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value), [_key(item) for item in value]
    return (type(value), value) if isinstance(value, bool | int | float | str) else id(value)
