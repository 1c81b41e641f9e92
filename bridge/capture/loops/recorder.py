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
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from bridge.base.devices import HOST, TYPES
from bridge.base.interrupts import raise_deferred
from bridge.capture.autograd_uses import use_of_autograd
from bridge.capture.draw_recorder import DrawRecorder
from bridge.capture.loops.calls import (
    HERE,
    NUMBER,
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
from bridge.capture.loops.in_place import keeps_form, out_of_place
from bridge.capture.loops.uncomputed import Uncomputed
from bridge.capture.loops.writes import Writes
from bridge.capture.observation import Draw
from bridge.state import constant_key

__all__ = ["CallRecorder", "NotRecordedError"]


class NotRecordedError(Exception):
    """A call cannot be recorded: why."""


_ATTRIBUTES = (
    "shape",
    "dtype",
    "device",
    "ndim",
    "layout",
    "requires_grad",
    *(f"is_{kind}" for kind in (*TYPES, "sparse", "mps")),
)
_QUESTIONS = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex"),
    *("is_signed", "__len__", "get_device", "stride", "is_contiguous", "is_inference", "is_conj", "is_neg"),
)
_METADATA = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES]
    + [getattr(torch.Tensor, name) for name in _QUESTIONS]
    + [torch.is_floating_point, torch.is_complex, torch.numel, torch.is_grad_enabled, torch.broadcast_shapes]
)
"""Functions that tell no numbers of a tensor's elements."""
_VIEWS = frozenset(getattr(torch.Tensor, name).__get__ for name in ("T", "mT"))
_NEVER = frozenset({"as_strided", "requires_grad_", "backward", "untyped_storage", "set_", "apply_", "map_"})
"""Names of functions that depend on more than the layouts and elements of their arguments, or change something."""

_DRAWING = frozenset({F.dropout, torch.dropout, torch.rand, torch.randn, torch.rand_like, torch.randn_like})
"""Functions that draw once, or nothing where their arguments say so."""

_BETWEEN_INTERRUPTS = 64
"""Calls after which the user's interrupt is looked for."""

_SMALL, _EACH = 1 << 24, 1 << 18
"""Elements that all results may have together: so many, and so many more for each call. Beyond, recording may take as
long as a forward, for calls of which there are too few to matter."""


_DRAWN, _EACH_DRAWN = 1 << 20, 1 << 17
"""Elements that all draws may have together: draws are always made, and in layers they are larger than in steps."""


class CallRecorder(TorchFunctionMode):
    """Records calls; raises :class:`NotRecordedError` where it cannot, and notes that in ``reason``.

    ``is_inside``: whether it is in a call that is being made, which may write what it has made itself.

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
        self.uncomputed = None if computes else Uncomputed()
        self._grad = torch.is_grad_enabled()
        self._kinds: dict[tuple, int] = {}
        self._layouts: dict[tuple, int] = {}
        self._layout_of: list[int] = []
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
        finally:
            sys.setprofile(listener)

    def _recorded(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self.reason is not None:
            raise NotRecordedError(self.reason)
        if func in _METADATA:
            return func(*args, **kwargs)
        iterates = func is torch.Tensor.__iter__
        if iterates:
            func = torch.unbind
        modified = out_of_place(func, kwargs)
        if modified is not None:
            return self._modify(func, args, kwargs, *modified)
        writes = self._check(func)
        given: list[torch.Tensor] = []
        told = tuple([self._told(arg, given) for arg in args])
        named = {name: self._told(arg, given) for name, arg in kwargs.items()}
        reads = tuple([self._number(tensor) for tensor in given])
        if writes:
            write = self._copy if func.__name__ == "copy_" else self._write
            return write(func, told, args, named, reads)
        return self._make(func, args, kwargs, told, named, given, reads, iterates)

    def _make(self, func, args, kwargs, told, named, given, reads, iterates) -> Any:
        """Makes the call and adds its row."""
        forms = self.calls.forms
        part = number = None
        if told and told[0] is HERE:
            part = part_of(func, told, named, reads[0], forms[reads[0]])
        if part is None:
            told, number = numbered(func.__name__, told, named, [forms[value] for value in reads])
        constants = part[1:2] + part[3:] if part is not None else (_key(told), _key(named))
        asked = func, constants, tuple([(self._layout_of[value], forms[value].requires_grad) for value in reads])
        computes = self.uncomputed is None or part is not None or func in _DRAWING
        result = None if computes else self.uncomputed.answer(asked, given)
        if result is None:
            versions, self.is_inside, self._may_draw = [tensor._version for tensor in given], True, func in _DRAWING
            result = func(*args, **kwargs)
            self.is_inside = self._may_draw = False
            if versions != [tensor._version for tensor in given]:
                self.fail(f"{func} writes")
            if not computes:
                self.uncomputed.learn(asked, given, result)
        makes = self._made(func, result)
        if makes:
            if self.uncomputed is not None and (why := self.uncomputed.made(reads, makes, forms)):
                self.fail(why)
            if part is None:
                self._writes.read(reads)
            else:
                self._writes.take_part(*reads, *given)
            if self._drawn:
                self._note_draw(makes)
            self._add(Kind(func, told, named), constants, Call(-1, reads, makes, part, None, number))
        return iter(result) if iterates else result

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
        self._add(Kind(func, (), {}), into[1:2] + into[3:], Call(-1, reads, makes, None, into))

    def _modify(self, func: Any, args: tuple, kwargs: dict[str, Any], same: Any, named: dict[str, Any]) -> torch.Tensor:
        """``tensor.add_(other)``: from now on the tensor is another value, the result of ``same``; its row is added."""
        self._check(same)
        given: list[torch.Tensor] = []
        told = tuple([self._told(arg, given) for arg in args])
        named = {name: self._told(arg, given) for name, arg in named.items()}
        reads, forms = tuple([self._number(tensor) for tensor in given]), self.calls.forms
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
        constants = _key(told), _key(named)
        self._add(Kind(same, told, named), constants, Call(-1, reads, makes, None, None, number))
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
        name = getattr(func, "__name__", None)
        if name is None or (name in ("__get__", "__set__", "__delete__") and func not in _VIEWS):
            self.fail(f"an attribute of a tensor: {func}")
        if name in _NEVER or (name.endswith("_") and not name.endswith("__") and name != "copy_"):
            self.fail(f"a call of {name}")
        if use_of_autograd(func, name) is not None or torch.is_grad_enabled() != self._grad:
            self.fail("a use of autograd")
        if any(map(torch.is_autocast_enabled, TYPES)):
            self.fail("autocast")
        return name in ("__setitem__", "copy_")

    def _told(self, arg: Any, given: list[torch.Tensor]) -> Any:
        """An argument as its kind has it; the tensors in it are appended to ``given``."""
        if isinstance(arg, torch.Tensor):
            given.append(arg)
            return HERE
        if isinstance(arg, tuple | list):
            items = [self._told(item, given) for item in arg]
            return tuple(items) if isinstance(arg, tuple) else items
        if type(arg) is slice:
            if any(isinstance(bound, torch.Tensor) for bound in (arg.start, arg.stop, arg.step)):
                self.fail("a tensor as a bound")
            return arg
        if arg is not Ellipsis and constant_key(arg) is None:
            self.fail(f"an argument of type {type(arg).__name__}")
        return arg

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
        number = len(self.calls.forms)
        form = Form(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
        self.calls.forms.append(form)
        self.calls.made.append(made)
        self._layout_of.append(self._layouts.setdefault(form.layout, len(self._layouts)))
        self._known[id(tensor)] = reference, _ = weakref.ref(tensor), number
        self._writes.note(tensor, reference)
        return number

    def _made(self, func: Any, result: Any) -> tuple[int, ...]:
        """The values of a call's results; none where they are what was given, as if it had not been called."""
        row = len(self.calls.rows)
        leaves = [result] if type(result) is torch.Tensor else list(_leaves(result))
        if not all(isinstance(leaf, torch.Tensor) for leaf in leaves) or not leaves:
            self.fail(f"{func.__name__} returns what is no tensor")
        known = [self._known.get(id(leaf)) for leaf in leaves]
        given = [found is not None and found[0]() is leaf for found, leaf in zip(known, leaves, strict=True)]
        if all(given):
            return ()
        if any(given):
            self.fail("what was given among the results")
        self._elements += leaves[0].numel()
        if self._elements > _SMALL + _EACH * row:
            self.fail("large tensors")
        return tuple([self._new(tensor, Made(row, leaf)) for leaf, tensor in enumerate(leaves)])

    def _add(self, kind: Kind, constants: tuple, row: Call) -> None:
        layouts = tuple([self._layout_of[number] for number in (*row.reads, *row.makes)])
        number = self._kinds.setdefault((kind.func, constants, layouts), len(self.calls.kinds))
        if number == len(self.calls.kinds):
            self.calls.kinds.append(kind)
        self.calls.rows.append(row._replace(kind=number))


def _leaves(result: Any) -> Iterator[Any]:
    """What a function returns, ``None`` passed over."""
    if isinstance(result, tuple | list):
        for item in result:
            yield from _leaves(item)
    elif result is not None:
        yield result


def _key(arg: Any) -> Any:
    """Hashable, and equal for equal arguments of kinds."""
    if isinstance(arg, tuple | list):
        return type(arg), tuple(map(_key, arg))
    if type(arg) is dict:
        return tuple((name, _key(item)) for name, item in arg.items())
    if type(arg) is slice:
        return "slice", *map(_key, (arg.start, arg.stop, arg.step))
    return arg if arg is HERE or arg is NUMBER or arg is Ellipsis else constant_key(arg)
