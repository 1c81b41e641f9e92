"""Number reader: what forward reads in the first capture → recorded in an eager run, replayed while it is traced.

Python code that reads a number goes on as that number tells it to. So a trace holds for calls that read the same
numbers. They are recorded in an eager run on the sample, given to the code while it is traced, and become results of
the traced graph, which a compiled call compares with what was recorded (:mod:`bridge.aten.number_checks`).

The functions that read are replaced while they are needed, for the capturing thread alone. What torch's own tracers
read on their way is theirs.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

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
from bridge.capture.counted_sizes import COUNTS, FORMS
from bridge.capture.module_calls import forward_here
from bridge.capture.packed import PackedSequences
from bridge.capture.patched_globals import here_only
from bridge.capture.plain_assert import plain_assert
from bridge.capture.readings import Reading, ReadsDifferError, frozen, numbers_of, thawed
from bridge.capture.split_at_numbers import SplitAtNumbers
from bridge.capture.tracing import HERE

__all__ = ["NumberReader", "given", "numbers_read", "reading"]


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
            numbers = numbers_of[name](*args, **kwargs)
        if numbers is None:  # its answer depends on shapes alone
            return False
        where, form = _place(sys._getframe(2)), (numbers.dtype, numbers.numel())
        if self._expected is None:
            self.readings.append(Reading(where, *form, frozen(value), name in COUNTS, name == "bins"))
        else:
            position = len(self.readings)
            recorded = self._expected[position] if position < len(self._expected) else None
            if recorded is None or (recorded.dtype, recorded.count) != form:
                raise ReadsDifferError(where)
            self.readings.append(recorded)
        self.tensors.append(numbers)
        return thawed(self.readings[-1].value)

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


class _Forms(TorchFunctionMode):
    """While forward is traced: counted sizes and packed sequences."""

    def __init__(self, packed: PackedSequences):
        super().__init__()
        self._packed = packed

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def call(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
            form = FORMS.get(func)
            made = NotImplemented if form is None else form(_outside_torch_function, *args, **kwargs)
            return func(*args, **kwargs) if made is NotImplemented else made

        return self._packed.called(call, func, args, kwargs or {})


def _outside_torch_function(name: str, x: torch.Tensor) -> int:
    with no_torch_function():  # it is no call of forward's
        return _counted(name, x)


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
            packed = PackedSequences(_counted)
            with _Forms(packed):
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


def _place(frame: Any) -> str:
    """The user's line inside forward, or torch's own where forward is torch's."""
    innermost = frame
    while frame is not None and frame.f_code.co_name != "read_by":
        if is_user_file(frame.f_code.co_filename):
            innermost = frame
            break
        frame = frame.f_back
    line = line_of((innermost.f_code.co_filename, innermost.f_lineno))
    return line[len(TORCH_DIR) - len("torch") :] if line.startswith(TORCH_DIR) else line
