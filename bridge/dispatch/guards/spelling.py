"""Spellings of a call: arguments by position, by name or by default → the sample's way of giving the same ones.

``m(x, mask)``, ``m(x, mask=mask)`` and, where ``mask`` is the default, ``m(x)`` run forward with the same parameters.
So a call is bound to forward's signature as Python binds it and given as the sample was. That is exact for a forward
whose signature is its own: one with ``*args`` or ``**kwargs`` (a decorator's wrapper) may look at how it was called,
and is matched as it is spelled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from bridge.state import same

__all__ = ["SAVED", "Spelling", "signature_of"]

SAVED = "tvm_dispatch_signature"
"""Attribute of a forward that stands for another one: the signature of that, which says how calls may be spelled."""

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Spelling:
    """How the sample of an entry was given.

    Args:
        forward: the module's forward, bound; that it stays the same is a condition on code.
        num_positional, keywords: how many arguments the sample gave by position, and the names of the others.

    Example:
        >>> Spelling(nn.Linear(3, 2).forward, 1, []).respelled((), {"input": x})
        ((x,), {})
    """

    def __init__(self, forward: Callable[..., Any], num_positional: int, keywords: list[str]):
        self._signature = signature_of(forward)
        if self._signature is None:
            return
        parameters = self._signature.parameters
        self._positional = list(parameters)[:num_positional]
        self._keywords = keywords
        given = {*self._positional, *keywords}
        self._defaults = {name: parameter.default for name, parameter in parameters.items()}
        self._left_out = [name for name in parameters if name not in given]

    def respelled(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """The same call, given as the sample was; ``None`` if that cannot be, or the call is none of forward's.

        A parameter that the sample left out must have its default.
        """
        if self._signature is None:
            return None
        try:
            bound = self._signature.bind(*args, **kwargs).arguments
        except TypeError:
            return None
        if any(name in bound and not same(bound[name], self._defaults[name]) for name in self._left_out):
            return None
        values = {**self._defaults, **bound}
        return tuple([values[name] for name in self._positional]), {name: values[name] for name in self._keywords}


def signature_of(forward: Callable[..., Any]) -> inspect.Signature | None:
    """Forward's signature; ``None`` where it says nothing on how a call may be spelled."""
    function = getattr(forward, "__func__", forward)
    if isinstance(saved := getattr(function, SAVED, None), inspect.Signature):
        return saved
    if not isinstance(function, FunctionType) or hasattr(function, "__signature__"):
        return None
    signature = inspect.signature(forward, follow_wrapped=False)
    return None if any(each.kind in _VARIADIC for each in signature.parameters.values()) else signature
