"""Cached functions: ``functools.lru_cache`` around what forward calls → the function itself, for the time of the runs.

What eager would find in the cache is computed by the compiled call, where it is a function of plain values: equal, and
the user's cache never sees what a run makes. What the cache would keep besides is refused by name: numbers that were
drawn once, a tensor that forward writes afterwards, results for a tensor.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from bridge.base.errors import Unsupported, UnsupportedModule, user_line
from bridge.base.threads import stack_of
from bridge.base.torch_internals import pytree
from bridge.capture.isolated_rng import IsolatedRNG

__all__ = ["CachedFunctions"]

_HINT = "keep it in a buffer, or pass it to forward"


class CachedFunctions:
    """What forward calls in their place."""

    def __init__(self) -> None:
        self._made: list[tuple[str, Callable[[], Any], list[tuple[torch.Tensor, int]]]] = []

    def instead(self, value: Any) -> Any:
        """The function itself, of one that caches; ``None`` for anything else."""
        if type(value) is not functools._lru_cache_wrapper:
            return None
        name = getattr(value, "__name__", "a function")

        @functools.wraps(value)
        def run(*args: Any, **kwargs: Any) -> Any:
            if _tensors((args, kwargs)):
                raise _refused(name, "keeps results by tensors, whose numbers may change")
            result = value.__wrapped__(*args, **kwargs)
            again = functools.partial(value.__wrapped__, *args, **kwargs)
            self._made.append((name, again, [(each, each._version) for each in _tensors(result)]))
            return result

        return run

    def check(self) -> None:
        """To be called after a run. :class:`UnsupportedModule` where a cache would keep what calls make anew."""
        for name, again, found in self._made:
            if any(tensor._version != version for tensor, version in found):
                raise _refused(name, "keeps a tensor that forward writes")
            with IsolatedRNG() as isolated:
                before = isolated.states()
                again()
                if not all(map(torch.equal, before, isolated.states())):
                    raise _refused(name, "keeps numbers that were drawn at its first call")
        self._made.clear()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _refused(name: str, reason: str) -> UnsupportedModule:
    where = user_line(stack_of(threading.get_ident())) or "forward"
    return UnsupportedModule("", [Unsupported(f"the cache of {name}", where, reason, _HINT)])
