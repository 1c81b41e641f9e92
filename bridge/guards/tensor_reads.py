"""What forward asks about the tensors that it is given: attributes that a user has set on them, autograd's, identities.

Shapes, dtypes and strides have conditions for every tensor; these are asked of those tensors alone that forward asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bridge.base.errors import Unsupported
from bridge.guards.watched import ABSENT, alike

__all__ = ["TensorReads", "asked_of", "is_asked", "told_otherwise"]

_VALUES = ("is_leaf", "_version", "output_nr", "retains_grad", "storage_offset", "data_ptr", "is_shared", "is_pinned")
_STORAGES = ("untyped_storage", "storage", "_typed_storage", "is_set_to")
_PRESENT = ("grad", "grad_fn", "_base", "_backward_hooks", "_post_accumulate_grad_hooks")


def is_asked(name: str) -> bool:
    """Whether an attribute or method of a tensor tells what no other condition is about."""
    return name in (*_VALUES, *_STORAGES, *_PRESENT, "__dict__") or not hasattr(torch.Tensor, name)


def asked_of(tensor: torch.Tensor, name: str) -> Any:
    """What a tensor says: a value, whether there is one, or an attribute that somebody has set."""
    if name == "__class__":
        return type(tensor), getattr(tensor, "_is_param", False), getattr(tensor, "_is_buffer", False)
    if name in _VALUES:
        found = getattr(tensor, name)
        return found() if callable(found) else found
    if name == "__dict__":
        return dict(tensor.__dict__)
    if name in _STORAGES:
        return tensor.data_ptr(), tensor.untyped_storage().nbytes()
    if name in _PRESENT:
        return getattr(tensor, name) is not None
    return tensor.__dict__.get(name, ABSENT)


class TensorReads:
    """What forward asked of a list of tensors.

    Args:
        tensors: as they were given, with their names.
        asked: place among them and name of what was asked.
        compared: places of which forward asked if they are the same object; ``others``: tensors from elsewhere of which
            it did.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        names: Sequence[str],
        asked: Sequence[tuple[int, str]],
        compared: Sequence[int],
        others: Sequence[torch.Tensor],
    ):
        self._asked = [(place, name, asked_of(tensors[place], name)) for place, name in asked]
        self._names = names
        self._compared, self._others = compared, others
        self._pattern = self._of(tensors) if compared else None

    def __bool__(self) -> bool:
        return bool(self._asked) or self._pattern is not None

    def _of(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """For each tensor that was compared the first place of that very object."""
        first: dict[int, int] = {}
        given = (*(tensors[place] for place in self._compared), *self._others)
        return [first.setdefault(id(tensor), place) for place, tensor in enumerate(given)]

    def difference(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """What is not as it was, in words; ``None`` if all is."""
        for place, name, then in self._asked:
            now = asked_of(tensors[place], name)
            if now is not then and not alike(now, then):
                return f"attribute '{name}' of '{self._names[place]}' changed"
        if self._pattern is not None and self._of(tensors) != self._pattern:
            return "which of the tensors are the same object changed"
        return None


def told_otherwise(
    reads: Any, given: Sequence[tuple[int, Any, Any]], owned: Sequence[Any], name: str
) -> Iterator[Unsupported]:
    """What forward asked of an argument, where the run's own tensor tells something else; ``owned``: the module's."""
    hint = "do not let forward depend on it"
    for place, argument, own in given:
        for asked in [asked for of, asked in reads.tensors if of == place]:
            if not alike(asked_of(argument, asked), asked_of(own, asked)):
                reason = "what forward reads of an argument is another one while it is recorded"
                yield Unsupported(f"{asked} of an argument", f"{name}.forward", reason, hint)
    elsewhere, compared = {*map(id, owned), *reads.others}, [each for each, *_ in given if each in reads.identities]
    if len({id(argument) for place, argument, _ in given if place in compared} - elsewhere) < len(compared):
        reason = "forward asks which tensors are the same object, and the sample has one twice, or one of the module's"
        yield Unsupported("is, id()", f"{name}.forward", reason, "pass a sample of different tensors")
