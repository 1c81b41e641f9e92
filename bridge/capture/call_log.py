"""Call log: the torch functions that forward calls, in order → what a fake run and an eager run did differently.

Fake tensors can have other strides than eager's. Then ``reshape`` and ``contiguous`` copy in one run what they view in
the other. That is the same to whoever reads, but not to a write through one of the two names; and forward may look at
strides itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from bridge.base.errors import Unsupported, is_user_file, line_of
from bridge.base.torch_internals import is_tracked_by_functorch, storage_id
from bridge.base.torch_shapes import hint
from bridge.state import constant_key

__all__ = ["ATTENTION", "CallSequence", "differences"]


_OF_AUTOGRAD = "detach.default"
"""What autograd calls to save a result of a Function under hooks of saved tensors, which the eager run has: a view."""

ATTENTION = "scaled_dot_product_attention"
"""The name of fused attention."""


@dataclass(frozen=True)
class Call:
    """One call: the function's name, the plain constants among its arguments, what it shares, and where it stands.

    ``aliases``: of each tensor in the result, the first tensor argument that has the same memory, or ``None``.
    """

    name: str
    constants: tuple
    aliases: tuple[int | None, ...]
    place: tuple[str, int]


class CallSequence:
    """Calls as they are made.

    Attributes:
        calls: all of them.
        written: indices of the calls whose result or arguments were written, by them or later.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.written: set[int] = set()
        self._calls_on: dict[int, tuple[StorageWeakRef, list[int]]] = {}  # the reference keeps the number from reuse

    def add(
        self,
        name: str,
        values: Sequence[Any],
        tensors: Sequence[torch.Tensor],
        results: Sequence[Any],
        written: Sequence[torch.Tensor],
    ) -> None:
        """A function has run. Questions, which have no tensor for an answer, are passed over.

        Args:
            name: the function's.
            values: the leaves of its arguments.
            tensors: those of them that are tensors.
            results: the leaves of its result.
            written: the tensors that it wrote.
        """
        if name == _OF_AUTOGRAD:
            return
        if not all(map(_has_memory, tensors)):
            return  # inside a transform of torch.func, or of a sparse tensor: its graph is what it is on any strides
        index = len(self.calls)
        memory = [storage_id(tensor) for tensor in tensors]
        made = [result for result in results if isinstance(result, torch.Tensor) and _has_memory(result)]
        if not made and not written:
            return
        aliases = tuple(memory.index(key) if (key := storage_id(t)) in memory else None for t in made)
        constants = [constant_key(hint(value)) for value in values if not isinstance(value, torch.Tensor)]
        if name == "as_strided":
            constants.append(tuple(map(hint, tensors[0].stride())))
        self.calls.append(Call(name, tuple(constants), aliases, _place()))
        for tensor in (*tensors, *made):
            storage = tensor.untyped_storage()
            self._calls_on.setdefault(storage._cdata, (StorageWeakRef(storage), []))[1].append(index)
        for tensor in written:
            self.written.update(self._calls_on[storage_id(tensor)][1])

    @property
    def attention(self) -> list[tuple]:
        """The plain constants that fused attention was given, call by call: among them ``None`` for no mask."""
        return [call.constants for call in self.calls if call.name == ATTENTION]


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not is_tracked_by_functorch(tensor)


def _place() -> tuple[str, int]:
    frame = sys._getframe(2)
    while frame.f_back is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def differences(traced: CallSequence, eager: CallSequence) -> Iterator[Unsupported]:
    """Why what was traced need not be what eager computes; at most one reason of each kind."""
    for ours, eagers in zip(traced.calls, eager.calls, strict=False):
        if (ours.name, ours.constants) != (eagers.name, eagers.constants):
            there = "gives it other numbers or strides" if ours.name == eagers.name else f"calls {ours.name}"
            reason = f"forward goes another way on fake tensors than on real ones: there it {there}"
            yield Unsupported(eagers.name, line_of(eagers.place), reason, "do not let it depend on strides")
            return
    if len(traced.calls) != len(eager.calls):
        reason = f"forward makes {len(traced.calls)} calls on fake tensors and {len(eager.calls)} on real ones"
        yield Unsupported("forward", "forward", reason, "do not let it depend on strides")
        return
    written = traced.written | eager.written
    for index, (ours, eagers) in enumerate(zip(traced.calls, eager.calls, strict=True)):
        if ours.aliases != eagers.aliases and index in written:
            reason = "copies in eager what it views on fake tensors, or the reverse, and one of the two is written"
            yield Unsupported(eagers.name, line_of(eagers.place), reason, "clone before the write")
            return
