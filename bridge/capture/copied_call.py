"""Copied call: a module and a sample → a call on copies of all of its tensors, which changes none of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from bridge.base.tensor_properties import span_of
from bridge.base.torch_internals import pytree
from bridge.capture.inplace_rules import overlaps_itself
from bridge.capture.isolated_rng import IsolatedRNG
from bridge.state import own_attributes, tensor_problem

__all__ = ["Copies", "copied_call"]


@contextmanager
def copied_call(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    isolated: Callable[[], AbstractContextManager[Any]] = IsolatedRNG,
) -> Iterator[tuple[Callable[[], Any], list[torch.Tensor]]]:
    """Gives ``(call, copies)``: what runs ``module(*args, **kwargs)`` on copies of its tensors and of the sample.

    They have the same memory layout and the same ``requires_grad`` (a ``view`` may fit a contiguous tensor only, a
    write into a leaf only fails if that requires grad). Neither ``.grad`` nor the generator change; tensors that are
    plain attributes are written as they are, and put back. Python state that forward changes is left changed.

    Args:
        isolated: makes the context in which the generators do not change.
    """
    copies = Copies()
    state = {name: _like(tensor, copies.of(tensor)) for name, tensor in _registered(module)}
    copied_args, copied_kwargs = pytree.tree_map_only(torch.Tensor, copies.of, (args, kwargs))
    values = [value for child in module.modules() for _, value in own_attributes(child)]
    before = TensorContents(value for value in values if isinstance(value, torch.Tensor))
    try:
        with isolated():
            yield lambda: torch.func.functional_call(module, state, copied_args, copied_kwargs), copies.made()
    finally:
        before.restore()


def _registered(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _like(tensor: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """A copy as the module holds it: a parameter, with the attributes that hooks may count on."""
    if isinstance(tensor, nn.Parameter) and made.is_leaf:
        made = nn.Parameter(made, tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    return made


class Copies:
    """Copies of tensors, one for each object: an argument may be given twice."""

    def __init__(self) -> None:
        self._copies: dict[int, torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = _copy(tensor)
        return self._copies[id(tensor)]

    def made(self) -> list[torch.Tensor]:
        return list(self._copies.values())


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in the same layout; a leaf of its own graph if the tensor is one."""
    source = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_conj() or tensor.is_neg():
        return source.clone().requires_grad_(tensor.requires_grad)
    memory = source.as_strided((span_of(tensor.shape, tensor.stride()),), (1,)).clone()
    if tensor.is_leaf or not torch.is_grad_enabled():
        return memory.as_strided(tensor.shape, tensor.stride()).data.requires_grad_(tensor.requires_grad)  # no view
    return memory.requires_grad_(tensor.requires_grad).clone().as_strided(tensor.shape, tensor.stride())


# Tensor contents: tensors that forward may write behind a capture's back → a snapshot of their numbers, to put back.
#
# Parameters, buffers and arguments are copied before real numbers are computed with them. A tensor that is an
# attribute, a global or lies in a list is used as it is: what the runs of a capture that ends in a refusal write into
# it is undone.


#: Tensors that take more than this, all smaller ones included, are not looked after: they are data, not state.
MAX_BYTES = 2**26


class TensorContents:
    """The numbers of tensors as they are now.

    Args:
        tensors: any; of several equal objects one counts.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]):
        plain = {id(each): each for each in tensors if tensor_problem(each) is None and not overlaps_itself(each)}
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        left = MAX_BYTES
        for tensor in sorted(plain.values(), key=lambda each: each.nbytes):
            left -= tensor.nbytes
            if left < 0:
                break
            self._before.append((tensor, tensor.detach().clone()))

    def restore(self) -> None:
        """Puts back what has changed; a batch norm changes running statistics without counting it."""
        for tensor, numbers in self._before:
            if not torch.equal(tensor.detach(), numbers):
                tensor.data.copy_(numbers)
