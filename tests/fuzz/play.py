"""One call of a module, forward and backward, with all its visible effects."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.device import DEVICE, forked_generators, generators
from tests.fuzz.calls import Call
from tests.fuzz.program import prepared

SEED = 5
"""Seed of torch's generator before every call."""


@dataclass(frozen=True)
class Played:
    """The effects of one call: comparable values by name, tensor metadata, generator state and memory sharing."""

    values: Mapping[str, Any]
    form: tuple
    generator: Tensor
    shared: set[tuple[int, int]]
    spanned: set[tuple[int, int]]


def play(module: nn.Module, call: Call) -> Played:
    """One forward and one backward, with grad_outs for the differentiable outputs that the call chooses."""
    arguments = call.arguments()
    torch.manual_seed(SEED)
    prepared(module)
    attributes = [(name, each) for name, each in vars(module).items() if name.startswith("m")]
    kept = {(name, i): t for name, each in attributes for i, t in enumerate(pytree.tree_leaves(each)) if _is_leaf(t)}
    for each in (*module.parameters(), *kept.values()):
        each.grad = None
    torch.manual_seed(SEED)
    with call.context():
        result = module(*arguments.args, **arguments.kwargs)
    generator = generators()
    leaves, spec = pytree.tree_flatten(result)
    values: dict[str, Any] = {f"output {i}": _copy(leaf) for i, leaf in enumerate(leaves)}
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    needs = tuple((leaf.requires_grad, leaf.dtype, _strides(leaf)) for leaf in tensors)
    objects = [*pytree.tree_leaves((arguments.args, arguments.kwargs)), *leaves]
    same = tuple(next(i for i, other in enumerate(objects) if other is leaf) for leaf in leaves)
    shared, spanned = _shared_memory(objects, anyhow=True), _shared_memory(objects, anyhow=False)
    wanted = [
        leaf for leaf, chosen in zip(tensors, call.outputs(len(tensors)), strict=True) if chosen and leaf.requires_grad
    ]
    if wanted and call.twice:
        values |= _second_derivatives(wanted, [*dict(module.named_parameters()).values(), *arguments.leaves])
    elif wanted:
        torch.autograd.backward(wanted, _cotangents(wanted))
    values |= {f"gradient of {name}": _copy(p.grad) for name, p in module.named_parameters()}
    values |= {f"gradient of attribute {name}[{i}]": _copy(each.grad) for (name, i), each in kept.items()}
    values |= {f"gradient of argument {i}": _copy(leaf.grad) for i, leaf in enumerate(arguments.leaves)}
    values |= {f"buffer {name}": _copy(buffer) for name, buffer in module.named_buffers()}
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()  # raises a failed assertion of a kernel here, not in the next call
    return Played(values, (spec, needs, same), generator, shared, spanned)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_leaf and value.requires_grad


def copied(module: nn.Module) -> nn.Module:
    """A deep copy without computed tensors in attributes (of ``weight_norm``, say), which a call computes anew."""
    with torch.no_grad(), forked_generators():
        prepared(module)
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                vars(part)[name] = value.detach()
    return copy.deepcopy(module)


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a new tensor like it, which decide the order of later draws."""
    pairs = zip(tensor.shape, torch.empty_like(tensor).stride(), strict=True) if tensor.numel() else ()
    return tuple(stride for extent, stride in pairs if extent != 1)


def _shared_memory(objects: list[Any], *, anyhow: bool) -> set[tuple[int, int]]:
    """Pairs of arguments and results that share memory: a write to one is visible in the other.

    Unless ``anyhow``, only pairs in which one spans all of that memory. A compiled call separates two parts of a tensor
    that is not returned itself.
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


def _second_derivatives(wanted: list[Tensor], sources: list[Tensor]) -> dict[str, Any]:
    """Gradients, and gradients of their weighted sum; zeros for missing ones."""
    sources = [each for each in sources if each.requires_grad]
    first = torch.autograd.grad(wanted, sources, _cotangents(wanted), create_graph=True, allow_unused=True)
    weights = _cotangents(sources)
    pairs = [(one, weight) for one, weight in zip(first, weights, strict=True) if one is not None and one.requires_grad]
    second: tuple[Tensor | None, ...] = (None,) * len(sources)
    if pairs:
        outputs, grads = zip(*pairs, strict=True)
        second = torch.autograd.grad(outputs, sources, grads, allow_unused=True)
    named = {f"first gradient {i}": each for i, each in enumerate(first)}
    named |= {f"second gradient {i}": each for i, each in enumerate(second)}
    zeros = [torch.zeros_like(each) for each in sources] * 2
    return {
        name: _copy(zero if each is None else each) for (name, each), zero in zip(named.items(), zeros, strict=True)
    }


def _cotangents(outputs: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(SEED + 1)
    wide = [torch.complex128 if each.is_complex() else torch.float64 for each in outputs]
    drawn = [torch.randn(o.shape, generator=generator, dtype=w) for o, w in zip(outputs, wide, strict=True)]
    return [each.to(o.device, o.dtype) for each, o in zip(drawn, outputs, strict=True)]


def _copy(value: Any) -> Any:
    """A copy; a complex tensor as a real one of its parts."""
    if isinstance(value, Tensor) and value.is_complex():
        value = torch.view_as_real(value.detach().resolve_conj())
    return value.detach().clone() if isinstance(value, Tensor) else value
