"""Conditions on tensors: each property that compiled code relies on, for arguments and a module's tensors alike.

The quick path compares a list of tensors in one call (:mod:`bridge.base.tensor_properties`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from bridge.base.guard_failure import GuardFailure
from bridge.base.tensor_properties import PROPERTIES, Property, tensor_checks
from bridge.dispatch.guards.condition import differs

__all__ = ["TensorGuard"]


class TensorGuard:
    """The conditions of one entry on a list of tensors.

    Args:
        tensors: those that it is compiled for.
        kinds: the types that each may have.
        names: how a failure calls each.
        stage: of a failure.
        saves: whether autograd saves them, which it does not do with inference tensors.
        explain_type: a name and the value in that place → the failure of one of another type.

    Attributes:
        alike: the quick path, by whether inference mode is on: whether all of a list of tensors look exactly as
            expected; none of them may be nested (:func:`bridge.base.tensor_properties.is_nested`).
    """

    condition_names = ("type", *(each.name for each in PROPERTIES), "inference tensor")

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        kinds: Sequence[tuple[type, ...]],
        names: Sequence[str],
        stage: int,
        saves: bool,
        explain_type: Callable[[str, Any], GuardFailure],
    ):
        self._expected = [[each.read(tensor) for each in PROPERTIES] for tensor in tensors]
        self._kinds = kinds
        self._names = names
        self._stage = stage
        self._saves = saves
        self._explain_type = explain_type
        self.alike = {torch.is_inference_mode_enabled(): tensor_checks(tensors)}  # there, tensors look another way

    def failure(self, tensors: Sequence[Any]) -> GuardFailure | None:
        """The first property of the first tensor that is not as expected; ``None`` if there is none."""
        for tensor, kinds, name, expected in zip(tensors, self._kinds, self._names, self._expected, strict=True):
            if type(tensor) not in kinds:
                return self._explain_type(name, tensor)
            for each, then in zip(PROPERTIES, expected, strict=True):
                now = each.read(tensor)
                if now != then and not (each.same and each.same(now, then, tensor.shape)):
                    return _explain(each, self._stage, name, then, now)
            if self._saves and tensor.is_inference():
                return GuardFailure(self._stage, f"inference tensor {name}", "autograd cannot save it")
        return None

    def learn(self, tensors: Sequence[torch.Tensor]) -> None:
        """Remembers how tensors that are as expected look in inference mode, which is on."""
        self.alike[True] = tensor_checks(tensors)


def _explain(each: Property, stage: int, what: str, then: Any, now: Any) -> GuardFailure:
    """The failure of the tensor ``what`` in a property."""
    field = f"{each.field or each.name} of {what}"
    if each.words:
        return GuardFailure(stage, field, each.words)
    return differs(stage, field, each.show(then), each.show(now))
