"""Replay: the record of the real run → a fake run that makes the results of expected rows without running them.

One of torch's functions chooses its operators by its constants, the metadata of its tensors, the modes, and the numbers
that it reads, which are recorded. So a function that read no number in the real run calls the same operators for equal
arguments in the fake run, and the record has the metadata of their results. Making a fake tensor from that metadata
takes a tenth of the time of a run. The tensor has eager's strides, also where a fake run cannot tell them.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional as F

from bridge.base.torch_autograd import apply_function, no_torch_dispatch
from bridge.base.torch_fakes import fake_of, fake_state, meta_tensor
from bridge.base.torch_internals import FakeTensorMode
from bridge.capture.replaced_functions import functions_of_torch, replacements
from bridge.capture.rows import CONSTANTS, FunctionCall, Record, ValueRef, mapped, memory_of, values_in, written

__all__ = ["FunctionReplay", "Replayed", "fakes_of", "has_form"]

_COMPARED = frozenset((*CONSTANTS, torch.Size, type(Ellipsis), torch.Generator))
_IN_C = (type(torch.sigmoid), type(torch.Tensor.add), type(torch.Tensor.__add__))


class FunctionReplay:
    """Calls of torch's functions by forward: noted in the real run, replayed in the fake run.

    Attributes:
        own: a context for code of this package that stands for a function, in which a user's replacements are not seen.
    """

    def __init__(self, recorder: Any) -> None:
        self._replaced = found = replacements()
        self._recorder, self.own = recorder, partial(functions_of_torch, found) if found else nullcontext

    def may_call_replacement(self, func: Any) -> bool:
        """Whether a function in Python (``F.ctc_loss``) calls one of this name that the user has replaced."""
        return type(func) is FunctionType and func.__name__ in self._replaced.get(torch, ())

    def call(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Calls or replays ``func(*args, **kwargs)`` → its result."""
        recorder, record = self._recorder, self._recorder.record
        is_torchs = type(func) in _IN_C or getattr(func, "__module__", "") == F.__name__
        modes = recorder.modes() if is_torchs else None
        if modes is None:
            return func(*args, **kwargs)
        if recorder.answers is not None:
            known, made = recorder.answers.calls.get(len(record.rows)), NotImplemented
            if known is not None and known.func is func and known.modes == modes:
                made = recorder.replay(known) if self._is_same((args, kwargs), known.given) else NotImplemented
            return func(*args, **kwargs) if made is NotImplemented else made
        start, first, before = len(record.rows), len(record.forms), _sizes(record)
        result = func(*args, **kwargs)
        if len(record.rows) > start and _sizes(record) == before:
            self._note(record, start, first, (func, args, kwargs), modes, result)
        return result

    def _note(self, record: Record, start: int, first: int, called: tuple, modes: tuple, result: Any) -> None:
        """Notes a call that made rows, if its result is one or several distinct new tensors."""
        kind, number_of = None if type(result) is torch.Tensor else type(result), self._recorder.values.number_of
        results = [result] if kind is None else result
        if not (kind is None or issubclass(kind, tuple | list)) or {*map(type, results)} != {torch.Tensor}:
            return
        numbers = [number_of(each) for each in results]
        if any(number is None or number < first for number in numbers) or len(set(numbers)) < len(numbers):
            return
        func, args, kwargs = called
        given = mapped((args, kwargs), torch.Tensor, lambda tensor: ValueRef(number_of(tensor)))
        record.calls[start] = FunctionCall(
            func, given, modes, len(record.rows), first, len(record.forms), kind, numbers
        )

    def _is_same(self, given: Any, known: Any) -> bool:
        """Whether arguments equal a noted call's: the same constants and values."""
        if isinstance(given, torch.Tensor):
            number = self._recorder.values.number_of(given)
            return type(known) is ValueRef and known.number == number is not None
        kind = type(given)
        if kind is not type(known):
            return False
        if kind is tuple or kind is list:
            return len(given) == len(known) and all(map(self._is_same, given, known))
        if kind is dict:
            return list(given) == list(known) and all(map(self._is_same, given.values(), known.values()))
        if kind is slice:
            return self._is_same((given.start, given.stop, given.step), (known.start, known.stop, known.step))
        return repr(given) == repr(known) if kind is float else kind in _COMPARED and given == known


def _sizes(record: Record) -> list[int]:
    """The numbers of reads, literals and free tensors in a record, which a call may add to."""
    return [len(each) for each in (record.reads, record.literals, record.free)]


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
