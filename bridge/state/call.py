"""Sample call: a module and the arguments of its forward, as one object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from bridge.base.pytrees import packed_arguments, unpacked
from bridge.base.torch_internals import pytree

__all__ = ["SampleCall"]


@dataclass(frozen=True)
class SampleCall:
    """One call of a module.

    Attributes:
        module: it; ``args``, ``kwargs``: what its forward is given.
        dims: dimensions of arguments whose sizes vary (:func:`bridge.capture.dynamic_dims`).
    """

    module: nn.Module
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    dims: Sequence[Any] = ()

    @property
    def name(self) -> str:
        """Of the module's class."""
        return type(self.module).__name__

    @property
    def leaves(self) -> list[Any]:
        """Of the arguments, those in Python objects among them."""
        return pytree.tree_leaves(packed_arguments((self.args, self.kwargs)))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Among the leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def as_pytree(self) -> SampleCall:
        """The call with nodes for Python objects among its arguments."""
        args, kwargs = packed_arguments((self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)

    def forward(self) -> Any:
        """Runs the module's forward, without hooks."""
        args, kwargs = unpacked((self.args, self.kwargs))
        return self.module.forward(*args, **kwargs)
