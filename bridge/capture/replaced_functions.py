"""Functions of torch that a user has replaced: torch's own in their place, where torch itself calls them by name.

A replacement usually calls the function that it replaces. With a mode of torch functions, that function announces
itself by its public name, which is the replacement by then; called for it, the replacement would be applied twice.
torch's decompositions also call functions by name where eager runs an operator in C that calls none.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F

from bridge.base.modes import replaced_here
from bridge.base.torch_internals import VF, TensorBase

__all__ = ["functions_of_torch", "own_function", "replacements"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_ANNOUNCES = torch.overrides.handle_torch_function.__code__


def _is_torchs(function: Any) -> bool:
    return type(function) is not FunctionType or function.__code__.co_filename.startswith(_TORCH)


_BY_CODE = {
    each.__code__: each
    for owner in (F, torch.functional, torch.Tensor)
    for each in vars(owner).values()
    if type(each) is FunctionType and _is_torchs(each)
}


def own_function(function: Any) -> Any:
    """torch's own function in place of a replacement, for a mode of torch functions, which calls this.

    A function in Python has announced itself from the frame before; a method in C has the replacement's name.
    """
    if _is_torchs(function):
        return function
    frame = sys._getframe(2)
    if frame.f_code is _ANNOUNCES:
        code = frame.f_back.f_code
        if not code.co_filename.startswith(_TORCH):  # a user's function, with a protocol of its own
            return function
        return _BY_CODE.get(code) or FunctionType(code, frame.f_back.f_globals, code.co_name)
    name = next((name for name, each in vars(torch.Tensor).items() if each is function), "")
    return getattr(TensorBase, name, function)


def replacements() -> dict[Any, dict[str, Any]]:
    """``torch`` and ``torch.Tensor`` → their functions that are replaced, by name, each with torch's own."""
    found = {}
    for owner, own_of in ((torch, _function_called), (torch.Tensor, _method_called)):
        names = [name for name, each in vars(owner).items() if not _is_torchs(each)]
        found[owner] = {name: own for name in names if (own := own_of(name)) is not None}
    return {owner: own for owner, own in found.items() if own}


@contextmanager
def functions_of_torch(found: dict[Any, dict[str, Any]] | None = None) -> Iterator[None]:
    """While active, this thread finds torch's own functions and methods of tensors in place of replacements.

    ``found``: the result of :func:`replacements`, if it is known.
    """
    with ExitStack() as stack:
        for owner, own in (replacements() if found is None else found).items():
            made = {name: partial(_either, each) for name, each in own.items()}
            stack.enter_context(replaced_here(owner, **made))
        yield


def _either(own: Any, replacement: Any) -> Any:
    return own


def _function_called(name: str) -> Any:
    own = getattr(torch.functional, name, None)
    return own if own is not None and _is_torchs(own) else getattr(VF, name, None)


def _method_called(name: str) -> Any:
    return None if name in _python_methods() else getattr(TensorBase, name, None)


@cache
def _python_methods() -> frozenset[str]:
    """The methods of ``torch.Tensor`` that torch defines in Python, from its source: a replacement hides them."""
    with open(os.path.join(_TORCH, "_tensor.py"), encoding="utf-8") as source:
        (kind,) = (each for each in ast.parse(source.read()).body if getattr(each, "name", None) == "Tensor")
    assigned = [each.targets[0].id for each in kind.body if isinstance(each, ast.Assign)]
    return frozenset([*assigned, *(each.name for each in kind.body if isinstance(each, ast.FunctionDef))])
