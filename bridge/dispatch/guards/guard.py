"""The guard of an entry: a call → the inputs of the compiled code, or the first condition that fails.

A pure function of the call. The conditions go from cheap and global to specific: the interpreter's modes, the
arguments' structure, the argument tensors, the module tree, memory shared with tensors that the call writes.
:attr:`EntryGuard.check` answers the common case, a call exactly like the sample, in a few microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import nn

from autodiff.lazy import cached_property
from bridge.base.devices import function_modes
from bridge.base.errors import ARGUMENTS, MODULE, GuardFailure
from bridge.base.torch_internals import STORAGE_NUMBER, storage_id
from bridge.capture import Captured, NumberPlace, number_tensor
from bridge.dispatch.guards.arguments import ArgumentGuard
from bridge.dispatch.guards.condition import Check, CheckSource
from bridge.dispatch.guards.interpreter import INFERENCE, modes_as_now, settings_as_now
from bridge.dispatch.guards.module import ModuleGuard
from bridge.dispatch.guards.tensors import FrozenTensors
from bridge.guards import Reads, Settling, TensorReads
from bridge.state import SampleCall

__all__ = ["EntryGuard"]

_BUT_FROZEN = 2
"""Value of ``thorough`` for a check that ignores changes of frozen tensors."""


class InputGuard:
    """The conditions on all inputs of the compiled code together: identities, alignment, shared memory.

    Args:
        names: the inputs' names.
        written: places and names of the inputs that the call writes.
        asked: forward's recorded reads of tensors.
        addresses: see the attribute.

    Attributes:
        addresses: place → address in the sample, for inputs of fused dropouts.
        aligned: place → alignment in bytes that an input needs for eager's dropout mask.
    """

    def __init__(
        self, names: Sequence[str], written: Sequence[tuple[int, str]], asked: TensorReads, addresses: Mapping[int, int]
    ):
        self._names, self._written, self._asked, self.addresses = names, written, asked, addresses
        self.aligned: Mapping[int, int] = {}

    def write(self, source: CheckSource) -> None:
        """Writes the conditions on ``inputs``."""
        if self._asked:
            _refuse(source, "True", self._other_reads)
        _refuse(source, f"{source.name(self, 'of inputs')}.aligned", self._alignment)
        if self._written:
            storage = source.name(torch.Tensor.untyped_storage, "storage of")
            number = source.name(STORAGE_NUMBER, "number of")
            source.add(f"storages = list(map({number}, map({storage}, inputs)))")
            shared = " or ".join(f"storages.count(storages[{index}]) > 1" for index, _ in self._written)
            _refuse(source, shared, self._shared_memory)

    def _other_reads(self, inputs: Sequence[torch.Tensor]) -> GuardFailure | None:
        """A value that forward read of a tensor and that differs now."""
        what = self._asked.difference(inputs)
        return None if what is None else GuardFailure(ARGUMENTS, what)

    def _alignment(self, inputs: Sequence[torch.Tensor]) -> GuardFailure | None:
        """A fused dropout's input without the compiled alignment."""
        for place, least in self.aligned.items():
            if beside := inputs[place].data_ptr() % least:
                told = f"dropout reads it; compiled for multiples of {least} bytes, called with {beside} more"
                return GuardFailure(MODULE, f"alignment of {self._names[place]}", told)
        return None

    def _shared_memory(self, inputs: Sequence[torch.Tensor]) -> GuardFailure | None:
        """Two inputs in one storage, one of which the call writes: eager reads the new values in both."""
        storages = list(map(storage_id, inputs))
        for index, name in self._written:
            if storages.count(storages[index]) > 1 and inputs[index].numel():
                other = next(i for i, each in enumerate(storages) if each == storages[index] and i != index)
                what = f"{self._names[other]} shares memory with {name}, which the call changes"
                return GuardFailure(MODULE, what)
        return None


class EntryGuard:
    """The conditions of one entry.

    Args:
        module: the dispatched module in its current state.
        captured: the captured call, whose sample defines the expected arguments.
        arguments: the sample's argument tensors, with the expected layouts.
        numbers: places of the scalar inputs, which come between module tensors and arguments: attributes first.
        frozen: if the module's tensors are constants, the places of tensors that eager writes without a version count
            (:func:`bridge.dispatch.guards.tensors.uncounted_statistics`), else ``None``.
        exact_modes: whether to require the current grad mode even if the code does not depend on it.
        reads: the recorded reads of the call; ``None``: of the captured call, maybe of an equal module.

    Attributes:
        modes, settings: the conditions on the interpreter's modes, and on a GPU's settings if there is one.
        inputs: the conditions on all inputs together; ``tree``: on the module; ``arguments``: on the arguments.
        frozen: the condition that frozen tensors are unchanged, or ``None``.
        reads: the recorded reads.
        sizes: reads the sizes of the argument tensors; ``None``: static shapes.
        has_default_device: whether calls run under a default device, which must not affect compiled code.
        settling: the writes of a first call into attributes and other objects; :meth:`match` performs them.
        is_later: whether the entry serves later calls only, since the first call differs and must run eager.
    """

    def __init__(
        self,
        module: nn.Module,
        captured: Captured,
        arguments: Sequence[torch.Tensor],
        numbers: Sequence[NumberPlace] = (),
        frozen: Collection[int] | None = None,
        exact_modes: bool = False,
        reads: Reads | None = None,
    ):
        self.reads = reads or captured.observation.reads or Reads({})
        self.numbers, self._device = tuple(numbers), captured.device
        attributes = {(place.path, place.name): place.kind for place in numbers if place.leaf is None}
        leaves = {place.leaf: place.kind for place in numbers if place.leaf is not None}
        requires_grad = any(tensor.requires_grad for tensor in (*captured.module_tensors, *arguments))
        requires_grad = requires_grad or bool(captured.given.followed)
        saves = torch.is_grad_enabled() and requires_grad
        self.tree = ModuleGuard(module, captured, saves=saves, numbers=attributes, reads=self.reads)
        asks = self.reads.mentions("is_grad_enabled", "is_inference_mode_enabled", "is_inference")
        exact = exact_modes or asks  # the code may depend on the mode
        self.modes = modes_as_now(requires_grad, exact, captured.observation.reads_validation, captured.device)
        self.settings = settings_as_now(captured.device) if captured.device.type == "cuda" else None
        self.has_default_device = isinstance(function_modes(), torch.device)
        kin = self.reads.kin
        self.arguments = ArgumentGuard(captured, arguments, module.forward, saves=saves, numbers=leaves, kin=kin)
        self.sizes, self.later = self.arguments.sizes, self.tree.reads.later
        owned, self.frozen = self.tree.tensors(module), None
        if frozen is not None:
            self.frozen = FrozenTensors(owned, [*map(str, captured.module_tensors)], frozen)
        self.inputs = self._input_guard(captured, owned, arguments)
        self.settling: Settling | None = None
        self.is_later = False

    def _input_guard(
        self, captured: Captured, owned: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor]
    ) -> InputGuard:
        """The conditions on all inputs together: module tensors, scalars, arguments."""
        numbers, paths, reads = self.numbers, self.arguments.paths, self.reads
        given = [*owned, *(None for _ in numbers), *arguments]
        names = [spec.name for spec in captured.module_tensors]
        names += [place.name or paths[place.leaf] for place in numbers]
        names += [paths[i] for i in self.arguments.tensor_leaves]

        def among(place: int) -> int:
            """A place among module tensors and arguments → the place among the inputs, scalars included."""
            return place + len(numbers) if place >= len(owned) else place

        asked = [(among(place), name) for place, name in reads.tensors.asked]
        compared = [among(place) for place in sorted(reads.tensors.identities)]
        written = [(index, captured.written_name(index)) for index, _ in captured.mutated]
        read = {draw.operand.of for draw in captured.draws if draw.operand is not None} - {None}
        addresses = {of: given[of].data_ptr() for of in sorted(read)}
        return InputGuard(
            names, written, TensorReads(given, names, asked, compared, [*reads.tensors.others.values()]), addresses
        )

    @cached_property
    def check(self) -> Check:
        """The generated check: a call → the inputs of the compiled code if it is exactly like the sample, else ``None``
        (:meth:`match` decides)."""
        source = CheckSource()
        self.modes.write(source, "modes")
        inference, guard = f"modes[{INFERENCE}]", source.name(self, "guard")
        source.refuse(f"not thorough and {guard}.settling is not None and not {guard}.settling.done")
        if self.settings is not None:
            self.settings.write(source, "settings")
        self.arguments.write(source, inference)
        self.tree.write(source, inference)
        if self.frozen is not None:
            holds = source.name(self.frozen.holds, "frozen tensors hold")
            failure = source.name(self.frozen.failure, "frozen tensor that changed")
            source.refuse(f"thorough != {_BUT_FROZEN} and not {holds}(owned)", f"{failure}(owned)")
        numbers = f"*{source.name(self._dynamic_scalars, 'numbers of')}(module, leaves), " if self.numbers else ""
        source.add(f"inputs = [*owned, {numbers}*tensors]")
        self.inputs.write(source)
        return source.returned("inputs")

    def match(self, call: SampleCall, changed: bool = False) -> list[torch.Tensor]:
        """The input tensors of the compiled code (module tensors, then arguments) if the call matches.

        ``changed``: frozen tensors may have changed.

        Raises:
            GuardFailure: names the first difference.
        """
        settling, thorough = self.settling, _BUT_FROZEN if changed else 1
        if settling is None or not settling.is_before():
            inputs = self.check(call.module, call.args, call.kwargs, thorough)
            if settling is not None:  # an eager call, or another entry's, has performed the writes
                settling.done = True
            return inputs
        for what in (item.place for item, then in settling.reads if item.differs(then)):
            raise GuardFailure(MODULE, f"{what} changed")  # the first call would write something else
        settling.do()
        try:
            return self.check(call.module, call.args, call.kwargs, thorough)
        except BaseException:
            settling.undo()
            raise

    def holds(self, call: SampleCall) -> bool:
        """Whether the call matches, without side effects."""
        try:
            with self.trial():
                self.match(call)
        except GuardFailure:
            return False
        return True

    @contextmanager
    def trial(self, settled: bool = False) -> Iterator[None]:
        """Context that undoes the writes of :meth:`match` to the user's objects at its end.

        ``settled``: performs the writes of a first call at its begin.
        """
        is_before = self.settling is not None and self.settling.is_before()
        try:
            if is_before and settled:
                self.settling.do()
            yield
        finally:
            if is_before:
                self.settling.undo()

    def renewed(self, call: SampleCall) -> tuple[EntryGuard, list[torch.Tensor]]:
        """A guard for the current values of the frozen tensors, and these tensors.

        Raises:
            GuardFailure: the call differs in more than frozen tensors.
        """
        tensors = self.match(call, changed=True)[: len(self.frozen.tensors)]
        found = copy(self)
        found.__dict__.pop("check", None)  # it checks the old values
        found.frozen, found.inputs = self.frozen.renewed(tensors), copy(self.inputs)
        return found, tensors

    def tensors(self, module: nn.Module) -> list[torch.Tensor]:
        """The module's current tensors, in the order of the inputs."""
        with self.trial(settled=True):
            return self.tree.tensors(module)

    def module_failure(self, module: nn.Module) -> GuardFailure | None:
        """The first condition on the module that fails, training flags aside."""
        with self.trial(settled=True):
            return self.tree.failure(module)

    def changed_numbers(self, call: SampleCall) -> dict[NumberPlace, Any] | None:
        """Place → compiled value of the scalars that differ.

        ``None`` if another constant or a size differs, or nothing does. Other conditions are not checked.
        """
        try:
            leaves = self.arguments.changed_numbers(call)
        except GuardFailure:
            return None
        attributes = self.tree.changed_numbers()
        if leaves is None or attributes is None or not (leaves or attributes) or self.reads.mentions("type"):
            return None
        if not self.arguments.sizes_fit(call):
            return None
        places = {NumberPlace(type(then), path=path, name=name): then for (path, name), then in attributes.items()}
        return {**places, **{NumberPlace(type(then), leaf=leaf): then for leaf, then in leaves.items()}}

    def _dynamic_scalars(self, module: nn.Module, leaves: Sequence[Any]) -> list[torch.Tensor]:
        given = (leaves[place.leaf] for place in self.numbers if place.leaf is not None)
        return [number_tensor(value, self._device) for value in (*self.tree.numbers(module), *given)]


def _refuse(source: CheckSource, asked: str, failure: Callable[[list[torch.Tensor]], GuardFailure | None]) -> None:
    """Writes a condition on the inputs, evaluated if the expression ``asked`` is true."""
    source.add(f"failure = {source.name(failure, failure.__name__)}(inputs) if {asked} else None")
    source.refuse("failure is not None", "failure")
