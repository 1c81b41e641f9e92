"""Writes into parts of a tensor while calls are recorded: which of them are calls that make another value of the whole.

``out[step] = h`` is ``out = out with h there`` if nothing else can tell: the memory belongs to no other tensor that
Python still has, a call has made it for nothing else, and no call has read this value of it, so that autograd has saved
none. ``out[step].copy_(h)`` is the same, where the view is taken for it alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from bridge.base.torch_internals import storage_id
from bridge.capture.loops.calls import Form, Part

__all__ = ["Writes"]

_NAMES = ("zeros", "ones", "empty", "full")
_EMPTY = frozenset(form.format(name) for name in _NAMES for form in ("{}", "{}_like", "new_{}"))
"""Functions that make a tensor of their own."""


class Writes:
    """What is known of memory and reads so far."""

    def __init__(self) -> None:
        self._read: set[int] = set()
        self._wrote: set[int] = set()
        self._sharing: dict[int, list[weakref.ref]] = {}
        self._part: tuple[int, weakref.ref] | None = None

    def note(self, tensor: torch.Tensor, reference: weakref.ref, is_alone: bool = False) -> None:
        """A tensor has a value from now on; ``is_alone``: its memory is new."""
        if is_alone:
            self._sharing[storage_id(tensor)] = [reference]
            return
        sharing = self._sharing.setdefault(storage_id(tensor), [])
        if sharing:  # memory is used again and again
            sharing[:] = [each for each in sharing if each() is not None and each() is not tensor]
        sharing.append(reference)

    def read(self, values: Iterable[int]) -> None:
        """A call has read these."""
        if self._part is not None:
            self._read.add(self._part[0])
            self._part = None
        self._read.update(values)

    def take_part(self, value: int, whole: torch.Tensor) -> None:
        """The last call has taken a part of a value: it has read it, unless the part is written at once."""
        self.read(())
        self._part = value, weakref.ref(whole)

    def whole_of_part(self) -> torch.Tensor | None:
        """Whose part the last call has taken; it was not read by that."""
        part, self._part = self._part, None
        return None if part is None else part[1]()

    def wrote(self, value: int) -> None:
        """A write has made this."""
        self._wrote.add(value)

    def fits(self, into: Part, whole: Form, part: Form) -> bool:
        """Whether a tensor of a form is copied into the part as it is."""
        shape = [*whole.shape]
        shape[into.dim : into.dim + 1] = [] if into.squeezed else [into.extent]
        return part.shape == tuple(shape) and (part.dtype, part.device) == (whole.dtype, whole.device)

    def is_unread(self, value: int, tensor: torch.Tensor, maker: str, through: torch.Tensor | None = None) -> bool:
        """Whether nothing but the tensor itself, and the view that is written through, can tell that it is written;
        ``maker``: the name of the function that has made its value."""
        self.read(())
        if value in self._read or not (maker in _EMPTY or value in self._wrote):
            return False
        return self.is_alone(tensor, through)

    def is_alone(self, tensor: torch.Tensor, through: torch.Tensor | None = None) -> bool:
        """Whether no other tensor that Python still has lies in the same memory."""
        sharing = [each() for each in self._sharing[storage_id(tensor)]]
        return all(each is None or each is tensor or each is through for each in sharing)
