"""Any ATen operator by name, and its VJP by torch's autograd."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from bridge.base.complex_views import as_parts
from bridge.library.registry import library_function

__all__ = ["waits_for_the_device"]

_WAITING = frozenset(
    "_linalg_eigh _linalg_eigvals linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_matrix_rank linalg_pinv "
    "pinverse".split()
)


def waits_for_the_device(name: str, attributes: Sequence[Any]) -> str | None:
    """The operator that a call of this file's functions runs, if cuSOLVER asks the device meanwhile how far it is.

    A stream that is captured refuses that, and cuSOLVER fails once more in the thread's next call, whosever that is.
    """
    if name not in ("operator", "operator_vjp"):
        return None
    return attributes[0] if attributes[0].split(".")[1] in _WAITING else None


def _operator(name: str, arguments: str, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Runs an ATen operator on arguments written as JSON (see :mod:`autodiff.library`)."""
    namespace, packet, overload = name.split(".")
    target = getattr(getattr(getattr(torch.ops, namespace), packet), overload)

    def read(value: Any) -> Any:
        if isinstance(value, list):
            return [read(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$tensor" in value:
            return tensors[value["$tensor"]]
        if "$complex" in value:
            return torch.view_as_complex(tensors[value["$complex"]])
        if "$number" in value:
            return complex(*value["$number"])
        if "$dtype" in value:
            return getattr(torch, value["$dtype"])
        return {key: read(item) for key, item in value.items()}

    args, kwargs = read(json.loads(arguments))
    made = target(*args, **kwargs)
    made = made if isinstance(made, tuple | list) else (made,)
    return tuple(map(as_parts, made))


@library_function("operator")
def operator(name, arguments, *tensors):
    """The operator's results on arguments written as JSON."""
    return _operator(name, arguments, tensors)


@library_function("operator_vjp")
def operator_vjp(name, arguments, wanted, outputs, *tensors_and_grads):
    """VJP with respect to tensor ``wanted`` from gradients of ``outputs``, indices of the results.

    Zeros where the results do not depend on it.
    """
    count = len(tensors_and_grads) - len(outputs)
    grads = tensors_and_grads[count:]
    tensors = [each.detach() if isinstance(each, torch.Tensor) else each for each in tensors_and_grads[:count]]
    with torch.enable_grad():
        target = tensors[wanted].requires_grad_()
        made = _operator(name, arguments, tuple(tensors))
        pairs = [(made[index], grad) for index, grad in zip(outputs, grads, strict=True) if made[index].requires_grad]
        if not pairs:
            return torch.zeros_like(target)
        (partial,) = torch.autograd.grad(
            [value for value, _ in pairs], [target], [grad for _, grad in pairs], allow_unused=True
        )
    return torch.zeros_like(target) if partial is None else partial
