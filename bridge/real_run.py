"""The sample call once more on real numbers, to see what fake tensors get wrong.

The shape functions behind fake tensors give some results other strides than the kernels do (a normalization of a
transposed tensor, say). Strides decide the order in which a draw fills memory, and the caller sees those of the
results; so both are taken from a run of eager itself. Where the two runs differ in anything else, the graph is not
what eager computes, and the module is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from bridge.call_sequence import differences
from bridge.errors import Unsupported, refused_by_eager
from bridge.module_tensors import ModuleTensor, once_per_owner
from bridge.own_draws import OwnDraws
from bridge.witness import Witness, observe

__all__ = ["as_in_eager", "real_run"]


def real_run(
    module: nn.Module,
    tensors: Sequence[ModuleTensor],
    real_tensors: Sequence[torch.Tensor],
    args: tuple,
    kwargs: dict[str, Any],
) -> Witness:
    """What ``module(*args, **kwargs)`` does in eager. Neither tensors nor the generator are changed.

    Parameters and arguments are used as they are: the caller has made sure that forward writes into none of them.
    Python attributes that forward sets are left set.

    Raises:
        Exception: whatever forward raises, marked by :func:`bridge.errors.refused_by_eager`.
    """
    owned = [t.detach().clone() if spec.kind == "buffer" else t for spec, t in zip(tensors, real_tensors, strict=True)]
    state = {
        name: tensor
        for spec, tensor in zip(tensors, owned, strict=True)
        if spec.kind != "attribute"
        for name in once_per_owner(module, spec.names)
    }
    parameters = [tensor for spec, tensor in zip(tensors, owned, strict=True) if spec.kind == "parameter"]
    args, kwargs = pytree.tree_map_only(torch.Tensor, _own_leaf, (args, kwargs))
    arguments = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    try:
        with OwnDraws():
            return observe(module, state, parameters, [*owned, *arguments], args, kwargs, nullcontext(), traced=False)
    except Exception as error:
        refused_by_eager(error)
        raise


def _own_leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def as_in_eager(fake: Witness, real: Witness) -> tuple[Witness, list[Unsupported]]:
    """The witness of the fake run with the real one's strides, and what else differs between the two."""
    problems = list(differences(fake.calls, real.calls))
    if problems:  # the others follow from it
        return fake, problems
    for ours, eagers in zip_longest(fake.draws, real.draws):
        if ours is None or eagers is None or replace(ours, stride=eagers.stride) != eagers:
            problems.append(_problem(f"draws {eagers}", f"draws {ours}", "a random draw"))
            break
    for index, (ours, eagers) in enumerate(zip(fake.outputs, real.outputs, strict=False)):
        if ours.is_tensor and replace(ours, stride=eagers.stride) != eagers:
            problems.append(_problem(f"gives {eagers}", f"gives {ours}", f"result {index}"))
    return replace(fake, draws=real.draws, outputs=real.outputs), problems


def _problem(eager: str, traced: str, op: str) -> Unsupported:
    return Unsupported(op, "forward", f"on the sample eager {eager} where its trace {traced}")
