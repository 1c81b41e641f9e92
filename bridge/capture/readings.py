"""Readings: numbers that forward takes out of tensors (``bool``, ``.item()``, ``torch.equal``) → recorded, replayed.

Python code that reads a number goes on as that number tells it to. So a trace holds for calls that read the same
numbers. They are recorded in an eager run on the sample, given to the code while it is traced, and become results of
the traced graph, which a compiled call compares with what was recorded (:mod:`bridge.aten.number_checks`).

The functions that read are replaced while they are needed, for the capturing thread alone. What torch's own tracers
read on their way is theirs.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bridge.base.errors import TORCH_DIR, is_user_file, line_of
from bridge.base.modes import modes_put_back
from bridge.base.replaced import replaced
from bridge.base.torch_internals import (
    ASSERT,
    FOR_SLICES,
    TRACER_MODULES,
    FakeTensor,
    FunctionalTensor,
    compiling_flags,
    no_torch_function,
)
from bridge.capture.copied_call import copied_call
from bridge.capture.counted_sizes import COUNTS, CountedSizes
from bridge.capture.module_calls import forward_here
from bridge.capture.packed import PackedSequences
from bridge.capture.patched_globals import here_only
from bridge.capture.plain_assert import plain_assert
from bridge.capture.split_at_numbers import SplitAtNumbers
from bridge.capture.tracing import HERE

__all__ = ["NumberReader", "Reading", "ReadsDifferError", "given", "numbers_read", "reading", "same_numbers"]


class ReadsDifferError(Exception):
    """A traced forward reads other numbers than the eager run did."""


@dataclass(frozen=True)
class Reading:
    """A number, or a list of them, that forward read.

    Attributes:
        where: ``file:line: code``, the user's line if there is one.
        dtype: of the numbers as they are compared: a flag is ``torch.bool`` whatever it was read from.
        count: how many.
        value: what Python got, lists as tuples.
        is_size: whether a result is as long as the number says (:mod:`bridge.capture.counted_sizes`).
        is_least: whether that is mostly the least length that was asked for, which other calls have as well.
    """

    where: str
    dtype: torch.dtype
    count: int
    value: Any
    is_size: bool = False
    is_least: bool = False

    @property
    def key(self) -> tuple:
        """Equal only for the same numbers read at the same line; zeros have a sign, and nan is nan."""
        return self.where, self.dtype, self.count, repr(self.value)


class NumberReader:
    """Answers forward's questions for numbers.

    Args:
        expected: what an eager run read, to be given again; ``None`` in an eager run.

    Attributes:
        readings: what was read, in order.
        tensors: the numbers of each reading, a copy.
    """

    def __init__(self, expected: Sequence[Reading] | None = None):
        self._expected = expected
        self.restart()

    def restart(self) -> None:
        """To be called where forward begins."""
        self.readings: list[Reading] = []
        self.tensors: list[torch.Tensor] = []

    def read(self, name: str, original: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """What ``original(*args, **kwargs)`` reads."""
        value = original(*args, **kwargs) if self._expected is None else None
        with no_torch_function():  # it is no call of forward's
            numbers = _NUMBERS[name](*args, **kwargs)
        if numbers is None:  # its answer depends on shapes alone
            return False
        where, form = _place(sys._getframe(2)), (numbers.dtype, numbers.numel())
        if self._expected is None:
            self.readings.append(Reading(where, *form, _frozen(value), name in COUNTS, name == "bins"))
        else:
            position = len(self.readings)
            recorded = self._expected[position] if position < len(self._expected) else None
            if recorded is None or (recorded.dtype, recorded.count) != form:
                raise ReadsDifferError(where)
            self.readings.append(recorded)
        self.tensors.append(numbers)
        return _thawed(self.readings[-1].value)

    def finish(self) -> None:
        """Raises :class:`ReadsDifferError` if forward has not read all that was expected."""
        if self._expected is not None and len(self.readings) != len(self._expected):
            raise ReadsDifferError(self._expected[len(self.readings)].where)


def numbers_read(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[Reading, ...]:
    """What ``module.forward`` reads in eager, in the branches that tracing takes; nothing where it raises there.

    It runs on copies (:func:`bridge.capture.copied_call.copied_call`).
    """
    reader = NumberReader()
    try:
        with copied_call(module, args, kwargs) as (call, _), modes_put_back(), compiling_flags(HERE):
            with reading(module, reader):
                call()
    except Exception:  # noqa: BLE001 - the user's code; the refusal that follows says what stood in the way
        return ()
    return tuple(reader.readings)


_thread = threading.local()


@contextmanager
def reading(module: nn.Module, reader: NumberReader, *, returned: bool = False) -> Iterator[None]:
    """While active, what ``module.forward`` reads in this thread goes through ``reader``.

    Args:
        returned: whether forward returns ``(result, reader.tensors)`` instead of its result.
    """
    forward = module.forward

    @functools.wraps(forward)
    def read_by(*args: Any, **kwargs: Any) -> Any:
        reader.restart()
        outer, _thread.reader = getattr(_thread, "reader", None), reader
        try:
            with CountedSizes(_counted), PackedSequences(_counted) as packed:
                result = forward(*args, **kwargs)
            packed.refuse(result)
        finally:
            _thread.reader = outer
        reader.finish()
        return (result, tuple(reader.tensors)) if returned else result

    with ExitStack() as stack:
        for owner, names in _READERS:
            readers = {name: _through_reader(getattr(owner, name), name) for name in names}
            stack.enter_context(replaced(owner, **readers))
        stack.enter_context(replaced(torch, **{ASSERT: here_only(plain_assert, getattr(torch, ASSERT))}))
        stack.enter_context(forward_here(module, read_by))
        stack.enter_context(SplitAtNumbers())
        yield


def given(module: nn.Module, readings: Sequence[Reading], *, returned: bool = False) -> AbstractContextManager:
    """:func:`reading`, with what forward read in eager; nothing where it has read nothing."""
    return reading(module, NumberReader(readings), returned=returned) if readings else nullcontext()


def _through_reader(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(*args: Any, **kwargs: Any) -> Any:
        reader = getattr(_thread, "reader", None)
        if reader is None or _is_tracer(sys._getframe(1)):
            return original(*args, **kwargs)
        _thread.reader = None
        try:
            return reader.read(name, original, args, kwargs)
        finally:
            _thread.reader = reader

    return read


def _counted(name: str, x: torch.Tensor) -> int:
    """A number of :data:`COUNTS`, through the reader of this thread."""
    reader = _thread.reader
    if reader is None:  # inside of a reading
        return int(COUNTS[name](x))
    _thread.reader = None
    try:
        return reader.read(name, lambda x: int(COUNTS[name](x)), (x,), {})
    finally:
        _thread.reader = reader


def _is_tracer(frame: Any) -> bool:
    name = frame.f_globals.get("__name__", "")
    return name.startswith(_NOT_FORWARDS) and name not in _IN_FORWARDS_PLACE


#: Modules whose own reading is no part of what forward computes: torch's tracers, its printing, this package.
_NOT_FORWARDS = (*TRACER_MODULES, "bridge.")
_IN_FORWARDS_PLACE = (FOR_SLICES, plain_assert.__module__, SplitAtNumbers.__module__)
_METHODS = ("item", "__bool__", "__int__", "__float__", "__index__", "tolist", "is_nonzero", "equal", "allclose")
_READERS = (
    (torch.Tensor, _METHODS),
    (FakeTensor, ("tolist",)),
    (FunctionalTensor, ("tolist", "__bool__")),
    (torch, ("equal", "allclose", "is_nonzero")),
)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()  # what is read, even if it is written later


def _flag(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.dtype is torch.bool else tensor != 0


def _integer(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.int64) if tensor.is_floating_point() else tensor.clone()


def _equal(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    return (one == other).all() if one.shape == other.shape else None


def _allclose(one: torch.Tensor, other: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    return torch.isclose(one, other, *rest, **options).all()


#: What each function reads: its arguments → the numbers that decide about its answer.
_NUMBERS: dict[str, Callable[..., torch.Tensor | None]] = {
    "item": _plain,
    "tolist": _plain,
    "__float__": _plain,
    "__index__": _plain,
    "__int__": _integer,
    "__bool__": _flag,
    "is_nonzero": _flag,
    "equal": _equal,
    "allclose": _allclose,
    **COUNTS,
}


def same_numbers(some: Sequence[Reading], others: Sequence[Reading]) -> bool:
    """Whether two runs read the same, bit by bit."""
    return [reading.key for reading in some] == [reading.key for reading in others]


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _thawed(value: Any) -> Any:
    return list(map(_thawed, value)) if isinstance(value, tuple) else copy.copy(value)


def _place(frame: Any) -> str:
    """The user's line inside forward, or torch's own where forward is torch's."""
    innermost = frame
    while frame is not None and frame.f_code.co_filename != __file__:
        if is_user_file(frame.f_code.co_filename):
            innermost = frame
            break
        frame = frame.f_back
    line = line_of((innermost.f_code.co_filename, innermost.f_lineno))
    return line[len(TORCH_DIR) - len("torch") :] if line.startswith(TORCH_DIR) else line
