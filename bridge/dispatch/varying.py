"""Sizes that vary: an entry and a call of other sizes → the dimensions that the next entry is to be symbolic in.

The second size of a dimension makes it symbolic, as in ``torch.compile``. A size of 0 or 1 is a special case, which
gets an entry of its own. Which dimensions are tried decides nothing but what is compiled: what the lowering concludes
about their sizes is a condition of the entry.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from autodiff.extents import Extent
from bridge.base.torch_internals import pytree
from bridge.capture import DynamicDim
from bridge.dispatch.guards import EntryGuard, interpreter_state

__all__ = ["MAX_REFUSED", "FixedDims", "varying_dims"]

#: Sets of dimensions that are tried in vain, in one mode, before every size gets an entry of its own.
MAX_REFUSED = 4
_LEAST = 2


def varying_dims(
    guard: EntryGuard, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> tuple[DynamicDim, ...]:
    """The dimensions in which a call differs from what an entry was compiled for, and those that vary there already.

    None if it differs in more than sizes.

    Args:
        guard: the entry's.
        forward: whose parameters name the sizes.
    """
    places: dict[int, list[int]] = {}  # of each tensor, which may be given twice
    for place, leaf in enumerate(pytree.tree_leaves((args, kwargs))):
        places.setdefault(id(leaf), []).append(place)
    found: list[DynamicDim] = []
    for path, shape, tensor in guard.compiled_shapes(args, kwargs):
        leaf = places[id(tensor)].pop(0)
        if tensor.dim() != len(shape):
            return ()
        for dimension, (then, now) in enumerate(zip(shape, tensor.shape, strict=True)):
            if now >= _LEAST and (isinstance(then, Extent) or then != now):
                name = f"{_parameter(forward, path)}_{dimension}"
                place = f"{path}.shape[{dimension}]"
                found.append(DynamicDim(leaf, dimension, place, "Dim.AUTO", name, _LEAST, None, required=False))
    return tuple(found)


class FixedDims:
    """Dimensions whose sizes turned out not to vary, by the modes of the call: no further size tries them again."""

    def __init__(self) -> None:
        self._refused: dict[tuple, list[frozenset[DynamicDim]]] = {}

    def left(self, is_training: bool, dims: tuple[DynamicDim, ...]) -> tuple[DynamicDim, ...]:
        """Those of the dimensions that may be tried together in the present modes."""
        refused = self._refused.get((is_training, interpreter_state()), [])
        if len(refused) >= MAX_REFUSED:
            return ()
        gone = frozenset().union(*(each for each in refused if each <= frozenset(dims)))
        return tuple(each for each in dims if each not in gone)

    def note(self, is_training: bool, dims: tuple[DynamicDim, ...]) -> None:
        """They cannot vary together. Where a few of them cannot, the others may."""
        refused = self._refused.setdefault((is_training, interpreter_state()), [])
        refused[:] = [*(each for each in refused if not each > frozenset(dims)), frozenset(dims)]


def _parameter(forward: Callable[..., Any], path: str) -> str:
    """``x`` for ``args[0]`` of ``forward(x)``, ``batch_ids`` for ``kwargs['batch']['ids']``."""
    positional = re.match(r"args\[(\d+)\]", path)
    if positional:
        try:
            names = list(inspect.signature(forward).parameters)
        except (TypeError, ValueError):
            names = []
        index = int(positional[1])
        path = (names[index] if index < len(names) else f"args_{index}") + path[positional.end() :]
    return re.sub(r"\W+", "_", path.removeprefix("kwargs")).strip("_")
