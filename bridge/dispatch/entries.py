"""Entries: the compiled calls of one module, or of one of Dynamo's graphs; hits, misses by reason, recompile limit.

:func:`no_entry`: a call without any entry → a guard failure that names the kind of call. A first call that cannot be
compiled (evaluation with a cache, say) does not rule out calls of another kind. Sizes and numbers are not part of the
kind, since they may differ at every call.

:class:`CompileBudget` (recompile limit): the cause of a miss (the failing guard) → whether to compile once more.
A compilation costs as much as thousands of calls, and pays only if equal calls come back. So compilations are counted
by cause: wasted ones (an entry that served only its own call, an unsupported call) have a small limit, all together a
larger one. Beyond it, calls that fail this guard run eager; each cause has limits of its own.

:func:`advice`: the guard that keeps failing → a remedy for the user.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from bridge.base.errors import INTERPRETER, RUN, GuardFailure
from bridge.base.pytrees import leaf_names
from bridge.base.torch_distributed import greatest
from bridge.base.torch_internals import pytree
from bridge.compile import RecordedGraphs
from bridge.dispatch.entry import Entry
from bridge.dispatch.guards import active_modes
from bridge.state import SampleCall

__all__ = ["MAX_COMPILED", "MAX_REASONS", "MAX_WASTED", "NO_ENTRY", "CompileBudget", "DispatchStats", "Entries"]
__all__ += ["advice", "no_entry"]

#: Most reasons that are counted separately: sizes that differ at every call give one each.
MAX_REASONS = 1000
_OTHERS = "another reason"


class Entries:
    """The entries, each of which counts its hits, and the misses.

    Attributes:
        all: the entries, oldest first. A change makes a new list, since other threads may be iterating over this one.
        misses: eager calls, by reason; beyond the first thousand reasons, under one name.
        refused: reason of a miss → why calls with it are never compiled.
        divided: reasons of misses whose calls run in parts, which count their own calls.
        eager_backwards: backwards of hits that eager's operators computed, by reason.
        group: the process group with which an entry exchanges tensors.
    """

    def __init__(self) -> None:
        self.all: list[Entry] = []
        self.group: str | None = None
        self.misses: Counter[str] = Counter()
        self.eager_backwards: Counter[str] = Counter()
        self.refused: dict[str, str] = {}
        self.divided: set[str] = set()
        self._hits_of_gone = 0

    @property
    def hits(self) -> int:
        """Calls that an entry ran, dropped entries included."""
        return self._hits_of_gone + sum(entry.hits for entry in self.all)

    def count_miss(self, reason: str) -> None:
        """Counts an eager call, unless it runs in parts."""
        if reason in self.divided:
            return
        is_counted = reason in self.misses or len(self.misses) < MAX_REASONS
        self.misses[reason if is_counted else _OTHERS] += 1

    def add(self, *entries: Entry) -> None:
        """Appends entries; known ones keep their places."""
        for entry in entries:
            entry.programs.eager_backwards = self.eager_backwards
            self.group = self.group or entry.lowered.captured.group
        self.all = [*self.all, *(entry for entry in entries if entry not in self.all)]

    def replace(self, gone: Iterable[Entry], entry: Entry) -> None:
        """Replaces entries by a new one."""
        self.drop(*gone)
        self.add(entry)

    def match_together(self, call: SampleCall, match: Callable[[SampleCall], Any]) -> tuple[Any, bool]:
        """The matching entry and its inputs, or a guard failure; and whether all processes of the group chose alike.

        A compiled call needs fewer collectives than eager: a process that ran eager beside it would exchange the wrong
        tensors. So the processes compare their choices first, by one exchange of two numbers.

        ``match``: the closer look at a call that fails the fast check of every entry.
        """
        checks = ((entry, entry.guard.check(call.module, call.args, call.kwargs)) for entry in self.all)
        found = next((each for each in checks if each[1] is not None), None) or match(call)
        misses = isinstance(found, GuardFailure)
        choice = 0 if misses else 1 + self.all.index(found[0])
        high, low = greatest([choice, -choice], self.group)
        if high == -low:
            return found, True
        if not misses:
            words = "another process of the group runs another entry, or none", "all of them run eager"
            found = GuardFailure(RUN, *words)
        return found, False

    def drop(self, *entries: Entry) -> None:
        """Removes entries; their hits stay counted."""
        self._hits_of_gone += sum(entry.hits for entry in self.all if entry in entries)
        self.all = [entry for entry in self.all if entry not in entries]


NO_ENTRY = "no entry"
_STAGE = INTERPRETER - 1  # farther than any entry's failure
_FLAGS = (bool, str, type(None))


def no_entry(call: SampleCall) -> GuardFailure:
    """The failure of a call without any entry, as in ``"no entry: training, grad mode, args[0] a Tensor"``."""
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    mode = "training" if call.module.training else "evaluation"
    kinds = [mode, *["grad mode"] * torch.is_grad_enabled(), *active_modes()]
    for name, leaf in zip(leaf_names(spec), leaves, strict=True):
        kinds.append(f"{name} {leaf!r}" if isinstance(leaf, _FLAGS) else f"{name} a {type(leaf).__name__}")
    return GuardFailure(_STAGE, NO_ENTRY, ", ".join(kinds))


#: Most wasted compilations for one cause: the number of entries that are kept.
MAX_WASTED = 8
#: Most compilations for one cause: recurring sizes may be too many to keep. Entries with loops count when dropped.
MAX_COMPILED = 32


class CompileBudget:
    """Recompile limit: counts compilations for calls that missed, by cause.

    Example:
        >>> budget = CompileBudget()
        >>> for _ in range(MAX_WASTED):
        ...     budget.note_wasted("shape of args[0]")
        >>> budget.allows("shape of args[0]", []), budget.allows("grad mode", [])
        (False, True)
    """

    def __init__(self) -> None:
        self._compiled: Counter[str] = Counter()
        self._wasted: Counter[str] = Counter()

    def allows(self, cause: str, entries: Sequence[Entry]) -> bool:
        """Whether one more entry may be compiled for this cause; ``entries``: the existing ones."""
        if self._compiled[cause] >= MAX_COMPILED:
            return False
        unused = sum(entry.cause == cause and _is_unused(entry) for entry in entries)
        return self._wasted[cause] + unused < MAX_WASTED

    def note_compiled(self, cause: str, entry: Entry) -> None:
        """Records an entry compiled for a call that missed."""
        entry.cause = cause
        self._compiled[cause] += not entry.has_loops

    def note_wasted(self, cause: str) -> None:
        """Records a call that could not be compiled."""
        self._wasted[cause] += 1

    def note_left(self, entry: Entry) -> None:
        """Records an entry dropped for a newer one."""
        if entry.cause is not None:
            self._wasted[entry.cause] += _is_unused(entry)
            self._compiled[entry.cause] += entry.has_loops

    def clear(self) -> None:
        """Resets the counts."""
        self._compiled.clear()
        self._wasted.clear()


def _is_unused(entry: Entry) -> bool:
    return entry.hits <= 1  # the call that it was compiled for


_REASONS = 20
"""Most reasons that are printed."""

_HINT = 'add_tvm_dispatch(module, sample) in the state of such a call adds an entry for it, as on_miss="compile" does'


class DispatchStats:
    """Statistics of a dispatched module's calls: a live view.

    Attributes:
        misses: eager calls, by reason, which names the difference from an entry.
        eager_backwards: backwards of hits that eager's operators computed, by reason: double backward, batched
            gradients, an observed intermediate result.
        graphs: statistics of CUDA graphs: replays, runs without a graph by reason, bytes.
    """

    def __init__(
        self, entries: Entries, graphs: RecordedGraphs | None = None, compiles: Callable[[], bool] = lambda: False
    ):
        self._entries, self._compiles = entries, compiles
        self.misses, self.eager_backwards = entries.misses, entries.eager_backwards
        self.graphs = graphs or RecordedGraphs(False)

    @property
    def hits(self) -> int:
        """Calls that ran in TVM."""
        return self._entries.hits

    @property
    def entries(self) -> list[Entry]:
        """The compiled calls."""
        return self._entries.all

    def __repr__(self) -> str:
        lines = [f"DispatchStats(hits={self.hits}, misses={sum(self.misses.values())})"]
        lines += [f"  {entry!r}" for entry in self.entries]
        lines += [f"  {count} x {reason}" for reason, count in self.eager_backwards.items()]
        refused = self._entries.refused
        for reason, count in self.misses.most_common(_REASONS):
            lines.append(f"  {count} x {reason}")
            lines += [f"    {line}" for line in refused.get(reason, "").splitlines()]
        if len(self.misses) > _REASONS:
            rest = self.misses.most_common()[_REASONS:]
            lines.append(f"  {sum(count for _, count in rest)} x {len(rest)} other reasons (.misses has all)")
        if self.graphs.replays or self.graphs.refused:
            lines += [f"  {line}" for line in repr(self.graphs).splitlines()]
        if any(reason not in refused for reason in self.misses) and not self._compiles():
            lines.append("  " + _HINT)
        return "\n".join(lines)


_DEFAULT = "call add_tvm_dispatch(module, sample) in the state of such a call"
_KNOWN = (
    ("training flag", "call add_tvm_dispatch in the mode of the loop: module.train() before it, or module.eval()"),
    ("autocast", "call add_tvm_dispatch inside the same torch.autocast(...) as the loop's calls"),
    ("grad mode", "call add_tvm_dispatch under the same grad mode as the loop's calls (torch.no_grad() or not)"),
    ("inference mode", "call add_tvm_dispatch under the same grad mode as the loop's calls"),
    ("requires_grad of", "give a sample whose tensors require grad where the loop's do"),
    ("dtype of", "give a sample of the loop's dtypes"),
    ("shape of", "pad or bucket lengths that vary (a DataLoader's drop_last=True)"),
    ("attribute", "keep a number that changes in a buffer (a 0-d tensor), whose value may change freely"),
    ("number read", "compute with the tensor, not with its number: torch.where for a branch, x[index] for a place"),
    ("value of argument", "pass a number that changes as a 0-d tensor, whose value may change freely"),
    ("keyword arguments", "give a sample with the keyword arguments of the loop's calls"),
    ("alignment of", "give tensors that begin where torch allocates them: clone() a slice from an odd place"),
    ("frozen", 'give on_miss="compile", or call add_tvm_dispatch(..., freeze=True) again when the module has changed'),
    ("forward of", "call add_tvm_dispatch after what replaces it (Accelerator.prepare does), or without a sample"),
    ("hook on", "register hooks on the dispatched module itself, or dispatch the layers below the hook"),
)
_TRAINER = (
    "HuggingFace's Trainer adds num_items_in_batch to the batch of a model that accepts it: add it to the sample "
    "(a 0-d int64 tensor), or dispatch the layers, not the whole model"
)


def advice(failure: GuardFailure, compiles: bool) -> str:
    """The remedy for a guard failure; ``compiles``: whether under ``on_miss="compile"``."""
    field, reason = failure.field, failure.reason
    if "num_items_in_batch" in reason:
        return _TRAINER
    if field.startswith("shape of") and not compiles:
        return 'give on_miss="compile", which serves lengths that vary by one entry, or a sample of the loop\'s shapes'
    default = _DEFAULT if compiles else f'{_DEFAULT}, or give on_miss="compile"'
    return next((words for start, words in _KNOWN if field.startswith(start)), default)
