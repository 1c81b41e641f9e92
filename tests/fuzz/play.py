"""One call of a module, forward and backward, and everything that a caller can see of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.device import DEVICE, generators
from tests.fuzz.calls import Call

__all__ = ["Played", "copied", "play"]

SEED = 5
"""Of torch's generator before every call."""


@dataclass(frozen=True)
class Played:
    """What one call left behind: a name for everything that can be compared, and what the caller cannot see."""

    values: Mapping[str, Any]
    form: tuple
    generator: Tensor
    shared: set[tuple[int, int]]
    spanned: set[tuple[int, int]]


def play(module: nn.Module, call: Call) -> Played:
    """One forward and one backward, with grad_outs of the differentiable outputs that the call chooses."""
    arguments = call.arguments()
    for parameter in module.parameters():
        parameter.grad = None
    torch.manual_seed(SEED)
    with call.context():
        result = module(*arguments.args, **arguments.kwargs)
    generator = generators()
    leaves, spec = pytree.tree_flatten(result)
    values: dict[str, Any] = {f"output {i}": _copy(leaf) for i, leaf in enumerate(leaves)}
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    needs = tuple((leaf.requires_grad, _strides(leaf)) for leaf in tensors)
    objects = [*pytree.tree_leaves((arguments.args, arguments.kwargs)), *leaves]
    same = tuple(next(i for i, other in enumerate(objects) if other is leaf) for leaf in leaves)
    shared, spanned = _shared_memory(objects, anyhow=True), _shared_memory(objects, anyhow=False)
    wanted = [
        leaf for leaf, chosen in zip(tensors, call.outputs(len(tensors)), strict=True) if chosen and leaf.requires_grad
    ]
    if wanted:
        torch.autograd.backward(wanted, _cotangents(wanted))
    values |= {f"gradient of {name}": _copy(p.grad) for name, p in module.named_parameters()}
    values |= {f"gradient of argument {i}": _copy(leaf.grad) for i, leaf in enumerate(arguments.leaves)}
    values |= {f"buffer {name}": _copy(buffer) for name, buffer in module.named_buffers()}
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()  # an assertion that failed in a kernel is raised here, not in the next call
    return Played(values, (spec, needs, same), generator, shared, spanned)


def copied(module: nn.Module) -> nn.Module:
    """A copy; what ``weight_norm`` and its kin have computed, which no copy takes along, is computed anew by a call."""
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                vars(part)[name] = value.detach()
    return copy.deepcopy(module)


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Those of a tensor made like it: they decide the order in which a later draw fills memory."""
    pairs = zip(tensor.shape, torch.empty_like(tensor).stride(), strict=True) if tensor.numel() else ()
    return tuple(stride for extent, stride in pairs if extent != 1)


def _shared_memory(objects: list[Any], *, anyhow: bool) -> set[tuple[int, int]]:
    """Pairs of arguments and results with the same memory: a caller who writes into one sees it in the other.

    Unless ``anyhow``, only pairs of which one is all of that memory. Two parts of something that is not returned itself
    are made apart.
    """
    tensors = [(i, t) for i, t in enumerate(objects) if isinstance(t, Tensor) and t.numel()]

    def spans(tensor: Tensor) -> bool:
        dense = tensor.transpose(0, -1).is_contiguous() if tensor.dim() > 1 else tensor.is_contiguous()
        full = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        return full and (tensor.is_contiguous() or dense)

    return {
        (i, j)
        for i, one in tensors
        for j, other in tensors
        if i < j and one.untyped_storage()._cdata == other.untyped_storage()._cdata
        if anyhow or spans(one) or spans(other)
    }


def _cotangents(outputs: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(SEED + 1)
    return [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.device, o.dtype) for o in outputs]


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
