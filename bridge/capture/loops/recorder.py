"""Recorder of calls: modes under which forward runs on its sample -> the rows of :mod:`bridge.capture.loops.calls`.

Recorded are calls of torch functions whose results are tensors, and writes into parts of tensors that forward makes
for that. Whatever else could have a part in what forward computes ends the recording: a number taken out of a tensor,
another write, a draw beside dropout's and its like, another grad mode, a tensor of unknown origin, an argument that
cannot be compared. Numbers that say only what a tensor is like (its shape) are constants of the call, as they are
wherever sizes do not vary.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bridge.base.devices import HOST, TYPES
from bridge.base.interrupts import raise_deferred
from bridge.base.torch_autograd import no_torch_dispatch
from bridge.base.torch_internals import len_dispatch_stack
from bridge.capture.autograd_uses import state_of_autograd, use_of_autograd
from bridge.capture.draw_recorder import DrawRecorder
from bridge.capture.loops.arguments import Arguments, NotComparedError, Told, key_of, leaves_of
from bridge.capture.loops.calls import (
    HERE,
    Call,
    Calls,
    Form,
    Kind,
    Made,
    Part,
    Value,
    numbered,
    part_of,
    part_written,
)
from bridge.capture.loops.functions import DRAWING, METADATA, NEVER, VIEWS
from bridge.capture.loops.in_place import keeps_form, out_of_place
from bridge.capture.loops.uncomputed import Answer, Like, Uncomputed
from bridge.capture.loops.writes import Writes
from bridge.capture.observation import Draw

__all__ = ["CallRecorder", "NotRecordedError"]


class NotRecordedError(Exception):
    """A call cannot be recorded: why."""


_BETWEEN_INTERRUPTS = 64
"""Calls after which the user's interrupt is looked for."""

_SMALL, _EACH = 1 << 24, 1 << 18
"""Elements that all results may have together: so many, and so many more for each call. Beyond, recording may take as
long as a forward, for calls of which there are too few to matter."""

_DRAWN, _EACH_DRAWN = 1 << 20, 1 << 17
"""Elements that all draws may have together: draws are always made, and in layers they are larger than in steps."""


class CallRecorder(TorchFunctionMode):
    """Records calls; raises :class:`NotRecordedError` where it cannot, and notes that in ``reason``.

    ``is_inside``: whether it is in a call that is being made, which may write what it has made itself. ``operators``:
    how many have run.

    Args:
        arguments: the tensors that are given to forward.
        owned: those of the module, by name.
        computes: whether every call is computed; otherwise, where one like it was before, its results may have no
            numbers (:mod:`bridge.capture.loops.uncomputed`).
    """

    def __init__(self, arguments: Iterable[torch.Tensor], owned: Mapping[str, torch.Tensor], computes: bool = True):
        super().__init__()
        self.calls = Calls()
        self.reason: str | None = None
        self.is_inside = self._may_draw = False
        self.operators = self.modes = 0
        self.uncomputed = None if computes else Uncomputed()
        self._grad = torch.is_grad_enabled()
        self._writing: dict[Any, bool] = {}
        self._fine: tuple | None = None
        self._like: dict[tuple, Like] = {}
        self._like_but_for_number: dict[tuple, Like] = {}
        self._kinds, self._layouts = dict[tuple, int](), dict[tuple, int]()
        self._look_of: list[int] = []  # twice the number of a value's layout, and whether autograd follows it
        self._arguments = Arguments()
        self._known: dict[int, tuple[weakref.ref, int]] = {}
        self._writes = Writes()
        self._elements = self._elements_drawn = 0
        self._drawn: list[Draw] = []
        inputs = [*owned.values(), *arguments]
        self._draws = DrawRecorder(self._drawn, lambda op, reason: self.fail(f"{op} {reason}"), inputs=inputs)
        for source, tensor in (*enumerate(arguments), *owned.items()):
            self._new(tensor, Made(-1, len(self.calls.inputs)))
            self.calls.inputs.append(source)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if not len(self.calls.rows) % _BETWEEN_INTERRUPTS:
            raise_deferred()
        listener = sys.getprofile()
        sys.setprofile(None)  # what is called here is torch's, or the recorder's own
        try:
            return self._recorded(func, args, kwargs or {})
        except NotComparedError as error:
            self.fail(str(error))
        finally:
            sys.setprofile(listener)

    def _recorded(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self.reason is not None:
            raise NotRecordedError(self.reason)
        if func in METADATA:
            return func(*args, **kwargs)
        iterates = func is torch.Tensor.__iter__
        if iterates:
            func = torch.unbind
        modified = out_of_place(func, kwargs)
        if modified is not None:
            return self._modify(func, args, kwargs, *modified)
        writes = self._check(func)
        given: list[torch.Tensor] = []
        told = self._arguments.told(func, args, kwargs, given)
        reads = tuple(map(self._number, given))
        if writes:
            write = self._copy if func.__name__ == "copy_" else self._write
            return write(func, told.args, args, told.kwargs, reads)
        call = told.number, tuple([self._look_of[value] for value in reads])
        like = self._like.get(call)
        if like is not None and len_dispatch_stack() == self.modes:  # none of forward's own
            result = self._make_again(func, args, kwargs, given, reads, like)
        else:
            result = self._make(func, args, kwargs, told, given, reads, call)
        return iter(result) if iterates else result

    def _make_again(self, func, args, kwargs, given, reads, like) -> Any:
        """Makes a call like one before, which no mode need watch, and adds its row."""
        if like.answer is not None:
            return self._leave_out(reads, given, like.answer, like.forms, like.kind, like.number)
        self.operators += like.operators
        with no_torch_dispatch():
            result = func(*args, **kwargs)
        self._note(func, like.kind, reads, self._made(func, result, like.forms), None, like.number)
        return result

    def _leave_out(self, reads, given, answer: Answer, known, kind: int, number: int | float | None) -> Any:
        """Adds the row of a call that is not computed; ``known``: the forms of its results."""
        results, row, makes = self.uncomputed.results(answer, given), len(self.calls.rows), []
        self._elements += answer.numel
        if self._elements > _SMALL + _EACH * row:
            self.fail("large tensors")
        for leaf, (tensor, (form, look)) in enumerate(zip(results, known, strict=True)):
            if tensor.requires_grad is not form.requires_grad:
                self.fail("results that autograd follows otherwise than those of a call like it")
            makes.append(self._noted(tensor, form, look, Made(row, leaf), is_alone=True))
        self.uncomputed.left_out_are(makes)
        self._writes.read(reads)
        self.calls.rows.append(Call(kind, reads, tuple(makes), None, None, number))
        return tuple(results) if answer.is_tuple else results[0]

    def _make(self, func, args, kwargs, call_told: Told, given, reads, call) -> Any:
        """Makes the call and adds its row."""
        forms, before = self.calls.forms, self.operators
        told, named = call_told.args, call_told.kwargs
        part = number = None
        if told and told[0] is HERE:
            part = part_of(func, told, named, reads[0], forms[reads[0]])
        if part is not None:  # of a plain tensor, by numbers
            self.operators += 1
            with no_torch_dispatch():
                result = func(*args, **kwargs)
            makes = self._made(func, result)
            if makes:
                self._writes.take_part(*reads, *given)
                kind = self._kind(Kind(func, told, named), part[1:2] + part[3:], reads, makes)
                self._note(func, kind, reads, makes, part)
            return result
        told, number = numbered(func.__name__, told, named, [forms[value] for value in reads])
        constants = (call_told.constants if number is None else key_of(told)), call_told.named_constants
        asked = func, constants, call[1]
        draws, like = func in DRAWING, self._like_but_for_number.get(asked)
        if like is not None and like.answer is not None and len_dispatch_stack() == self.modes:
            self._like[call] = like._replace(number=number)
            return self._leave_out(reads, given, like.answer, like.forms, like.kind, number)
        versions, self.is_inside, self._may_draw = [tensor._version for tensor in given], True, draws
        result = func(*args, **kwargs)
        self.is_inside = self._may_draw = False
        if versions != [tensor._version for tensor in given]:
            self.fail(f"{func} writes")
        answer = None if self.uncomputed is None or draws else self.uncomputed.learned(asked, given, result)
        makes = self._made(func, result)
        if makes:
            kind = self._kind(Kind(func, told, named), constants, reads, makes)
            if not draws:
                known = tuple([(forms[value], self._look_of[value]) for value in makes])
                like = Like(kind, number, answer, known, self.operators - before)
                self._like[call] = self._like_but_for_number[asked] = like
            self._note(func, kind, reads, makes, None, number)
        return result

    def _note(
        self,
        func: Any,
        kind: int,
        reads: tuple[int, ...],
        makes: tuple[int, ...],
        part: Part | None = None,
        number: int | float | None = None,
    ) -> None:
        """Adds the row of a call that was made."""
        if self.uncomputed is not None and (why := self.uncomputed.made(reads, makes, self.calls.forms)):
            self.fail(why)
        if part is None:
            self._writes.read(reads)
        if self._drawn:
            self._note_draw(makes)
        self.calls.rows.append(Call(kind, reads, makes, part, None, number))

    def draw(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs an operator that draws, inside of the call that is being made."""
        if not self._may_draw:
            self.fail(f"{func} draws")
        result = func(*args, **kwargs)
        self._draws.record(func, args, kwargs, result)
        return result

    def _note_draw(self, makes: tuple[int, ...]) -> None:
        if len(self._drawn) > 1 or (self._drawn[0].device != HOST and self._drawn[0].operand is None):
            self.fail("draws of another kind than masks")
        self.calls.drawn[len(self.calls.rows)] = draw = self._drawn.pop()
        self._elements_drawn += math.prod(draw.shape)
        if self._elements_drawn > _DRAWN + _EACH_DRAWN * len(self.calls.drawn):
            self.fail("large draws")

    def _write(self, func: Any, told: tuple, args: tuple, named: dict[str, Any], reads: tuple[int, ...]) -> None:
        """``whole[index] = part``, of a tensor that forward has made for it: from now on it is another value."""
        form = self.calls.forms[reads[0]]
        into = part_written(told, named, reads[0], form) if told[0] is HERE and len(reads) == 2 else None
        if into is None or told[2] is not HERE:
            self.fail("a write that is no part of a tensor")
        self._put(func, args, args[0], into, reads[1])

    def _copy(self, func: Any, told: tuple, args: tuple, named: dict, reads: tuple[int, ...]) -> torch.Tensor:
        """``whole[index].copy_(part)``: the same; the view is the tensor of no value from now on."""
        last = self.calls.rows[-1] if self.calls.rows else None
        whole = self._writes.whole_of_part()
        if last is None or last.part is None or last.makes != reads[:1] or whole is None:
            self.fail("a write that is no part of a tensor")
        if told != (HERE, HERE) or named or self._number(whole) != last.part.of:
            self.fail("a write that is no part of a tensor")
        self.calls.rows.pop()
        self._put(func, args, whole, last.part, reads[1], args[0])
        del self._known[id(args[0])]
        return args[0]

    def _put(
        self, func: Any, args: tuple, whole: torch.Tensor, into: Part, value: int, through: torch.Tensor | None = None
    ) -> None:
        """Makes the call, by which a part of the tensor is that value, and adds its row."""
        forms, made = self.calls.forms, self.calls.made[into.of].row
        maker = "" if made < 0 else self.calls.kinds[self.calls.rows[made].kind].name
        if not self._writes.fits(into, forms[into.of], forms[value]):
            self.fail("a write that is no part of a tensor")
        if not self._writes.is_unread(into.of, whole, maker, through):
            self.fail("a write into what is used elsewhere")
        self.is_inside = True
        func(*args)
        self.is_inside = False
        reads, makes = (into.of, value), (self._new(whole, Made(len(self.calls.rows), 0)),)
        self._writes.wrote(*makes)
        self._writes.read([value])
        if self.uncomputed is not None:
            self.uncomputed.made(reads, makes, forms)
        kind = self._kind(Kind(func, (), {}), into[1:2] + into[3:], reads, makes)
        self.calls.rows.append(Call(kind, reads, makes, None, into))

    def _modify(self, func: Any, args: tuple, kwargs: dict[str, Any], same: Any, named: dict[str, Any]) -> torch.Tensor:
        """``tensor.add_(other)``: from now on the tensor is another value, the result of ``same``; its row is added."""
        self._check(same)
        given: list[torch.Tensor] = []
        told, _, named, named_constants = self._arguments.told(func, args, named, given)[1:]
        reads, forms = tuple(map(self._number, given)), self.calls.forms
        if not told or told[0] is not HERE or not keeps_form([forms[value] for value in reads]):
            self.fail("a write that may round or lie otherwise than a result")
        if self.calls.made[reads[0]].row < 0 or not self._writes.is_alone(given[0]):
            self.fail("a write into what is used elsewhere")
        told, number = numbered(same.__name__, told, named, [forms[value] for value in reads])
        self._writes.read(reads)
        self.is_inside = True
        func(*args, **kwargs)
        self.is_inside = False
        makes = (self._new(given[0], Made(len(self.calls.rows), 0)),)
        if self.uncomputed is not None:
            self.uncomputed.made(reads, makes, forms)
        kind = self._kind(Kind(same, told, named), (key_of(told), named_constants), reads, makes)
        self.calls.rows.append(Call(kind, reads, makes, None, None, number))
        return given[0]

    def fail(self, reason: str) -> None:
        """Ends the recording."""
        self.reason = reason
        raise NotRecordedError(reason)

    def finish(self, leaves: Iterable[Any], spec: Any) -> Calls:
        """The rows of a forward that has returned these leaves. :class:`NotRecordedError` if that is not all."""
        if self.reason is not None:
            raise NotRecordedError(self.reason)
        results = [Value(self._number(leaf)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.calls.results, self.calls.spec = results, spec
        return self.calls

    def _check(self, func: Any) -> bool:
        """Whether a call writes a part of a tensor. The recording ends if it could have another part in forward."""
        writes, state = self._writing.get(func), state_of_autograd()
        if writes is not None and state == self._fine:  # both were looked at before
            return writes
        if writes is None:
            name = getattr(func, "__name__", None)
            if name is None or (name in ("__get__", "__set__", "__delete__") and func not in VIEWS):
                self.fail(f"an attribute of a tensor: {func}")
            if name in NEVER or (name.endswith("_") and not name.endswith("__") and name != "copy_"):
                self.fail(f"a call of {name}")
            writes = self._writing[func] = name in ("__setitem__", "copy_")
        if use_of_autograd(func, func.__name__) is not None or torch.is_grad_enabled() != self._grad:
            self.fail("a use of autograd")
        if any(map(torch.is_autocast_enabled, TYPES)):
            self.fail("autocast")
        self._fine = state
        return writes

    def _number(self, tensor: torch.Tensor) -> int:
        found = self._known.get(id(tensor))
        if found is None or found[0]() is not tensor:
            self.fail("a tensor that is not made by a call")
        return found[1]

    def _new(self, tensor: torch.Tensor, made: Made) -> int:
        if (
            type(tensor) not in (torch.Tensor, torch.nn.Parameter)
            or tensor.layout is not torch.strided
            or tensor.is_complex()
        ):
            self.fail("a tensor that is not a plain one")
        form = Form(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
        layout = self._layouts.setdefault(form.layout, len(self._layouts))
        return self._noted(tensor, form, 2 * layout + form.requires_grad, made)

    def _noted(self, tensor: torch.Tensor, form: Form, look: int, made: Made, is_alone: bool = False) -> int:
        """Adds a value; ``is_alone``: no other tensor lies in its memory."""
        number = len(self.calls.forms)
        self.calls.forms.append(form)
        self.calls.made.append(made)
        self._look_of.append(look)
        self._known[id(tensor)] = reference, _ = weakref.ref(tensor), number
        self._writes.note(tensor, reference, is_alone)
        return number

    def _made(self, func: Any, result: Any, like: tuple[tuple[Form, int], ...] = ()) -> tuple[int, ...]:
        """The values of a call's results; none where they are what was given, as if it had not been called.

        ``like``: the forms of these where a call like this one was made before.
        """
        row = len(self.calls.rows)
        leaves = [result] if type(result) is torch.Tensor else list(leaves_of(result))
        if not all(isinstance(leaf, torch.Tensor) for leaf in leaves) or not leaves:
            self.fail(f"{func.__name__} returns what is no tensor")
        known = [self._known.get(id(leaf)) for leaf in leaves]
        given = [found is not None and found[0]() is leaf for found, leaf in zip(known, leaves, strict=True)]
        if any(given):
            if all(given) and not like:
                return ()
            self.fail("what was given among the results")
        self._elements += leaves[0].numel()
        if self._elements > _SMALL + _EACH * row:
            self.fail("large tensors")
        if like:
            pairs = enumerate(zip(leaves, like, strict=True))
            return tuple([self._same(tensor, form, Made(row, leaf)) for leaf, (tensor, form) in pairs])
        return tuple([self._new(tensor, Made(row, leaf)) for leaf, tensor in enumerate(leaves)])

    def _same(self, tensor: torch.Tensor, known: tuple[Form, int], made: Made) -> int:
        """As :meth:`_new`, of a tensor that has this form."""
        form = known[0]
        is_such = type(tensor) is torch.Tensor and tensor.shape == form.shape and tensor.stride() == form.stride
        if not is_such or tensor.dtype is not form.dtype or tensor.requires_grad is not form.requires_grad:
            self.fail("results of other layouts than those of a call like it")
        return self._noted(tensor, *known, made)

    def _kind(self, kind: Kind, constants: tuple, reads: tuple[int, ...], makes: tuple[int, ...]) -> int:
        """The number of a kind on these layouts."""
        layouts = tuple([self._look_of[number] >> 1 for number in (*reads, *makes)])
        number = self._kinds.setdefault((kind.func, constants, layouts), len(self.calls.kinds))
        if number == len(self.calls.kinds):
            self.calls.kinds.append(kind)
        return number
