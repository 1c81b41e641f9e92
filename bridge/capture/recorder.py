"""Operator recorder: a dispatch mode around forward → the :class:`bridge.capture.rows.Record` of its operators.

The mode sees operators above autograd and autocast: ``aten.linear``, ``aten.dropout``, ``aten.lstm.input`` whole,
``detach``, views and writes in place as forward makes them. It changes nothing: the results are eager's.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from bridge.base.errors import Unsupported, UnsupportedModule, is_user_file, line_of
from bridge.base.modes import while_active
from bridge.base.threads import frame_of
from bridge.base.torch_autograd import no_torch_dispatch
from bridge.base.torch_internals import (
    MODULE_CALL,
    FakeTensor,
    aten,
    current_graph_task_id,
    innermost_transform,
    no_torch_function,
    schema,
)
from bridge.base.torch_recording import (
    PreDispatchMode,
    called_below,
    has_wrapper,
    is_below_autocast,
    is_only_mapped,
    no_python_kernels,
)
from bridge.capture.custom_functions import backward_running, function_running
from bridge.capture.distributed import DistributedTensors
from bridge.capture.opened import opening
from bridge.capture.prepared_twin import PreparedTwin
from bridge.capture.rows import (
    NumberRead,
    Record,
    Row,
    ValueRef,
    errors_noted,
    leaves_in,
    mapped,
    may_write,
    values_in,
    written_operands,
)
from bridge.capture.scalar_guards import ScalarGuard, frozen, line_of_reading, numbers_of
from bridge.capture.values import Replayed, Values, without_graph
from bridge.capture.whole_functions import SHAPES

if TYPE_CHECKING:
    from bridge.base.torch_internals import FakeTensorMode
    from bridge.capture.symbolic_run import Symbols


READS = {
    aten.item.default: "item",
    aten._local_scalar_dense.default: "item",
    aten.is_nonzero.default: "__bool__",
    aten.equal.default: "equal",
    aten.allclose.default: "allclose",
}
"""Operators that return a tensor's number to Python -> its name in :data:`bridge.capture.scalar_guards.numbers_of`."""
_OF_TWO = ("equal", "allclose")
"""Reads that compare two tensors; other reads take one number."""
_QUESTIONS = ("prim::device", "prim::layout", "aten::sym_size", "aten::sym_stride", "aten::sym_numel")
_QUESTIONS += ("aten::sym_storage_offset", "aten::is_contiguous", "aten::_version", "aten::dim", "aten::size")
"""Operators that return metadata: no rows."""
_OUTSIDE = PreparedTwin.__call__.__code__
"""The code of forward's caller."""


@cache
def _is_question(func: Any) -> bool:
    return func.name().partition(".")[0] in _QUESTIONS


def nested(op: str, where: str) -> Unsupported:
    """The refusal of an operator that takes or returns a nested tensor."""
    return Unsupported(
        op, where, "takes or gives a nested tensor: rows of several sizes", "pad the rows, and mask them"
    )


def _check(func: Any, results: Sequence[torch.Tensor], line: tuple[str, int] | None) -> None:
    """Raises :class:`UnsupportedModule` for a nested or quantized result."""
    if any(each.is_nested for each in results):
        raise UnsupportedModule("", [nested(str(func), line_of(line))])
    if any(each.is_quantized for each in results):
        reason, hint = "takes or gives a quantized tensor", "use torch.ao's fake quantization, in floats"
        raise UnsupportedModule("", [Unsupported(str(func), line_of(line), reason, hint)])


class OperatorRecorder(PreDispatchMode):
    """While active, records the operators that this thread calls.

    Args:
        inputs: the run's input tensors, in order; an object that occurs twice has its first position.
        paths: id of each module -> its dotted path.
        draws: the list of draws so far; rows note its length before and after.
        protected: receives tensors from elsewhere (``add``), and tensors before they are written (``note``).
        answers: in a fake run, the record of the real run, which has the numbers that forward reads.
        symbols: in a fake run on symbolic sizes, the manager of the symbols.
        mode: in a fake run that replays rows of ``answers``, the mode of its fake tensors.

    Attributes:
        record, draws: the record so far, and the draws.
        judge: in the real run, called with each operator, its tensors, the written ones and its results.
        asked: the name in :data:`bridge.capture.scalar_guards.numbers_of` of the number that the running function
            reads, if its operator reads another number.
        paused: whether operators run that are not forward's.
    """

    def __init__(
        self,
        inputs: Sequence[torch.Tensor],
        paths: dict[int, str],
        draws: Sequence[Any] = (),
        protected: Any = None,
        answers: Record | None = None,
        symbols: Symbols | None = None,
        mode: FakeTensorMode | None = None,
        differentiates: bool = False,
    ):
        super().__init__()
        self.record = Record(inputs=len(inputs), differentiates=differentiates)
        self._paths, self.draws, self._protected, self.answers = paths, draws, protected, answers
        self._symbols, self._replayed = symbols, None if mode is None else Replayed(answers, mode, self.record.fakes)
        self.asked: str | None = None
        self.paused, self._thread = False, get_ident()
        self.judge: Callable[[Any, Iterable, Iterable, Iterable], None] | None = None
        self._expected: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._openings: list[bool] = []
        met = (lambda tensor: None) if protected is None else protected.add
        self.values = Values(self.record, inputs, answers is None, self._replayed is not None, met)
        self.values.distributed = DistributedTensors(self)

    def protect(self, tensor: torch.Tensor) -> None:
        """Saves memory that is written without an operator, where the run does not own it."""
        if self._protected is not None:
            self._protected.note(tensor)

    def stand_for(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Gives a tensor that no row made the value of another tensor, whose numbers and memory it has."""
        self.values.note(tensor, self.values.of(value).number)

    def expect(self, tensor: torch.Tensor, fake: torch.Tensor) -> None:
        """In a fake run: sets the fake tensor for a real tensor from elsewhere."""
        self._expected[id(tensor)] = tensor, fake

    def _as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._expected.get(id(tensor), (None, tensor))[1]

    def has_read(self, tensor: torch.Tensor) -> bool:
        """Whether a row has read a tensor."""
        number = self.values.number_of(tensor)
        return any(number in values_in((row.args, row.kwargs)) for row in self.record.rows)

    def told(self, number: int) -> torch.Tensor:
        """In a fake run: the tensor for a value of the real run."""
        tensor = self.values.tensor_of(number)
        if tensor is None:
            self.values.of(tensor := self._as_fake(self.answers.free[number][0]))
        return tensor

    # Rows

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, is_mapped = kwargs or {}, innermost_transform() is not None
        if self.paused or _is_question(func):
            return func(*args, **kwargs)
        tensors = list(leaves_in((args, kwargs), torch.Tensor))
        if (it := self.values.distributed).concerns(tensors):
            return it.called(func, args, kwargs)
        if is_mapped:
            if not is_only_mapped():
                raise UnsupportedModule("", [_transform(self._place_of_call()[0])])
            if any(map(has_wrapper, tensors)):  # the calls below it, on plain tensors, become the rows
                with self:
                    return called_below(func, tensors, args, kwargs)
        if func in READS:
            return self._number(func, args, kwargs)
        if self.answers is not None and func is aten.contiguous.default and self._is_contiguous(*args, **kwargs):
            return args[0]  # for contiguous real tensors no operator runs
        place, before = self._place_of_call(), len(self.draws)
        grad = torch.is_grad_enabled() or function_running() is not None
        if func is aten.lift_fresh.default:  # eager returns the same tensor, fake mode another one
            return self._literal(func, args, kwargs)
        if self._expected or self.values.in_script:
            args, kwargs, tensors = self._in_fakes(args, kwargs, tensors)
        if self._openings and is_below_autocast():
            self._openings[:] = [True] * len(self._openings)
        operands = mapped(args, torch.Tensor, self.values.of), mapped(kwargs, torch.Tensor, self.values.of)
        if (it := self._symbols) and it.is_whole_slice(func, operands, args, self.record, self._answer()):
            return self._whole_slice(func, operands, args, (grad, (before, before), *place))
        if self._protected is not None and may_write(func):
            for tensor in leaves_in(written_operands(func, args, kwargs), torch.Tensor):
                self._protected.note(tensor)
        result, is_open = self._inside(func, tensors, args, kwargs)
        if is_open:
            return result
        if result is NotImplemented:
            with errors_noted(self.record, func, self.answers):
                if self.answers is None:
                    with nullcontext() if is_mapped else no_python_kernels():  # vmap puts them back
                        result = func(*args, **kwargs)
                else:
                    result = self._told(func, args, kwargs, operands, place[0])
        _check(func, [*leaves_in(result, torch.Tensor)], place[0])
        results = mapped(result, torch.Tensor, self.values.result)
        draws = before, len(self.draws)
        if (inside := backward_running()) is not None:
            if current_graph_task_id() != -1 and not torch.is_grad_enabled():
                inside.unheld = "runs autograd inside forward, whose result is a constant"
            elif draws[1] != before:
                inside.unheld = "draws random numbers"
        if is_mapped and draws[0] != draws[1]:
            reason = "draws inside of torch.vmap"
            raise UnsupportedModule("", [Unsupported(str(func), line_of(place[0]), reason, "draw before it")])
        if self.judge is not None:
            written = leaves_in(written_operands(func, args, kwargs), torch.Tensor) if may_write(func) else ()
            self.judge(func, tensors, written, leaves_in(result, torch.Tensor))
        self.record.rows.append(Row(func, *operands, results, grad, draws, *place))
        self.values.give_back()
        return result

    def _answer(self) -> Row | None:
        """The row of the real run at the position of the next row."""
        rows, place = self.answers.rows, len(self.record.rows) - len(self.record.same)
        return rows[place] if place < len(rows) else None

    def _is_contiguous(self, tensor: torch.Tensor, **memory_format: Any) -> bool:
        """Whether a fake tensor's real counterpart was contiguous already, so that the real run called no operator."""
        number, known = self.values.number_of(tensor), self._answer()
        number = self.record.same.get(number, number)
        is_made = known is not None and known.op is aten.contiguous.default and known.args[0] == ValueRef(number)
        if number is None or number >= len(self.answers.forms) or is_made:
            return False
        form = self.answers.forms[number]
        with no_torch_dispatch():
            return torch.empty_strided(form.shape, form.stride, device="meta").is_contiguous(**memory_format)

    def _told(self, func: Any, args: tuple, kwargs: dict[str, Any], operands: tuple, where: Any) -> Any:
        """Runs an operator on fake tensors, or replays the real run's row → its result."""
        known = self._answer()
        known = known if known and known.op is func and not self.record.raises(func, self.answers) else None
        if known is not None and type(known.results) is ValueRef and not may_write(func):
            for given, value in zip(args, operands[0], strict=True):
                if type(value) is ValueRef and self.record.same.get(value.number, value.number) == known.results.number:
                    return given  # an operator that does nothing returns its operand
        if self._symbols is None and innermost_transform() is not None:
            return func(*args, **kwargs)
        if known is not None and self._replayed is not None and self._replayed.gives[len(self.record.rows)]:
            return mapped(known.results, ValueRef, lambda value: self._replayed.tensor(value.number))
        if self._symbols is not None:
            result = self._symbols.result(func, args, kwargs, known, where)
        else:
            with no_python_kernels():
                result = NotImplemented if known is None else self._whole(func, args, kwargs, known)
                if result is NotImplemented:
                    result = func(*args, **kwargs)
        return result if known is None else _own_results(func, args, result, known)

    def _whole(self, func: Any, args: tuple, kwargs: dict[str, Any], known: Row) -> Any:
        """An operator that stays whole, on fake tensors → an empty result; ``NotImplemented`` for others."""
        made = SHAPES[func](*args, **kwargs) if func in SHAPES else NotImplemented
        if made is NotImplemented or not self.answers.forms[known.results.number].requires_grad:
            return made
        return made.requires_grad_().clone()

    # Opened operators

    def _inside(self, func: Any, tensors: Sequence, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, bool]:
        """Runs an operator that may be opened → (its result, whether the record has the operators that it called in its
        place); ``(NotImplemented, False)`` for other operators."""
        is_open = opening(func, tensors, args, kwargs, self.record.differentiates)
        if is_open is False and self.answers is not None:
            known = self._answer()
            is_open = True if known is not None and known.op is not func else None
        if is_open is None:
            return NotImplemented, False
        begun, first = self.values.begin(), len(self.record.forms)
        self._openings.append(is_open)
        keep = True  # the rows before an error stay
        try:
            with self:
                if self._symbols is not None and (formula := self._symbols.inside(func)) is not None:
                    result = formula(*args, **kwargs)
                else:
                    result = called_below(func, tensors, args, kwargs)
            keep = self._openings[-1]
            if self.record.differentiates:
                own = {self.values.of(each).number for each in leaves_in(result, torch.Tensor)}
                keep = keep or not own.issuperset(range(first, len(self.record.forms)))
        finally:
            self._openings.pop()
            self.values.end(begun, keep=keep)
        return result, keep

    def _whole_slice(self, func: Any, operands: tuple, args: tuple, rest: tuple) -> torch.Tensor:
        """Records a slice that spans the whole tensor at the sample's sizes; the real run has no row for it."""
        record, (whole, *_) = self.record, operands[0]
        if self.record.differentiates and args[2:4] == (0, sys.maxsize) and args[4:] in ((), (1,)):  # of any size
            return args[0]  # eager has no derivative of it
        result = func(*args)
        number = -1 - len(record.same)
        record.same[number] = record.same.get(whole.number, whole.number)
        record.fakes[number] = without_graph(result)
        self.values.note(result, number)
        record.rows.append(Row(func, *operands, ValueRef(number), *rest))
        return result

    def line(self) -> str:
        """The user's line that runs, for a refusal."""
        return line_of(self._place_of_call()[0])

    # Readings

    def _number(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs or answers an operator that reads a number of a tensor → its Python value."""
        name, self.asked = self.asked or READS[func], None
        if not isinstance(args[0], torch.Tensor):  # a constant of a TorchScript graph
            return args[0]
        if name not in _OF_TWO and args[0].numel() != 1:
            return func(*args, **kwargs)  # eager's error
        with torch.no_grad(), self:
            numbers = numbers_of[name](*args, **kwargs)
        if numbers is None:
            return False
        return self.read(numbers, lambda: func(*args, **kwargs))

    def read(
        self,
        numbers: torch.Tensor,
        value: Callable[[], Any],
        given: Callable[[Any], Any] = lambda value: value,
        **size: bool,
    ) -> Any:
        """Notes that forward reads numbers → the Python value that the real run found.

        Args:
            numbers: a tensor of the numbers, which is never written.
            value: returns the numbers; called in the real run.
            given: the numbers → the Python value, which the fake run returns as well.
            size: as in :class:`bridge.capture.scalar_guards.ScalarGuard`.

        Raises:
            UnsupportedModule: in the fake run: the real run read something else.
        """
        if (inside := backward_running()) is not None:
            inside.unheld = "reads a number"
        number, reads = self.values.of(numbers), self.record.reads
        where, count = line_of_reading(), numbers.numel()
        form = numbers.dtype, count if self._symbols is None else self._symbols.fixed(count, where)
        if self.answers is None:
            with self.pause():
                with no_torch_function():
                    found = value()
                    told = given(found)
                reads.append(NumberRead(ScalarGuard(where, *form, frozen(found), **size), number, told))
        else:
            expected = self.answers.reads[len(reads)] if len(reads) < len(self.answers.reads) else None
            if expected is None or (expected.reading.dtype, expected.reading.count) != form:
                reason, hint = (
                    "forward reads other numbers on fake tensors than on real ones",
                    "do not let it depend on numbers",
                )
                raise UnsupportedModule("", [Unsupported("a number that forward reads", where, reason, hint)])
            reads.append(expected._replace(numbers=number))
            if self._symbols is not None and self._symbols.counts is not None:
                return self._symbols.counts.given(len(reads) - 1, expected.given)
        return copy.copy(reads[-1].given)

    def pause(self) -> AbstractContextManager[None]:
        """While active, operators are not recorded."""
        return while_active(self, paused=True)

    def _literal(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Lifts a tensor of numbers in the code, and records its numbers."""
        result = func(*args, **kwargs)
        if self.values.number_of(result) is None:
            number = self.values.new(result, made=True)
            self.record.literals[number] = args[0].clone() if self.answers is None else args[0]
        return result

    def _in_fakes(self, args: tuple, kwargs: dict[str, Any], tensors: list) -> tuple[tuple, dict[str, Any], list]:
        if self.values.in_script:
            self.adopt(tensors)
        args, kwargs = mapped(args, torch.Tensor, self._as_fake), mapped(kwargs, torch.Tensor, self._as_fake)
        return args, kwargs, list(map(self._as_fake, tensors))

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Records tensors of a TorchScript function that no operator made as tensors of numbers in the code."""
        for tensor in tensors:
            is_new = self.values.number_of(self._as_fake(tensor)) is None
            if is_new and (lifted := self._literal(aten.lift_fresh.default, (tensor,), {})) is not tensor:
                self.expect(tensor, lifted)

    def _place_of_call(self) -> tuple[tuple[str, int] | None, str]:
        """The user's line, and the path of the innermost module that runs."""
        if self.answers is not None and self._symbols is None and (known := self._answer()) is not None:
            return known.where, known.path  # the walk would double the time of a row
        where, path = None, None
        frame: FrameType | None = frame_of(self._thread) or sys._getframe(2)
        while frame is not None and (where is None or path is None):
            code = frame.f_code
            if code is _OUTSIDE:
                break
            if path is None and code is MODULE_CALL:
                path = self._paths.get(id(frame.f_locals["self"]))
            if where is None and is_user_file(code.co_filename):
                where = code.co_filename, frame.f_lineno
            frame = frame.f_back
        return where, path or ""


def _transform(where: tuple[str, int] | None) -> Unsupported:
    hint = "dispatch the submodules whose derivatives forward does not take, or leave this module to PyTorch"
    return Unsupported(
        "torch.func or forward_ad", line_of(where), "a transform (vmap, grad, jacrev, …) inside forward", hint
    )


def _own_results(func: Any, args: tuple, result: Any, known: Row) -> Any:
    """The results of an operator on fake tensors, with clones for operands that torch's formula returns although the
    operator makes new tensors; ``known``: the operator's row in the real run."""
    if type(result) is FakeTensor and not any(each is result or type(each) in (list, tuple) for each in args):
        return result
    given = set(map(id, leaves_in(args, torch.Tensor)))
    if not any(id(each) in given for each in leaves_in(result, torch.Tensor)):
        return result
    if any(each.alias_info for each in schema(func).returns):
        return result
    if not set(values_in(known.results)).isdisjoint(values_in(known.args)):
        return result
    return mapped(result, torch.Tensor, lambda each: each.clone() if id(each) in given else each)
