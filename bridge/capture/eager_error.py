"""Eager's own error: a sample that PyTorch itself refuses (shapes that do not fit) → PyTorch's exception, raised."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import nn

from bridge.base.errors import Unsupported, from_user_code, refused_by_eager, user_line
from bridge.base.objects import packed
from bridge.base.torch_internals import pytree
from bridge.capture.autograd_uses import derivatives_noted
from bridge.capture.copied_call import Copies, copied_call
from bridge.capture.isolated_rng import IsolatedRNG
from bridge.capture.module_calls import is_copied_with_its_forward

__all__ = ["raise_if_eager_raises"]

_NO_RULE = re.compile(r"no rule registered for HigherOrderOperator (\w+) and mode <bridge\.")


def raise_if_eager_raises(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> list[Unsupported]:
    """Runs the module once in eager, and the backward where there is one; to be called where a capture has failed.

    It runs on copies (:func:`bridge.capture.copied_call.copied_call`).

    Returns:
        the derivative that forward computes itself, if it does, or the operator that a watched run cannot have: what a
        capture may have failed for.

    Raises:
        Exception: what eager raises, marked by :func:`bridge.base.errors.refused_by_eager`.
    """
    try:
        with copied_call(module, args, kwargs) as (call, copies):
            with derivatives_noted() as found:
                result = call()
            _run_backward(result, copies)
    except Exception as error:  # noqa: BLE001 - whatever the user's code raises is raised again below
        if (unwatched := _unwatched(error)) is not None:
            return [unwatched]
        if (derivatives := _of_a_copy(module, args, kwargs)) is not None:
            return derivatives
        eager = refused_by_eager(from_user_code(error))
    else:
        return found
    raise eager from eager.__cause__  # hides what is being handled where this is called


def _unwatched(error: Exception) -> Unsupported | None:
    """The operator that torch runs under no mode but its own, such as ``scan``; ``None`` for an error of eager's."""
    found = _NO_RULE.search(str(error)) if isinstance(error, NotImplementedError) else None
    if found is None:
        return None
    where = user_line(error) or "forward"
    reason = "a higher-order operator, whose function torch traces by itself"
    return Unsupported(found[1], where, reason, "write loops in Python: their equal steps are compiled as one")


def _of_a_copy(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> list[Unsupported] | None:
    """As above, of a copy of the whole module; ``None`` if it raises, or there is no copy to be had.

    Where a module holds a parameter in a list as well, that list knows nothing of a parameter that is swapped.
    """
    copies = Copies()
    try:
        twin = copy.deepcopy(module)
        if not is_copied_with_its_forward(module, twin):
            return None
        copied_args, copied_kwargs = pytree.tree_map_only(torch.Tensor, copies.of, (args, kwargs))
        with IsolatedRNG(), derivatives_noted() as found:
            result = twin(*copied_args, **copied_kwargs)
        _run_backward(result, [*twin.parameters(), *copies.made()])
    except Exception:  # noqa: BLE001 - the user's code, or what it has instead of a copy
        return None
    return found


def _run_backward(result: Any, inputs: Any) -> None:
    """The gradients of a result, which go nowhere; of dense tensors, as sparse ones take no gradient of ones."""
    leaves = [leaf for leaf in pytree.tree_leaves(packed(result)) if isinstance(leaf, torch.Tensor) and leaf.grad_fn]
    results = [leaf for leaf in leaves if leaf.layout is torch.strided and not leaf.is_nested]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    if results and wanted:
        torch.autograd.grad(results, wanted, [torch.ones_like(each) for each in results], allow_unused=True)
