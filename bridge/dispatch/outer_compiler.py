"""Graph break around a dispatched module inside a model that ``torch.compile`` compiles: it runs its own code.

Dynamo ignores ``_compiled_call_impl`` and inlines ``forward``, so the outer compiler would silently take the module
over. It makes an ordinary Python call for a module with hooks, which it recognizes by the lengths of the hook
dictionaries, including the one that only records which hooks take keyword arguments. So a dispatched module has one
entry there that belongs to no hook. Eager PyTorch never looks it up.

The call then reaches :func:`call_opaque`, which Dynamo may neither trace nor enter: a graph break on either side of the
module, and under ``fullgraph=True`` an error with the reason.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

from bridge.base.torch_internals import leave_frames_alone

__all__ = ["call_opaque", "hide", "mark", "unmark"]

_HOOKS = "_forward_hooks_with_kwargs"
_KEY = "tvm_dispatch"
_REASON = (
    "the module is dispatched to TVM and runs its own code, outside of the graph; to let the outer compiler take it "
    "over instead, call bridge.remove_tvm_dispatch(module)"
)


class _Marked(OrderedDict):
    """Hook dictionary of a dispatched module; copies and pickles are plain ``OrderedDict``s without the mark."""

    def __init__(self, plain: OrderedDict):
        super().__init__(plain)
        self[_KEY] = True
        self._plain = plain

    def unmarked(self) -> OrderedDict:
        """The original dictionary, with the current hooks."""
        self._plain.clear()
        self._plain.update((key, value) for key, value in self.items() if key != _KEY)
        return self._plain

    def __reduce__(self) -> tuple:
        return OrderedDict, (), None, None, iter(self.unmarked().items())


def mark(module: nn.Module) -> None:
    """Makes Dynamo call ``module`` as Python does. Code that Dynamo compiled earlier is not affected."""
    hooks = module.__dict__[_HOOKS]
    if type(hooks) is not _Marked:
        module.__dict__[_HOOKS] = _Marked(hooks)


def unmark(module: nn.Module) -> None:
    """Undoes :func:`mark`."""
    hooks = module.__dict__.get(_HOOKS)
    if type(hooks) is _Marked:
        module.__dict__[_HOOKS] = hooks.unmarked()


def hide(function: FunctionType) -> FunctionType:
    """Makes Dynamo skip ``function`` and all that it calls, as ``torch.compiler.disable`` does.

    ``disable`` wraps the function, which costs a microsecond at every call, and imports all of Dynamo.
    """
    return function if leave_frames_alone(function.__code__) else torch.compiler.disable(function)


@hide
def call_opaque(dispatcher: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """``dispatcher(*args, **kwargs)``, which Dynamo does not trace."""
    return dispatcher(*args, **kwargs)


call_opaque._torchdynamo_disable = True
call_opaque._torchdynamo_disable_msg = _REASON
call_opaque._torchdynamo_disable_recursive = True
