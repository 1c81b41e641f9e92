"""Rules of in-place writes: a write in forward and the aliases of its memory → nothing, or a refusal.

A functional graph has no aliases: it would lose a write that shows under another name (an argument, a detached view).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from bridge.base.errors import BY_DRAWS, Unsupported, user_line
from bridge.base.threads import is_alone, stack_of
from bridge.base.torch_internals import storage_id
from bridge.capture.autograd_uses import CheckpointedReads, Derivatives
from bridge.capture.custom_functions import function_running

FOREIGN_DRAW = (
    f"{BY_DRAWS[1]}: a compiled call would repeat one number for ever",
    "draw with torch, or outside of the module and pass the number in",
)
CHANGES_ARGUMENT = "changes a tensor that was passed to the module and that autograd follows"
SWITCHED = "sets whether gradients of a tensor of the module or the caller are wanted"


PARAMETER_HINT = "move the update out of forward"
OTHER_NAME = "changes memory in place that autograd sees under another name (.data, a Function, out=)"
"""A reason, which is dropped if the call is captured without the write (a rolled-up loop)."""
_NOT_REENTRANT = "use_reentrant=False: checkpoint(..., use_reentrant=False), or gradient_checkpointing_kwargs"


class InPlaceRules:
    """Collects refusals of effects of forward that a functional graph would get wrong.

    Args:
        arguments: leaves of the call's arguments; only the tensors count.
        parameters: the module's parameters that require grad.
        inputs: all tensors that the graph takes, with buffers.

    Attributes:
        unsupported: the refusals, in order.
        checkpointed: inputs that functions in checkpoints read.
        without_grad: tensors, by id, whose ``.grad`` forward has read as ``None``.
        written_parameters: the memory of written parameters.
        memory: the memory of the inputs.
        derivatives: inputs that forward's own derivatives concern.
    """

    def __init__(
        self, arguments: Sequence[Any], parameters: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor] = ()
    ):
        self.unsupported: list[Unsupported] = []
        self.memory = InputMemory(inputs)
        self._given = given = [each for each in arguments if isinstance(each, torch.Tensor)]
        self.derivatives = Derivatives()
        self._argument_storages = {storage_id(each) for each in given}
        self._followed_storages = {storage_id(each) for each in given if each.requires_grad}
        self._parameter_storages = {storage_id(p) for p in parameters}
        self._detached: set[int] = set()
        self._underived: list[tuple[str, str]] = []
        self._shared: set[int] = set()
        self.without_grad: dict[int, torch.Tensor] = {}
        self.written_parameters: set[int] = set()
        self._thread = threading.get_ident()
        self.checkpointed = CheckpointedReads(self._thread)

    def complain(self, op: str, reason: str, hint: str | None = None) -> None:
        where = user_line(stack_of(self._thread)) or "a line outside the module's own code"
        extra = {"hint": hint} if hint else {}
        self.unsupported.append(Unsupported(op, where, reason, **extra))

    def underived(self, op: str) -> None:
        """Notes an operator without a derivative in eager, which has run on a tensor that autograd tracks."""
        self._underived.append((op, user_line(stack_of(self._thread)) or "forward"))

    def not_differentiated(self) -> None:
        """Refuses the first noted operator without a derivative, because a gradient would reach it."""
        reason = "eager has no derivative of it, and fails in the backward"
        self.unsupported += [Unsupported(op, where, reason) for op, where in self._underived[:1]]
        self._underived.clear()

    def custom_function(self, name: str, where: str) -> None:
        reason = "a custom autograd.Function: its backward is Python code that a graph does not hold"
        hint = [_NOT_REENTRANT] if name == "CheckpointFunction" else []
        self._once(Unsupported(f"autograd.Function {name}", where, reason, *hint))

    def foreign_draw(self, name: str, where: str | None = None) -> None:
        """Refuses a draw from Python's or numpy's generator, once for each generator."""
        reason, hint = FOREIGN_DRAW
        if where is None and not is_alone():
            hint += "; if it is another thread that draws, add the dispatch before it does"
        self._once(Unsupported(name, where or "forward", reason, hint))

    def new_leaf(self) -> None:
        """Refuses a result that requires grad because of a tensor that is no parameter and no argument."""
        reason = "makes a tensor inside forward that requires grad by itself"
        self._once(Unsupported("requires_grad_", "forward", reason, "make it a parameter or an argument"))

    def _once(self, problem: Unsupported) -> None:
        if not any(known.op == problem.op for known in self.unsupported):
            self.unsupported.append(problem)

    def switched(self, leaf: torch.Tensor, before: bool, is_read: bool) -> None:
        """Notes an argument on which forward turns ``requires_grad`` on before it reads it. Refuses other changes of an
        input's: earlier rows ran with the other value."""
        place = next((place for place, each in enumerate(self._given) if each is leaf), None)
        if place is not None and leaf.requires_grad and not (is_read or id(leaf) in self.derivatives.asked):
            self.derivatives.followed.add(place)
        elif leaf.requires_grad != before and any(
            each is leaf for each in self.memory.inputs.get(storage_id(leaf), ())
        ):
            self.complain(
                "requires_grad_", SWITCHED, "set it outside of forward, or dispatch the modules inside: whole=False"
            )

    def is_given(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the memory of an input."""
        return storage_id(tensor) in self.memory.inputs or storage_id(tensor) in self._argument_storages

    def exchanged(self, name: str) -> None:
        """Refuses setting an input, or its ``.data``, to another tensor if autograd saves its overwritten memory."""
        reason = "is set to another tensor, where autograd saves memory that forward writes by .data"
        self.unsupported.append(Unsupported(f"'{name}'", "forward", reason, "write into it"))

    def given_to_input(self, name: str, value: torch.Tensor) -> None:
        """Notes that an input is set to a value. Its numbers are copied, which is exact unless either tensor is written
        under another name; refuses a value with an input's memory."""
        if self.is_given(value):
            self.complain(name, "is set to memory that has another name, of an argument or of the module's", "clone it")
        self._shared.add(storage_id(value))

    def mutated(self, name: str, tensor: torch.Tensor, is_only: bool) -> None:
        storage = storage_id(tensor)
        if storage in self._shared:
            self.complain(name, "changes memory that an input of the call has been set to", "clone it first")
        if storage in self._followed_storages or (storage in self._argument_storages and tensor.requires_grad):
            self.complain(name, CHANGES_ARGUMENT, "work on a clone: x = x.clone() before it")
        elif any(map(overlaps_itself, self.memory.inputs.get(storage, ()))):
            self.complain(name, "changes a tensor whose elements lie in one place (an expanded one)", "clone it first")
        elif storage in self._parameter_storages:
            if len(self.memory.inputs[storage]) > 1 or function_running() is not None:
                self.complain(name, "changes a parameter that shares its memory, or in a Function", PARAMETER_HINT)
            self.written_parameters.add(storage)
        elif storage in self._detached or (not torch.is_grad_enabled() and self._is_followed(tensor)):
            running = function_running()
            if storage in self.memory.by_data or not is_only or (running is not None and storage not in running.copies):
                self.complain(name, OTHER_NAME, "clone first")

    def returned(self, sources: Sequence[torch.Tensor], result: torch.Tensor) -> None:
        if result.requires_grad:
            return
        if any(self._is_followed(source) and storage_id(source) == storage_id(result) for source in sources):
            self._detached.add(storage_id(result))

    def _is_followed(self, tensor: torch.Tensor) -> bool:
        """Whether autograd tracks a tensor with a visible gradient; that of a leaf which forward makes is not."""
        if not tensor.requires_grad or not _is_leaf(tensor):
            return tensor.requires_grad
        return storage_id(tensor) in self._parameter_storages | self._followed_storages | self.memory.inputs.keys()


def _is_leaf(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a leaf. A Function's view whose base was written, for which torch raises, is none."""
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


class InputMemory:
    """The memory of a run's inputs, and writes to it that version counters miss (through ``.data``).

    Attributes:
        inputs: memory → the inputs in it.
        by_data: the memory of all tensors whose ``.data`` forward has taken.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]):
        self.inputs: dict[int, list[torch.Tensor]] = {}
        for each in inputs:
            self.inputs.setdefault(storage_id(each), []).append(each)
        self._exchanged, self._exchanging, self._uncounted = set[int](), set[int](), set[int]()
        self._latest = {storage: list(map(version_of, found)) for storage, found in self.inputs.items()}
        self.by_data: set[int] = set()

    def note(self, storages: Iterable[int]) -> None:
        """Notes that an operator has written memory."""
        for storage in {*storages} & self.inputs.keys():
            before, self._latest[storage] = self._latest[storage], list(map(version_of, self.inputs[storage]))
            if storage in self._exchanging:
                self._exchanging.remove(storage)
            elif before == self._latest[storage]:
                self._uncounted.add(storage)

    def note_exchange(self, tensor: torch.Tensor) -> None:
        """Notes that the next write to an input's memory implements ``.data = value``."""
        self._exchanged.add(storage_id(tensor))
        self._exchanging.add(storage_id(tensor))

    def exchanged(self, inputs: Sequence[torch.Tensor]) -> frozenset[int]:
        return frozenset(index for index, each in enumerate(inputs) if storage_id(each) in self._exchanged)

    def uncounted(self, inputs: Sequence[torch.Tensor]) -> frozenset[int]:
        """Indices of the inputs that were written without moving their version counter."""
        return frozenset(index for index, each in enumerate(inputs) if storage_id(each) in self._uncounted)


def version_of(tensor: torch.Tensor) -> int:
    """The tensor's version counter; 0 for a tensor made in inference mode, which has none."""
    return 0 if tensor.is_inference() else tensor._version


# Overlap: views of one memory → whether two views, or two elements of one view, share a place.


def overlaps(results: Sequence[torch.Tensor]) -> list[Unsupported]:
    """Refusals of overlapping results, which a compiled call would return in separate memory."""
    by_storage: dict[int, list[torch.Tensor]] = {}
    for result in results:
        by_storage.setdefault(storage_id(result), []).append(result)
    for group in by_storage.values():
        if any(share_elements(a, b) for position, a in enumerate(group) for b in group[:position]):
            reason = "returns overlapping parts of one tensor: what is written to one is seen in the other"
            hint = "return the whole tensor as well, or clones of the parts"
            return [Unsupported("views", "the module's result", reason, hint)]
    return []


def share_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors in one storage share an element; ``True`` for two dtypes."""
    if not (a.numel() and b.numel()) or a.dtype != b.dtype:
        return bool(a.numel() and b.numel())
    marks = torch.zeros(a.untyped_storage().nbytes() // a.itemsize, dtype=torch.bool)
    marks.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
    return bool(marks.as_strided(b.shape, b.stride(), b.storage_offset()).any())


def overlaps_itself(x: torch.Tensor) -> bool:
    """Whether elements of ``x`` may share a place, so that a write at one position shows at others."""
    reach = 0
    for stride, extent in sorted((stride, extent) for stride, extent in zip(x.stride(), x.shape, strict=True)):
        if extent > 1 and stride <= reach:
            return True
        reach += (extent - 1) * stride
    return False
