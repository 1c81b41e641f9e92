"""Replay: the record of the real run → a fake run that makes the results of expected rows without running them.

Where the fake run calls an operator as the next row of the real run did, the record has the metadata of its results.
Making a fake tensor from that metadata takes a tenth of the time of a run. The tensor has eager's strides, also where a
fake run cannot tell them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from bridge.base.torch_autograd import apply_function, no_torch_dispatch
from bridge.base.torch_fakes import fake_of, fake_state, meta_tensor
from bridge.base.torch_internals import FakeTensorMode
from bridge.capture.rows import Record, memory_of, values_in, written

__all__ = ["Replayed", "fakes_of", "has_form"]


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
