"""Automatic dynamic shapes: an entry + a call with other scalars or sizes → an entry for any scalars or sizes.

The second value of a scalar makes it an input (:mod:`bridge.dispatch.dynamic_scalars`); the second size of a dimension
makes the dimension symbolic, as in ``torch.compile``. If that is not exact, the call gets an entry of its own, as do
sizes of 0 and 1. The choice of dimensions cannot affect results: the lowering's assumptions on sizes become guards.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from autodiff.extents import Extent
from bridge.base.devices import HOST
from bridge.base.errors import GuardFailure, UnsupportedModule, is_out_of_memory, is_refused_by_eager, swallowed
from bridge.base.log import channel
from bridge.base.torch_internals import pytree
from bridge.capture import ALL_COUNTS, LEAST, DynamicDim, LoopedCall, NumberPlace, Output, sized
from bridge.compile import evaluator
from bridge.dispatch.compile_entry import compile_entry, recorded_call, require_capturable
from bridge.dispatch.entries import Entries
from bridge.dispatch.entry import Entry, EntryOptions
from bridge.dispatch.guards import EntryGuard, interpreter_state
from bridge.state import SampleCall

__all__ = ["MAX_REFUSED", "AutomaticDynamicShapes", "FixedDims", "dynamic_dims"]

#: Failed attempts at sets of symbolic dimensions, in one mode, before every size gets an entry of its own.
MAX_REFUSED = 4
_LEAST = 2
_ONCE = 1
"""Most hits of an entry of fixed sizes that leaves when one of all sizes is made. One that has served its sizes more
often stays for them: constant sizes, a smaller last batch."""


def dynamic_dims(guard: EntryGuard, call: SampleCall) -> tuple[DynamicDim, ...]:
    """Dimensions whose size differs from an entry's or is dynamic there; empty if more than sizes differ."""
    places: dict[int, list[int]] = {}  # of each tensor, which may be given twice
    for place, leaf in enumerate(call.leaves):
        places.setdefault(id(leaf), []).append(place)
    found: list[DynamicDim] = []
    for path, shape, tensor in guard.arguments.compiled_shapes(call):
        leaf = places[id(tensor)].pop(0)
        if tensor.dim() != len(shape):
            return ()
        for dimension, (then, now) in enumerate(zip(shape, tensor.shape, strict=True)):
            if now >= _LEAST and (isinstance(then, Extent) or then != now):
                name = f"{_parameter(call.module.forward, path)}_{dimension}"
                place = f"{path}.shape[{dimension}]"
                found.append(DynamicDim(leaf, dimension, place, "Dim.AUTO", name, _LEAST, None, required=False))
    return tuple(found)


class FixedDims:
    """Dimensions that could not be made symbolic, by the modes of the call; they are not tried again."""

    def __init__(self) -> None:
        self._refused: dict[tuple, list[frozenset[DynamicDim]]] = {}

    def left(self, is_training: bool, dims: tuple[DynamicDim, ...]) -> tuple[DynamicDim, ...]:
        """The subset of the dimensions that may be tried together in the current modes."""
        refused = self._refused.get((is_training, interpreter_state()), [])
        if len(refused) >= MAX_REFUSED:
            return ()
        gone = frozenset().union(*(each for each in refused if each <= frozenset(dims)))
        return tuple(each for each in dims if each not in gone)

    def note(self, is_training: bool, dims: tuple[DynamicDim, ...]) -> None:
        """Records that these dimensions cannot be symbolic together; replaces recorded supersets."""
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


log = channel("dispatch")

#: Failed attempts to make the same scalars inputs; also, entries of any length that have served one length only.
MAX_ATTEMPTS = 2


class AutomaticDynamicShapes:
    """A call that misses one module's entries → a more general entry; remembers failed attempts.

    Args:
        entries: the module's entries, read and changed.
        add: compiles an entry for a call and its dynamic dimensions, and adds it.
        options: returns the options to compile a call with.
    """

    def __init__(self, entries: Entries, add: Callable[..., Entry], options: Callable[..., EntryOptions]):
        self._entries, self._add, self._options = entries, add, options
        self._not_inputs: Counter[tuple[NumberPlace, ...]] = Counter()  # failed attempts by scalars
        self._fixed = FixedDims()

    def __call__(self, call: SampleCall) -> Entry | None:
        """An entry for the call with dynamic scalars or dimensions; ``None`` if neither differs, or if it is not exact.

        Raises:
            UnsupportedModule, CompilationError: as :func:`bridge.lower`, for scalars.
        """
        return self._with_numbers(call) or self._of_any_size(call)

    def _with_numbers(self, call: SampleCall) -> Entry | None:
        """Replaces an entry that differs from the call in scalars by one that takes these scalars as inputs."""
        for known in reversed(self._entries.all):
            changed = known.guard.changed_numbers(call)
            if changed is None or self._not_inputs[tuple(changed)] >= MAX_ATTEMPTS:
                continue
            require_capturable(call.name)
            varied = replace(call, dims=dynamic_dims(known.guard, call))
            entry = compile_entry(varied, self._options(varied), numbers=(known, changed))
            if entry is None:
                self._not_inputs[tuple(changed)] += 1
                return None
            self._entries.replace([known], entry)
            log.info("added %r, which takes %s as inputs", entry, entry.guard.numbers)
            return entry
        return None

    def _of_any_size(self, call: SampleCall) -> Entry | None:
        """An entry that is symbolic in the dimensions in which the call differs from an entry; ``None``: refused."""
        if (found := self.of_any_length(call)) is not None:
            return found
        for known in reversed(self._entries.all):
            dims, counts = dynamic_dims(known.guard, call), _counts(known)
            if dims or (counts and ALL_COUNTS not in known.options.dims and known.guard.holds(call)):
                break
        else:
            return None
        if known.lowered.captured.loop.is_recorded:  # traced for all sizes, it would be unrolled
            return None
        for each in dict.fromkeys(((*dims, *counts), dims)):
            left = self._fixed.left(call.module.training, each)
            if left and (found := self._for_all_sizes(call, left, known)) is not None:
                return self._of_any_count(call, left, found) or found
        return None

    def _of_any_count(self, call: SampleCall, dims: tuple[DynamicDim, ...], found: Entry) -> Entry | None:
        """Replaces a new entry by one that is also symbolic in the counts that its pre-call expressions fix.

        Only an entry with symbolic sizes has them all: with static sizes, numbers that follow from sizes are constants.
        """
        more = (*dims, ALL_COUNTS)
        if ALL_COUNTS in dims or not _counts(found) or self._fixed.left(call.module.training, more) != more:
            return None
        entry = self._for_all_sizes(call, more, found)
        if entry is not None:
            self._entries.drop(found)
        return entry

    def of_any_length(self, call: SampleCall, is_meant: Callable[[Entry], bool] = lambda _: True) -> Entry | None:
        """An existing or new entry whose loops have any length, for a call of another length.

        It exists if the recordings of the call and of an entry's sample differ only in the length of the loops.
        ``is_meant``: selects the entries to consider.
        """
        near: list[tuple[Entry, DynamicDim]] = []
        for known in reversed(self._entries.all):
            captured = known.lowered.captured
            if captured.loop.is_recorded and captured.device == HOST and is_meant(known):
                dims = dynamic_dims(known.guard, call)
                near += [(known, dims[0])] if len(dims) == 1 else []
        looped = recorded_call(call) if near else None
        if looped is None or looped.form is None:
            return None
        leaves = call.leaves
        for known, dim in near:
            size = leaves[dim.leaf].shape[dim.dimension]
            if _proves(known, dim, looped, size, call.tensors):
                try:
                    known.guard.match(call)
                    return known
                except GuardFailure:  # it differs elsewhere, which may have changed the recording
                    known.lowered.captured.loop.any_length.proven.discard(size)
        made = [known.lowered.captured.loop.any_length for known in self._entries.all]
        if sum(each is not None and len(each.proven) == 1 for each in made) >= MAX_ATTEMPTS:
            return None
        for known, dim in near:
            captured, size = known.lowered.captured, leaves[dim.leaf].shape[dim.dimension]
            if captured.loop.any_length is not None or captured.loop.recording is None:
                continue
            then = captured.given.tensors[sum(captured.given.is_tensor[: dim.leaf])].shape[dim.dimension]
            again = looped.of_any_length(captured.loop.recording, then, dim.leaf, dim.dimension, size)
            if again is not None and self._fixed.left(call.module.training, (dim,)):
                return self._for_all_sizes(call, (dim,), known, again)
        return None

    def _for_all_sizes(
        self, call: SampleCall, dims: tuple[DynamicDim, ...], known: Entry, looped: LoopedCall | None = None
    ) -> Entry | None:
        """A new entry for all sizes of these dimensions; ``None`` if its compilation or its guard fails."""
        name, entry = call.name, None
        try:
            entry = self._add(replace(call, dims=dims), looped)
            entry.guard.match(call)
        except Exception as error:  # the call's own size can still be compiled
            if is_refused_by_eager(error) or is_out_of_memory(error):
                raise
            swallowed(error)
            self._fixed.note(call.module.training, tuple(set(dims).difference(known.options.dims)) or dims)
            if entry is not None:
                self._entries.drop(entry)
            is_bug = not isinstance(error, UnsupportedModule | GuardFailure)
            words = "%s: every size of %s gets an entry of its own: %s"
            log.log(logging.WARNING if is_bug else logging.INFO, words, name, _places(dims), error)
            return None
        if entry.bound is None:
            if dims == (ALL_COUNTS,) and not _counts(entry):  # this call has no dynamic count
                return entry
            self._fixed.note(call.module.training, tuple(set(dims).difference(known.options.dims)) or dims)
            log.info("%s: forward fixes %s; every size gets an entry of its own", name, _places(dims))
        else:
            log.info("%s is compiled for sizes that vary from its second size on: %s", name, entry.bound)
            if (ALL_COUNTS in dims or known.hits <= _ONCE) and _covers(entry, known, call):
                entry.bound.replaced_hits.append(known.hits)
                self._entries.drop(known)
        return entry


def _counts(known: Entry) -> tuple[DynamicDim, ...]:
    """:data:`ALL_COUNTS` if an entry's pre-call expressions yield integers that may be sizes, else empty."""
    numbers = [number for each in known.lowered.captured.numbers.expressions for number in each.numbers]
    return (ALL_COUNTS,) if any(type(each) is int and each >= LEAST for each in numbers) else ()


def _covers(entry: Entry, known: Entry, call: SampleCall) -> bool:
    """Whether an entry with dynamic sizes or counts serves every call that ``known``, with the sample's, serves, as
    long as everything around the call is as now."""
    read = zip(entry.lowered.captured.numbers.expressions, known.lowered.captured.numbers.expressions, strict=False)
    if (
        len(entry.lowered.captured.numbers.expressions) != len(known.lowered.captured.numbers.expressions)
        or known.bound is not None
    ):
        return False
    counted: list[torch.Tensor] = []
    for ours, theirs in read:
        if ours.where != theirs.where or len(ours.numbers) != len(theirs.numbers):
            return False
        sizes = ours.sizes or (None,) * len(ours.numbers)
        for size, number, then in zip(sizes, ours.numbers, theirs.numbers, strict=True):
            if size is None and number != then:
                return False
            counted += [] if size is None else [sized(then)]
    if entry.guard.sizes.failure([*known.lowered.captured.given.tensors, *counted]) is not None:
        return False
    again = _at_sizes_of(known, call)
    return known.guard.holds(again) and entry.guard.holds(again)


def _at_sizes_of(known: Entry, call: SampleCall) -> SampleCall:
    """The call with empty tensors of the shapes and strides of an entry's sample."""
    made: dict[int, torch.Tensor] = {}
    given = known.lowered.captured.given.tensors
    for (_, shape, tensor), sample in zip(known.guard.arguments.compiled_shapes(call), given, strict=False):
        made[id(tensor)] = (
            tensor.detach().new_empty_strided(shape, sample.stride()).requires_grad_(tensor.requires_grad)
        )
    args, kwargs = pytree.tree_map(lambda leaf: made.get(id(leaf), leaf), (call.args, call.kwargs))
    return replace(call, args=args, kwargs=kwargs, dims=())


def _proves(known: Entry, dim: DynamicDim, looped: LoopedCall, size: int, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a recording of this size proves that an entry of any length serves it, with eager's result layouts."""
    captured, sizes = known.lowered.captured, known.guard.sizes
    replay = captured.loop.any_length
    if replay is None or sizes is None or (replay.leaf, replay.dimension) != (dim.leaf, dim.dimension):
        return False
    if size in replay.proven or sizes.broken(tensors) is not None:
        return False
    outputs = evaluator(list(captured.outputs), captured.sizes.scope)(sizes.of(tensors))
    if list(map(_layout, outputs)) != list(map(_layout, looped.observation.outputs)):
        return False
    return replay.prove(looped.form, size)


def _layout(output: Output) -> tuple:
    """A result's metadata: aliasing, shape, strides, dtype, requires_grad."""
    where = output.alias_of, output.is_same_object, output.offset
    return output.is_tensor, *where, output.shape, output.stride, output.dtype, output.requires_grad


def _places(dims: Sequence[DynamicDim]) -> str:
    return ", ".join(each.place for each in dims)
