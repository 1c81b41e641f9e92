"""Fake run: a call of a module on fake tensors of the layouts of its own and its arguments → what it did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bridge.base.modes import autocast_depth
from bridge.base.torch_fakes import clear_fake_memo, fake_mode, stand_in
from bridge.base.torch_internals import FakeTensorMode, pytree, storage_id
from bridge.base.torch_shapes import fake_results_not_kept
from bridge.capture.observation import Observation
from bridge.capture.observe import observe
from bridge.capture.own_functions import OwnFunctions
from bridge.capture.own_leaves import own_leaves
from bridge.capture.symbolic_formulas import running
from bridge.capture.symbolic_sizes import SymbolicSizes
from bridge.state import ModuleTensor, once_per_owner

__all__ = ["FakeRun", "fake_run", "forget_real_tensors"]


@dataclass(frozen=True)
class FakeRun:
    """The observation, and the call as it was made.

    Attributes:
        observation: see :mod:`bridge.capture.observation`.
        mode: the fake mode of all tensors.
        tensors: the module's (fake), and ``made``: what each was like before the run.
        arguments: the argument leaves that are tensors (fake), in pytree order.
        argument_leaves: all leaves of the arguments, tensors replaced by ``None``.
        argument_is_tensor: which of them are tensors.
        in_spec: pytree structure of ``(args, kwargs)``.
    """

    observation: Observation
    mode: FakeTensorMode
    tensors: tuple[torch.Tensor, ...]
    made: tuple[tuple, ...]
    arguments: tuple[torch.Tensor, ...]
    argument_leaves: tuple[Any, ...]
    argument_is_tensor: tuple[bool, ...]
    in_spec: pytree.TreeSpec


def fake_run(
    module: nn.Module,
    tensors: Sequence[ModuleTensor],
    real_tensors: Sequence[torch.Tensor],
    args: tuple,
    kwargs: dict[str, Any],
    sizes: SymbolicSizes | None = None,
    functions: OwnFunctions | None = None,
    earlier: FakeRun | None = None,
    modes: Sequence[AbstractContextManager] = (),
) -> FakeRun:
    """Runs ``module(*args, **kwargs)`` on fake tensors.

    Args:
        tensors, real_tensors: what the module owns, see :func:`bridge.state.tensors.module_tensors`.
        sizes: those of the arguments that are symbols; ``None``: all are numbers.
        functions: the user's own, as they were traced; ``None``: none was.
        earlier: a run of the same module, whose tensors serve again where it has left them as they were
            (:func:`_serves_again`).
        modes: what forward is to run under besides.

    Raises:
        Exception: whatever the module's forward raises.
    """
    if earlier is not None and _serves_again(earlier):
        mode, fakes, made = earlier.mode, earlier.tensors, earlier.made
    else:
        env = None if sizes is None else sizes.environment
        with nullcontext() if env is None else fake_results_not_kept():
            mode = fake_mode(allow_non_fake_inputs=True, shape_env=env, static_shapes=True)
        fakes = tuple(mode.from_tensor(tensor) for tensor in real_tensors)
        made = tuple(map(_description, fakes))
    state = {
        name: fake
        for spec, fake in zip(tensors, fakes, strict=True)
        if spec.kind != "attribute"
        for name in once_per_owner(module, spec.names)
    }
    leaves, in_spec = pytree.tree_flatten(own_leaves(args, kwargs, real_tensors))
    fake_leaves = [_fake_leaf(mode, leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    for index, value in {} if sizes is None else sizes.arguments.items():
        fake_leaves[index] = stand_in(value, mode).requires_grad_(leaves[index].requires_grad)
    arguments = tuple(leaf for leaf in fake_leaves if isinstance(leaf, torch.Tensor))
    fake_args, fake_kwargs = pytree.tree_unflatten(fake_leaves, in_spec)
    parameters = [fake for spec, fake in zip(tensors, fakes, strict=True) if spec.kind == "parameter"]
    given = module, state, parameters, [*fakes, *arguments], fake_args, fake_kwargs, running(mode)
    try:
        observation = observe(*given, functions=functions or OwnFunctions(), modes=modes)
    except BaseException:
        clear_fake_memo(mode)
        raise
    return FakeRun(
        observation=observation,
        mode=mode,
        tensors=fakes,
        made=made,
        arguments=arguments,
        argument_leaves=tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves),
        argument_is_tensor=tuple(isinstance(leaf, torch.Tensor) for leaf in leaves),
        in_spec=in_spec,
    )


def _serves_again(earlier: FakeRun) -> bool:
    """Whether a run on the tensors of ``earlier`` runs the operators that one on new tensors would.

    It has changed none of them, and autocast has kept no casts of them, as it does until its outermost context is left:
    a second run would not cast again.
    """
    return autocast_depth() == 0 and earlier.made == tuple(map(_description, earlier.tensors))


def _description(fake: torch.Tensor) -> tuple:
    """All that a run may change of a fake tensor: its version, place in autograd's graph, geometry, attributes."""
    graph = fake.requires_grad, fake.grad_fn, id(fake.grad), fake._backward_hooks
    return fake._version, *graph, fake.shape, fake.stride(), fake.storage_offset(), storage_id(fake), tuple(vars(fake))


def forget_real_tensors(fakes: Iterable[torch.Tensor]) -> None:
    """Lets go of the tensors that these fake ones were made for.

    Their mode has weak references to them, which no longer has a use once a call is captured, and because of which
    ``torch.utils.swap_tensors`` (a module's ``.to()``, if torch is told so) would refuse the module's parameters.
    """
    for mode in {id(fake.fake_mode): fake.fake_mode for fake in fakes}.values():
        clear_fake_memo(mode)


def _fake_leaf(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A fake leaf of the tensor's layout: the module's own graph starts at its arguments."""
    return mode.from_tensor(tensor.detach()).requires_grad_(tensor.requires_grad)
