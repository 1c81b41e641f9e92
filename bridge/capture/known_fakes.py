"""Known fakes: operators on fake tensors, of which each kind runs once → results of the layouts that the first had.

What an operator makes of fake tensors is a function of the operator, its constants and the layouts of what it reads,
where it makes memory of its own. A loop calls it again and again, on layouts that are the same in every step: then
another fake tensor is made without a run, a tenth of the time, and autograd sees it made of the same operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from bridge.base.torch_autograd import apply_function, no_torch_dispatch
from bridge.base.torch_fakes import like_fake, new_fake
from bridge.base.torch_internals import FakeTensor, OpOverload, schema, storage_id
from bridge.capture.rows import CONSTANTS, Record, Value, mapped, values_in

__all__ = ["KnownCalls", "KnownFakes"]

_TAGS = (torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


class _Unknown(Exception):
    """An operand that cannot be compared."""


class KnownFakes:
    """The kinds of calls that a run on fake tensors has met."""

    def __init__(self) -> None:
        self._results: dict[tuple, tuple[type | None, list[tuple], bool] | None] = {}
        self._functional: dict[Any, bool] = {}

    def call(self, func: Any, args: tuple, kwargs: dict[str, Any], modes: tuple) -> Any:
        """What ``func(*args, **kwargs)`` returns; ``modes``: what else decides about it."""
        is_functional = self._functional.get(func)
        if is_functional is None:
            is_functional = self._functional[func] = _is_functional(func)
        if not is_functional:
            return func(*args, **kwargs)
        key, given = _key_of_call(func, args, kwargs, modes)
        if not given:
            return func(*args, **kwargs)
        if key not in self._results:
            result = func(*args, **kwargs)
            self._results[key] = _learned(given, result)
            return result
        known = self._results[key]
        return func(*args, **kwargs) if known is None else _again(known, given)


class _Row(NamedTuple):
    """The only row of a call: its operator and operands, with :class:`_Given` for tensors; how its result is made."""

    op: Any
    args: tuple
    kwargs: dict[str, Any]
    results: tuple


class _Given(int):
    """A place among the tensors that a function is given."""


class KnownCalls:
    """torch's functions on fake tensors, of which each kind is called once → rows like that of the first call.

    Which operator such a function calls, and on which constants, torch decides by the function, its constants, the
    layouts of its tensors and the modes. So a call that has all these in common with an earlier one,
    which made one row, of an operator that makes one tensor in memory of its own, makes such a row: the way through
    torch's dispatcher, which takes longest in a loop, tells nothing new. The row is compared with the run on real
    numbers, whose rows are all observed, like any other.
    """

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._known: dict[Any, _Row | None] = {}

    def call(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What ``func(*args, **kwargs)`` returns."""
        is_torchs = type(func) in _IN_C or getattr(func, "__module__", "") == F.__name__
        modes = self._recorder.modes() if is_torchs else None
        if modes is None:
            return func(*args, **kwargs)
        key, given = _key_of_call(func, args, kwargs, modes)
        if not given:
            return func(*args, **kwargs)
        places = [next(place for place, other in enumerate(given) if other is each) for each in given]
        known = self._known.get((key, *places), False)
        if known and (row := self._recorder.expected(known.op)) is not None:
            args, kwargs = mapped((known.args, known.kwargs), _Given, lambda place: given[place])
            return self._recorder.add(row, args, kwargs, _again(known.results, given))
        record = self._recorder.record
        before = _sizes(record)
        result = func(*args, **kwargs)
        if known is False:
            is_one = [now - then for now, then in zip(_sizes(record), before, strict=True)] == _ONE_ROW
            self._known[(key, *places)] = self._learned(given, result) if is_one else None
        return result

    def _learned(self, given: Sequence[torch.Tensor], result: Any) -> _Row | None:
        """What is known of calls like this, which has made the last row; ``None``: that they are to be made."""
        number_of, row = self._recorder.number_of, self._recorder.record.rows[-1]
        if not _is_functional(row.op) or type(result) is not FakeTensor or row.results != (number_of(result),):
            return None
        results, numbers = _learned(given, result), list(map(number_of, given))
        if results is None or not set(values_in((row.args, row.kwargs))) <= set(numbers):
            return None
        operands = mapped((row.args, row.kwargs), Value, lambda value: _Given(numbers.index(value.number)))
        return _Row(row.op, *operands, results)


_IN_C = (type(torch.sigmoid), type(torch.Tensor.add), type(torch.Tensor.__add__))
_ONE_ROW = [1, 0, 0, 0, 0, 0]


def _sizes(record: Record) -> list[int]:
    """How much a record has of what calls add to."""
    return [len(each) for each in (record.rows, record.reads, record.told, record.literals, record.free, record.casts)]


class _MadeOf(torch.autograd.Function):
    """Stands in autograd's graph for an operator that did not run."""

    @staticmethod
    def forward(ctx: Any, made: Any, *sources: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return made()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise RuntimeError("made for the layouts alone")


def _is_functional(func: Any) -> bool:
    """Whether a call's results may be told from layouts, unless they share memory."""
    if not isinstance(func, OpOverload) or func.namespace != "aten" or any(tag in func.tags for tag in _TAGS):
        return False
    told = schema(func)
    return not told.is_mutable and not any(each.alias_info for each in told.returns)


def _key_of_call(func: Any, args: tuple, kwargs: dict[str, Any], modes: Any) -> tuple[Any, list[torch.Tensor]]:
    """What decides about the results of a call, and its tensors; no tensors where that is not known."""
    given: list[torch.Tensor] = []
    try:
        return (func, modes, torch.get_default_dtype(), _key(args, given), _key(kwargs, given)), given
    except _Unknown:
        return None, []


def _key(tree: Any, given: list[torch.Tensor]) -> Any:
    kind = type(tree)
    if kind is FakeTensor or (isinstance(tree, FakeTensor) and isinstance(tree, torch.nn.Parameter)):
        given.append(tree)
        if tree.layout is not torch.strided or tree.is_conj() or tree.is_neg():
            raise _Unknown
        return tree.shape, tree.stride(), tree.dtype, tree.fake_device, tree.requires_grad
    if kind is tuple or kind is list:
        return (kind, *[_key(each, given) for each in tree])
    if kind is dict:
        return tuple([(name, _key(each, given)) for name, each in tree.items()])
    if kind is float:
        return kind, repr(tree)
    if kind in CONSTANTS:
        return kind, tree
    raise _Unknown


def _learned(given: Sequence[torch.Tensor], result: Any) -> tuple[type | None, list[tuple], bool] | None:
    """How results like these are made; ``None`` if they share memory, or are no plain tensors."""
    kind = type(result) if type(result) in (tuple, list) else None
    results = [result] if kind is None else list(result)
    if not results or any(type(each) is not FakeTensor or each.layout is not torch.strided for each in results):
        return None
    memory = {storage_id(each) for each in results}
    if len(memory) < len(results) or not memory.isdisjoint(map(storage_id, given)):
        return None
    if any(each.is_conj() or each.is_neg() or each.storage_offset() for each in results):
        return None
    follows = {(each.requires_grad, each.is_leaf) for each in results}
    if len(follows) > 1 or (True, True) in follows:
        return None
    layouts = [(tuple(each.shape), each.stride(), each.dtype, each.fake_device) for each in results]
    forms = [(*layout, dict(vars(new_fake(given[0].fake_mode, *layout)))) for layout in layouts]
    return kind, forms, results[0].requires_grad


def _again(known: tuple[type | None, list[tuple], bool], given: Sequence[torch.Tensor]) -> Any:
    kind, forms, is_followed = known
    made = [like_fake(*each) for each in forms]
    if is_followed:
        sources = [each for each in given if each.requires_grad]
        with no_torch_dispatch():  # no mode need be asked for devices
            made = apply_function(_MadeOf, (lambda: tuple(made), *sources), {})
    return made[0] if kind is None else kind(made)
