"""A case of the corpus: a module, a way to dispatch it, and calls; the visible effects of one call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Seen:
    """The visible effects of one call.

    Attributes:
        values: outputs, gradients, buffers and the generator's state, by name; tensors or other objects.
        form: the result's metadata (structure, requires_grad, strides, shared memory), as text.
    """

    values: Mapping[str, Any]
    form: str


@dataclass(frozen=True)
class Case:
    """A module to dispatch and call.

    Attributes:
        make: a new module, always with the same numbers.
        calls: one forward and one backward each, with arguments of its own.
        about: a text that identifies the case in both trees.
        context: entered around all of it.
    """

    make: Callable[[], nn.Module]
    add: Callable[[nn.Module], Any]
    calls: Sequence[Callable[[nn.Module], Seen]]
    about: str
    context: Callable[[], AbstractContextManager] = contextlib.nullcontext
