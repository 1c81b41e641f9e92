"""Forward's reads of tensor arguments: attributes that a user has set, autograd's attributes, identities.

Shapes, dtypes and strides have guards for every tensor; these reads are guarded only for the tensors that forward read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bridge.base.errors import Unsupported
from bridge.guards.watched import ABSENT, alike

__all__ = ["ADDRESSES", "TensorReads", "asked_of", "is_asked", "told_otherwise"]

_VALUES = ("is_leaf", "_version", "output_nr", "retains_grad", "storage_offset", "data_ptr", "is_shared", "is_pinned")
_VALUES += ("is_conj", "is_neg", "is_inference", "_is_view", "_is_zerotensor", "storage_type")
_STORAGES = ("untyped_storage", "storage", "_typed_storage", "is_set_to")
ADDRESSES = ("data_ptr", *_STORAGES)
"""Methods whose results depend on the tensor's address, which few calls share."""
_PRESENT = ("grad", "grad_fn", "_base", "_backward_hooks", "_post_accumulate_grad_hooks")


def is_asked(name: str) -> bool:
    """Whether an attribute or method of a tensor returns state that no other condition covers."""
    return name in (*_VALUES, *_STORAGES, *_PRESENT, "__dict__") or not hasattr(torch.Tensor, name)


def asked_of(tensor: torch.Tensor, name: str) -> Any:
    """A tensor's attribute in comparable form: a value, its presence, or an attribute that a user has set."""
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
    """The recorded reads of a list of tensors.

    Args:
        tensors: the arguments. ``names``: their names.
        asked: (position, name of the attribute).
        compared: positions of tensors that forward compared by identity. ``others``: other tensors that it compared.
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
        """For each compared tensor, the first position of the same object."""
        first: dict[int, int] = {}
        given = (*(tensors[place] for place in self._compared), *self._others)
        return [first.setdefault(id(tensor), place) for place, tensor in enumerate(given)]

    def difference(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """The first difference from the recorded reads, in words; ``None`` if there is none."""
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
    """Refusals of reads that differ between an argument and its stand-in in the run; ``owned``: the module's."""
    hint = "do not let forward depend on it"
    for place, argument, own in given:
        for asked in [asked for of, asked in reads.tensors.asked if of == place]:
            if not alike(asked_of(argument, asked), asked_of(own, asked)):
                reason = "what forward reads of an argument is another one while it is recorded"
                yield Unsupported(f"{asked} of an argument", f"{name}.forward", reason, hint)
    elsewhere, compared = (
        {*map(id, owned), *reads.tensors.others},
        [each for each, *_ in given if each in reads.tensors.identities],
    )
    if len({id(argument) for place, argument, _ in given if place in compared} - elsewhere) < len(compared):
        reason = "forward asks which tensors are the same object, and the sample has one twice, or one of the module's"
        yield Unsupported("is, id()", f"{name}.forward", reason, "pass a sample of different tensors")
