"""Generalization: entries and a call that differs from one by numbers or by sizes → one entry for all of these.

The second value of a number makes it an input (:mod:`bridge.dispatch.number_inputs`), the second size of a dimension
makes that symbolic (:mod:`bridge.dispatch.varying`). Where it is not exact, the call gets an entry of its own.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from bridge.base.errors import UnsupportedModule, is_out_of_memory, is_refused_by_eager
from bridge.base.guard_failure import GuardFailure
from bridge.base.log import channel
from bridge.capture import DynamicDim, NumberPlace
from bridge.dispatch.compile_entry import compile_entry, require_capturable
from bridge.dispatch.entries import Entries
from bridge.dispatch.entry import Entry
from bridge.dispatch.varying import FixedDims, varying_dims

__all__ = ["Generalization"]

log = channel("dispatch")

#: How often it is tried to make inputs of the same numbers.
MAX_ATTEMPTS = 2


class Generalization:
    """Of the entries of one module. It remembers what was tried in vain.

    Args:
        entries: which it reads and changes.
        add: compiles an entry for a call and for dimensions that vary, and adds it.
        options: how a call is compiled.
    """

    def __init__(self, entries: Entries, add: Callable[..., Entry], options: Callable[..., dict[str, Any]]):
        self._entries, self._add, self._options = entries, add, options
        self._not_inputs: Counter[tuple[NumberPlace, ...]] = Counter()  # how often numbers could not be inputs
        self._fixed = FixedDims()

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Entry | None:
        """An entry for the call and others like it; ``None`` if it differs in nothing such, or that is not exact.

        Raises:
            UnsupportedModule, CompilationError: as :func:`bridge.lower`, of numbers.
        """
        return self._with_numbers(module, args, kwargs) or self._of_any_size(module, args, kwargs)

    def _with_numbers(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Entry | None:
        """An entry that takes as inputs the numbers in which the call differs from an entry, whose place it takes."""
        for known in reversed(self._entries.all):
            changed = known.guard.changed_numbers(module, args, kwargs)
            if changed is None or self._not_inputs[tuple(changed)] >= MAX_ATTEMPTS:
                continue
            require_capturable(type(module).__name__)
            how = self._options(module, args, kwargs)
            dims = varying_dims(known.guard, module.forward, args, kwargs)
            entry = compile_entry(module, args, kwargs, **how, numbers=(known, changed), dims=dims)
            if entry is None:
                self._not_inputs[tuple(changed)] += 1
                return None
            self._entries.replace([known], entry)
            log.info("added %r, which takes %s as inputs", entry, entry.guard.numbers)
            return entry
        return None

    def _of_any_size(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Entry | None:
        """An entry that takes all sizes of the dimensions in which the call differs from an entry.

        If the sizes are refused, each gets an entry of its own, which is logged.
        """
        for known in reversed(self._entries.all):
            if dims := varying_dims(known.guard, module.forward, args, kwargs):
                break
        else:
            return None
        if known.lowered.captured.loops:  # traced for all sizes, it would be unrolled
            return None
        dims = self._fixed.left(module.training, dims)
        if not dims:
            return None
        name, entry = type(module).__name__, None
        try:
            entry = self._add(module, args, kwargs, dims)
            entry.guard.match(module, args, kwargs)
        except Exception as error:  # whatever goes wrong with all sizes, this one can still be compiled
            if is_refused_by_eager(error) or is_out_of_memory(error):
                raise
            self._fixed.note(module.training, tuple(set(dims) - known.dims) or dims)
            if entry is not None:
                self._entries.drop(entry)
            is_bug = not isinstance(error, UnsupportedModule | GuardFailure)
            words = "%s: every size of %s gets an entry of its own: %s"
            log.log(logging.WARNING if is_bug else logging.INFO, words, name, _places(dims), error)
            return None
        if entry.bound is None:
            self._fixed.note(module.training, tuple(set(dims) - known.dims) or dims)
            log.info("%s: forward fixes %s; every size gets an entry of its own", name, _places(dims))
        else:
            log.info("%s is compiled for sizes that vary from its second size on: %s", name, entry.bound)
        return entry


def _places(dims: Sequence[DynamicDim]) -> str:
    return ", ".join(each.place for each in dims)
