"""A case of the corpus: a module, how dispatch is added to it, and calls; what one call left behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["Case", "Seen"]


@dataclass(frozen=True)
class Seen:
    """What a caller sees of one call.

    Attributes:
        values: outputs, gradients, buffers and the generator's state, by name; tensors or anything else.
        form: how the result is built (structure, requires_grad, strides, shared memory), as text.
    """

    values: Mapping[str, Any]
    form: str


@dataclass(frozen=True)
class Case:
    """Something to be dispatched and called.

    Attributes:
        make: a new module, always with the same numbers.
        add: adds dispatch to it.
        calls: one forward and one backward each, with arguments of its own.
        about: the text that tells whether two trees mean the same case.
        context: entered around all of it.
    """

    make: Callable[[], nn.Module]
    add: Callable[[nn.Module], Any]
    calls: Sequence[Callable[[nn.Module], Seen]]
    about: str
    context: Callable[[], AbstractContextManager] = contextlib.nullcontext
