"""Values of a run: a tensor → its number in the :class:`bridge.capture.rows.Record`; a value → a new fake tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from bridge.base.collector import give_back_pages
from bridge.base.devices import HOST
from bridge.base.torch_autograd import apply_function, no_torch_dispatch
from bridge.base.torch_fakes import fake_of, fake_state, meta_tensor, outside_graph
from bridge.base.torch_internals import FakeTensor, FakeTensorMode, innermost_transform, set_version_counters
from bridge.base.torch_recording import has_wrapper
from bridge.capture.rows import Record, ValueRef, form_of, memory_of, values_in, written

_HOLES = 2**26
"""Bytes that rows allocate between two returns of free memory to the system."""


class Values:
    """The values of a record under construction.

    Args:
        inputs: the run's input tensors, in order; an object that occurs twice has its first position.
        real: whether it is the real run; else tensors stay alive, and the record keeps the fake tensors.
        replays: whether the record leaves out rows' fake tensors, because their metadata describes them.
        met: called with each tensor from elsewhere.

    Attributes:
        distributed: the run's distributed tensors.
        in_script: whether a TorchScript function runs, whose tensors of numbers no operator makes.
    """

    distributed: Any
    in_script = False

    def __init__(
        self,
        record: Record,
        inputs: Sequence[torch.Tensor],
        real: bool,
        replays: bool,
        met: Callable[[torch.Tensor], None],
    ):
        self._record, self._real, self._replays, self._met = record, real, replays, met
        self._known: dict[int, tuple[Any, int]] = {}
        self._made: dict[tuple, tuple[Any, int]] = {}
        self._memory: dict[int, tuple[Any, int]] = {}
        self._puts: list[tuple[dict, Any]] = []
        self._kept: list[torch.Tensor] = []
        self._allocated = 0
        for tensor in inputs:
            self.new(tensor, once=False)

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The value of a tensor; ``None`` for a tensor that no row has seen."""
        found = self._known.get(id(tensor))
        if found is not None and found[0]() is tensor:
            return found[1]
        same = self._made.get(place := _place(tensor))  # Python may hold a shallow copy of a factory's result
        if same is None and len(place) > 1 and tensor.requires_grad and tensor.is_leaf:  # requires_grad was turned on
            same = self._made.get((place[0], False, place[2]))
        if same is not None and not same[0].expired():
            self.note(tensor, same[1])
            return same[1]
        return None

    def tensor_of(self, number: int) -> torch.Tensor | None:
        """A living tensor of a value, or ``None``."""
        held = (each() for each, value in self._known.values() if value == number)
        return next((each for each in held if each is not None), None)

    def new(self, tensor: torch.Tensor, *, once: bool = True, made: bool = False, of_row: bool = False) -> int:
        """Records a new value for a tensor → its number."""
        record, number, form, memory = self._record, len(self._record.forms), form_of(tensor), memory_of(tensor)
        record.forms.append(form)
        first = None, -1 - number
        if memory is not None:  # the first value in this memory
            first = self._memory.get(memory)
            if first is None or first[0].expired():
                storage = tensor.untyped_storage()
                first = self._put(self._memory, memory, StorageWeakRef(storage), number)
                if self._real and form.device == HOST:
                    self._allocated += storage.nbytes()
        record.memory.append(first[1])
        if once or id(tensor) not in self._known:
            self.note(tensor, number)
        if made and memory is not None and tensor.layout is torch.strided:
            known = self._made.get(place := (memory, form.requires_grad, form[:4]))
            if known is None or known[0].expired():
                self._put(self._made, place, first[0], number)
        if not (self._real or (of_row and self._replays and has_form(tensor))):
            record.fakes[number] = without_graph(tensor)
        return number

    def note(self, tensor: torch.Tensor, number: int) -> None:
        """Notes that a tensor has a value."""
        self._put(self._known, id(tensor), weakref.ref(tensor), number)
        if not self._real:
            self._kept.append(tensor)

    def of(self, tensor: torch.Tensor) -> ValueRef:
        """The value of an operand; a tensor that no row has seen becomes a free value."""
        number = self.number_of(tensor)
        if number is None:
            number = self.new(tensor)
            self._kept.append(tensor)
            self._record.free[number] = tensor, len(self._record.rows)
            self._met(tensor)
        return ValueRef(number)

    def result(self, tensor: torch.Tensor) -> ValueRef:
        """The value of a row's result; an operand that is returned keeps its value."""
        found = self._known.get(id(tensor))
        if found is None or found[0]() is not tensor:
            return ValueRef(self.new(tensor, made=True, of_row=True))
        if len(place := _place(tensor)) > 1 and place not in self._made:  # autograd tracks it from now on
            self._put(self._made, place, StorageWeakRef(tensor.untyped_storage()), found[1])
        return ValueRef(found[1])

    def give_back(self) -> None:
        """Returns free memory to the system, once per ``_HOLES`` bytes that rows allocate."""
        if self._allocated > _HOLES:
            self._allocated = 0
            give_back_pages()

    # Attempts

    def begin(self) -> list[int]:
        """Begins an attempt, which may be rolled back → the token for :meth:`end`."""
        record = self._record
        return [len(each) for each in (self._puts, record.rows, record.forms, record.memory, record.reads)]

    def end(self, begun: list[int], *, keep: bool) -> None:
        """Ends an attempt: keeps its rows and values, or removes them."""
        if keep:
            return
        record, (count, *lengths) = self._record, begun
        for each, length in zip((record.rows, record.forms, record.memory, record.reads), lengths, strict=True):
            del each[length:]
        first = lengths[1]
        for table, key in self._puts[count:]:
            if key in table and table[key][1] >= first:
                del table[key]
        del self._puts[count:]
        for known in (record.free, record.literals):
            for number in [number for number in known if number >= first]:
                del known[number]

    def _put(self, table: dict, key: Any, held: Any, number: int) -> tuple[Any, int]:
        table[key] = held, number
        self._puts.append((table, key))
        return table[key]


def _place(tensor: torch.Tensor) -> tuple:
    """A key that a tensor shares with its shallow copies: memory, ``requires_grad``, layout and dtype."""
    memory = memory_of(tensor)
    if memory is None or tensor.layout is not torch.strided:
        return (id(tensor),)
    return memory, tensor.requires_grad, form_of(tensor)[:4]


def without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor, detached from autograd's graph."""
    if type(tensor) is FakeTensor and tensor.layout is torch.strided and innermost_transform() is None:
        return outside_graph(tensor)
    with torch.no_grad():
        return tensor.detach() if not has_wrapper(tensor) else tensor


# Replay: the record of the real run → a fake run that makes the results of expected rows without running them.
#
# Where the fake run calls an operator as the next row of the real run did, the record has the metadata of its results.
# Making a fake tensor from that metadata takes a tenth of the time of a run. The tensor has eager's strides, also where
# a fake run cannot tell them.


class _MadeOf(torch.autograd.Function):
    """Stands in autograd's graph for an operator that did not run."""

    @staticmethod
    def forward(ctx: Any, made: Any, source: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return made()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise RuntimeError("made for the layouts alone")


class Replayed:
    """Fake tensors for the results of a record's rows, where no row writes their memory.

    Args:
        fakes: fake tensors of its inputs and of other tensors that no row made, by their values.

    Attributes:
        gives: for each row, whether its results are new tensors that metadata and memory describe fully.
    """

    def __init__(self, record: Record, mode: FakeTensorMode, fakes: dict[int, torch.Tensor]):
        self.gives: list[bool] = []
        self._record, self._layouts = record, _Layouts(record, mode, fakes)
        forms, memory, last = record.forms, record.memory, record.inputs - 1
        others = {memory[number] for row in record.rows for number in values_in(written(row))}
        others.update(memory[n] for n, form in enumerate(forms) if memory[n] < 0 or form.is_conj or form.is_neg)
        for row in record.rows:
            numbers = list(values_in(row.results))
            is_new = bool(numbers) and min(numbers) > last and not written(row)
            self.gives.append(is_new and others.isdisjoint([memory[number] for number in numbers]))
            last = max(last, *numbers, -1)
        with mode:
            self._source = torch.empty((), requires_grad=True)

    def tensor(self, number: int) -> torch.Tensor:
        """A new fake tensor for a value, with an autograd node if the value requires grad."""
        made = self._layouts.tensor(number)
        if self._record.forms[number].requires_grad:
            with no_torch_dispatch():  # saves the modes' dispatch for queries of devices
                (made,) = apply_function(_MadeOf, (lambda: (made,), self._source), {})
        return made


class _Layouts:
    """New fake tensors for values of a record: with their metadata, sharing memory as the values do."""

    def __init__(self, record: Record, mode: FakeTensorMode, fakes: dict[int, torch.Tensor]):
        self._record, self._mode, self._fakes = record, mode, fakes
        self._bases: dict[int, torch.Tensor] = {}
        self._states: dict[torch.device, dict[str, Any]] = {}

    def tensor(self, number: int) -> torch.Tensor:
        form, memory = self._record.forms[number], self._record.memory[number]
        state = self._states.get(form.device)
        if state is None:
            state = self._states[form.device] = fake_state(self._mode, form.device)
        base = self._bases.get(memory, self._fakes.get(memory))
        made = meta_tensor(form, base)
        set_version_counters((made,), (0 if base is None else base._version,))  # a view has its base's
        if base is None:
            self._bases[memory] = made
        return fake_of(made, form.device, state)


def fakes_of(
    record: Record, mode: FakeTensorMode, fakes: dict[int, torch.Tensor], values: Iterable[int]
) -> dict[int, torch.Tensor]:
    """``fakes``, extended by new fake tensors for the other ``values`` of a record."""
    layouts = _Layouts(record, mode, fakes)
    return {**fakes, **{number: layouts.tensor(number) for number in values if number not in fakes}}


def has_form(tensor: torch.Tensor) -> bool:
    """Whether layout and memory describe a tensor fully, its numbers aside."""
    return tensor.layout is torch.strided and memory_of(tensor) is not None
