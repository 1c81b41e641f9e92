"""Dispatch statistics of a module: hits, misses by reason, entries.

Advice on misses: the guard field that keeps differing → what the user can do about it.
"""

from __future__ import annotations

from collections.abc import Callable

from bridge.base.errors import GuardFailure
from bridge.compile import RecordedGraphs
from bridge.dispatch.entries import Entries
from bridge.dispatch.entry import Entry

__all__ = ["DispatchStats", "advice"]

_REASONS = 20
"""That are printed: sizes that differ at every call give one each."""

_HINT = 'add_tvm_dispatch(module, sample) in the state of such a call adds an entry for it; on_miss="compile" by itself'


class DispatchStats:
    """What became of a dispatched module's calls: a view, which later calls change.

    Attributes:
        misses: calls that ran eager, by the reason, which names what differed.
        eager_backwards: backwards of hits that eager's operators computed, since they were differentiated again or
            batched, by the reason.
        graphs: what became of CUDA graphs: replays, runs without one by the reason, bytes.
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


_DEFAULT = 'call add_tvm_dispatch(module, sample) in the state of such a call, or give on_miss="compile"'
_KNOWN = (
    ("training flag", "call add_tvm_dispatch in the mode of the loop: module.train() before it, or module.eval()"),
    ("autocast", "call add_tvm_dispatch inside the same torch.autocast(...) as the loop's calls"),
    ("grad mode", "call add_tvm_dispatch under the same grad mode as the loop's calls (torch.no_grad() or not)"),
    ("inference mode", "call add_tvm_dispatch under the same grad mode as the loop's calls"),
    ("requires_grad of", "give a sample whose tensors require grad where the loop's do"),
    ("dtype of", "give a sample of the loop's dtypes"),
    ("shape of", "pad or bucket lengths that vary (a DataLoader's drop_last=True)"),
    ("attribute", "keep a number that changes in a buffer (a 0-d tensor), whose value may change freely"),
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
    """What helps where calls differ so; ``compiles``: under ``on_miss="compile"``."""
    field, reason = failure.field, failure.reason
    if "num_items_in_batch" in reason:
        return _TRAINER
    if field.startswith("shape of") and not compiles:
        return 'give on_miss="compile", which serves lengths that vary by one entry, or a sample of the loop\'s shapes'
    return next((words for start, words in _KNOWN if field.startswith(start)), _DEFAULT)
