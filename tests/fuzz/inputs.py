"""Variations of a call's arguments: special values, indices out of range, other forms of the same call."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.fuzz.program import Arguments

Change = Callable[[Arguments], Arguments]


def special_values(seed: float, *, huge: bool = False) -> Change:
    """Sets one to three numbers of each float tensor, or parts of a complex one, to special or huge values, or makes
    all of them ties."""

    def change(given: Arguments) -> Arguments:
        rng = random.Random(seed)
        ties = not huge and rng.random() < 0.3

        def fill(tensor: Tensor) -> Tensor:
            if tensor.is_complex():
                fill(torch.view_as_real(tensor))
            if not tensor.is_floating_point() or not tensor.numel():
                return tensor
            if ties:
                return tensor.mul_(2).round_().div_(2)
            limits = torch.finfo(tensor.dtype)
            values = [float("inf"), float("-inf"), float("nan"), limits.tiny, limits.tiny / 4, 0.0, -0.0, 1.0, -1.0]
            for _ in range(rng.randint(1, 3)):
                position = tuple(rng.randrange(extent) for extent in tensor.shape)
                tensor[position] = rng.choice([limits.max, -limits.max, limits.max / 2] if huge else values)
            return tensor

        return mapped(given, fill)

    return change


def other_indices(seed: float) -> Change:
    """Makes one element of each integer tensor negative or too large."""

    def change(given: Arguments) -> Arguments:
        rng = random.Random(seed)

        def fill(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool or not tensor.numel():
                return tensor
            position = tuple(rng.randrange(extent) for extent in tensor.shape)
            tensor[position] = rng.choice([1, 3, 4, 5, 7, 100] if tensor.dtype == torch.uint8 else INDICES)
            return tensor

        return mapped(given, fill)

    return change


INDICES = (-1, -1, -2, -4, -5, -100, 3, 4, 5, 7, 100)


def other_layout(given: Arguments) -> Arguments:
    """The same numbers with other strides, for other paths of eager's kernels."""

    def copy(tensor: Tensor) -> Tensor:
        if not tensor.numel() or tensor.dim() == 0:
            return tensor
        wide = tensor.new_empty((*tensor.shape, 2))[..., 0]
        with torch.no_grad():
            wide.copy_(tensor)
        return wide

    return mapped(given, copy)


def of_their_own(given: Arguments) -> Arguments:
    """The same numbers, each tensor in memory of its own; repeated tensors become separate."""
    return mapped(given, lambda tensor: tensor, once=False)


def of_one_memory(given: Arguments) -> Arguments:
    """Replaces tensors of equal shape and dtype by the first of them."""
    first: dict[tuple, Tensor] = {}

    def build(tensor: Tensor) -> Tensor:
        return first.setdefault((tensor.shape, tensor.dtype, tensor.requires_grad), tensor)

    args, kwargs = pytree.tree_map_only(Tensor, build, (given.args, given.kwargs))
    return Arguments(args, kwargs, given.leaves)


def share_memory(given: Arguments) -> bool:
    """Whether two tensors among the arguments are identical or share memory."""
    tensors = [leaf for leaf in pytree.tree_leaves((given.args, given.kwargs)) if isinstance(leaf, Tensor)]
    return len({tensor.untyped_storage()._cdata for tensor in tensors}) < len(tensors)


def by_keyword(names: Sequence[str]) -> Change:
    """Every argument by its name; ``names`` has the signature's order."""
    return lambda given: Arguments((), {**dict(zip(names, given.args, strict=False)), **given.kwargs}, given.leaves)


def by_position(names: Sequence[str]) -> Change:
    """Every argument by its position."""

    def change(given: Arguments) -> Arguments:
        rest = [given.kwargs[name] for name in names[len(given.args) :]]
        return Arguments((*given.args, *rest), {}, given.leaves)

    return change


def mapped(given: Arguments, change: Callable[[Tensor], Tensor], *, once: bool = True) -> Arguments:
    """Arguments with changed tensors. Leaves stay leaves; shared memory becomes separate; with ``once``, a repeated
    tensor stays one tensor."""
    made: dict[int, Tensor] = {}

    def build(tensor: Tensor) -> Tensor:
        if id(tensor) not in made or not once:
            with torch.no_grad():
                new = tensor.new_empty_strided(tensor.shape, tensor.stride()) if _dense(tensor) else None
                new = tensor.detach().clone() if new is None else new.copy_(tensor)
                made[id(tensor)] = change(new).requires_grad_(tensor.requires_grad)
        return made[id(tensor)]

    args, kwargs = pytree.tree_map_only(Tensor, build, (given.args, given.kwargs))
    leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
    unique = [t for i, t in enumerate(leaves) if all(t is not other for other in leaves[:i])]
    return Arguments(args, kwargs, tuple(unique))


def _dense(tensor: Tensor) -> bool:
    """Whether no two elements share memory."""
    pairs = sorted((s, e) for s, e in zip(tensor.stride(), tensor.shape, strict=True) if e != 1)
    reach = 1
    for stride, extent in pairs:
        if stride < reach:
            return False
        reach = stride * extent
    return True
