"""Uses of autograd in forward that no graph holds: hooks on tensors, ``.grad``, packed saved tensors, derivatives."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import graph
from torch.multiprocessing.reductions import StorageWeakRef

from bridge.base.errors import Unsupported, user_line
from bridge.base.threads import stack_of
from bridge.base.torch_autograd import checkpoint_frame, is_computed_again, puts_generators_back
from bridge.base.torch_internals import (
    current_graph_task_id,
    forward_ad_level,
    saved_tensors_hooks,
    storage_id,
)
from bridge.capture.rows import form_of, memory_of

_HOOKS = ("register_hook", "retain_grad", "register_post_accumulate_grad_hook")
_ELSEWHERE = "do it around the call, in the training loop"


def use_of_autograd(
    func: Any, name: str, args: Sequence[Any], without: dict[int, torch.Tensor]
) -> tuple[str, str, str | None] | None:
    """A torch function's call → (operation, reason, hint) to refuse its use of autograd, or ``None``.

    ``without`` receives tensors whose ``.grad`` is ``None``, which becomes a guard (:mod:`bridge.guards.tensor_reads`).
    """
    if name in _HOOKS:
        return f"Tensor.{name}", "a tensor hook set inside forward", None
    if name in ("__get__", "__set__", "__delete__") and getattr(func, "__self__", None) is torch.Tensor.grad:
        if name == "__get__" and func(*args) is None:
            without[id(args[0])] = args[0]
            return None
        return "Tensor.grad", "gradients from earlier calls, read or changed inside forward", _ELSEWHERE
    if forward_ad_level() >= 0:
        return "torch.func or forward_ad", "dual numbers inside forward", None
    hooks = saved_tensors_hooks()
    of = (getattr(hooks and hooks[0], "__module__", None) or "").partition(".")[0]
    if hooks is not None and of not in ("torch", "bridge"):  # the hooks of checkpoints and ``save_on_cpu`` keep numbers
        reason = "changes the saved tensors by its own functions; a compiled call saves the tensors of its partition"
        return "torch.autograd.graph.saved_tensors_hooks", reason, "use it around the call"
    return None


# Derivatives inside forward: the inputs of a call → whether a derivative with respect to one of them ends there.
#
# Eager follows the graph of the caller's tensors as well, which may lead from one argument to another. A compiled call
# knows the rows of forward alone.


@dataclass
class Derivatives:
    """Inputs of a run that derivatives inside forward concern.

    Attributes:
        derived: the inputs with respect to which forward takes derivatives.
        followed: places among the arguments' tensors on which forward turns ``requires_grad`` on.
        asked: ids of tensors whose ``requires_grad`` forward has read.
    """

    derived: set[int] = field(default_factory=set)
    followed: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)


def leads_out(tensors: Sequence[torch.Tensor], derived: Iterable[int]) -> str | None:
    """Why eager's derivatives with respect to the tensors at some places differ from a compiled call's, or ``None``."""
    graphs = [each for each in tensors if each.requires_grad and each.grad_fn is not None]
    for place in derived:
        tensor = tensors[place]
        if sum(each is tensor for each in tensors) > 1:
            return "a tensor is given twice, and forward takes a derivative with respect to it"
        if any(each is not tensor for each in graphs):
            return "forward takes derivatives, and another argument has a graph that may lead to their tensors"
        if tensor._backward_hooks or tensor.retains_grad:
            return "forward takes a derivative with respect to a tensor with a hook"
    return None


# Functions in checkpoints → refusals where eager's second run, in the backward, would differ from the first.
#
# A compiled call runs a checkpointed function once; the partition chooses the values that the backward recomputes, with
# the first run's numbers. Eager runs Python again: it counts and updates running statistics a second time, reads
# memory that has been written since, and draws anew with ``preserve_rng_state=False``.


_HINT = "dispatch what is checkpointed, or leave the checkpoint out: partition='recompute_all' saves as little"
DRAWS_ANEW = "draws in a checkpoint with preserve_rng_state=False, which draws other numbers when it runs again"


def draws_anew() -> bool:
    """Whether the backward repeats draws that run now, with other numbers."""
    frame = checkpoint_frame()
    return frame is not None and not puts_generators_back(frame)


class CheckpointedReads:
    """The inputs that functions in checkpoints read, and the lines; the backward runs these functions again."""

    def __init__(self, thread: int):
        self._thread = thread
        self._frames: dict[int, Any] = {}
        self._lines: dict[int, dict[int, str]] = {}

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Notes the tensors that an operator reads, if it runs in a checkpoint."""
        frame = checkpoint_frame()
        if frame is None:
            return
        lines = self._lines.setdefault(id(frame), {})
        self._frames[id(frame)] = frame
        for tensor in tensors:
            if storage_id(tensor) not in lines:
                lines[storage_id(tensor)] = user_line(stack_of(self._thread)) or "forward"

    def of(self, inputs: Sequence[torch.Tensor]) -> dict[int, str]:
        """Index of each input that is read → the user's line that reads it first."""
        found: dict[int, str] = {}
        for key, frame in self._frames.items():
            if is_computed_again(frame):
                for index, tensor in enumerate(inputs):
                    if (line := self._lines[key].get(storage_id(tensor))) is not None:
                        found.setdefault(index, line)
        return found


def written_and_read(read: dict[int, str], written: Iterable[int], names: Sequence[str]) -> list[Unsupported]:
    """Refusals of inputs that forward writes and :class:`CheckpointedReads` found; ``names``: the module's tensors."""
    reason = "is written by forward, and a checkpoint reads it: eager's backward runs that again, after the write"
    return [
        Unsupported(f"buffer '{names[index]}'" if index < len(names) else "an argument", read[index], reason, _HINT)
        for index in sorted(set(written) & read.keys())
    ]


class AnotherRunError(Exception):
    """A run tells how another one has to begin.

    Attributes:
        followed: places among the argument tensors on which forward turns ``requires_grad`` on before it reads them:
            they require grad from the start.
        how: arguments of :func:`bridge.capture.real_run.real_run_of`: ``differentiates`` if forward runs a backward,
            ``saves`` if autograd needs a saved tensor, ``writing`` with a Function that writes its arguments.
    """

    def __init__(self, followed: Iterable[int] = (), **how: Any):
        self.followed, self.how = frozenset(followed), how


def saved_unseen() -> AbstractContextManager:
    """While active, no hooks around see the tensors that autograd saves."""
    return graph.saved_tensors_hooks(_itself, _itself)


def saved_here() -> AbstractContextManager:
    """While active, hides tensors that autograd saves from a checkpoint around the call, which would count them."""
    return nullcontext() if saved_tensors_hooks() is None else saved_unseen()


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class SavedMemory:
    """The tensors that eager's autograd saves, by memory and layout.

    Attributes:
        is_all: whether every tensor counts as saved, and autograd saves them.
        is_needed: whether autograd has needed one that it has not saved; ``in_backward``: a backward that forward runs.
    """

    def __init__(self, is_all: bool) -> None:
        self.is_needed = self.in_backward = False
        self.is_all, self._looks = is_all, dict[int, tuple[StorageWeakRef, set[tuple]]]()
        self._held: dict[int, weakref.ref] = {}

    def noted(self) -> AbstractContextManager:
        """While active, notes the tensors that autograd saves, which it does not save then, or sees none."""
        return saved_here() if self.is_all else graph.saved_tensors_hooks(self._note, self._unpack)

    def _unpack(self, saved: None) -> torch.Tensor:
        self.is_needed, self.in_backward = True, current_graph_task_id() != -1
        raise AnotherRunError(saves=True)

    def _note(self, tensor: torch.Tensor) -> None:
        memory = memory_of(tensor)
        if memory is not None:
            if memory not in self._looks:  # the reference keeps the id from being reused
                self._looks[memory] = StorageWeakRef(tensor.untyped_storage()), set()
            self._looks[memory][1].add(form_of(tensor)[:4])
            self._held[id(tensor)] = weakref.ref(tensor)

    def inputs(self, tensors: Sequence[torch.Tensor]) -> tuple[frozenset[int], frozenset[int]]:
        """``(indices of saved inputs, indices of inputs of which autograd saves another view)``."""
        if self.is_all:
            return frozenset(range(len(tensors))), frozenset()
        looks = [(index, form_of(each)[:4], self._looks_at(each)) for index, each in enumerate(tensors)]
        themselves = frozenset(index for index, look, found in looks if look in found)
        return themselves, frozenset(index for index, look, found in looks if found - {look})

    def results(self, leaves: Sequence[Any]) -> tuple[set[int], set[int]]:
        """``(indices of leaves whose memory has a saved tensor, indices of saved leaves)``."""
        if self.is_all:
            return set(range(len(leaves))), set(range(len(leaves)))
        tensors = {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        held = {index for index, leaf in tensors.items() if self._held.get(id(leaf), lambda: None)() is leaf}
        return {index for index, leaf in tensors.items() if self._looks_at(leaf)}, held

    def _looks_at(self, tensor: torch.Tensor) -> set[tuple]:
        return self._looks.get(memory_of(tensor), (None, set()))[1]
