"""Torch-function mode of a recorded run: forward's calls of torch functions → calls that the graph can hold.

The mode tells the recorder facts that no operator shows: which function reads a number, where a call begins and ends.
Tables replace functions by forms that a graph can hold. In the real run, the mode checks in-place writes
(:mod:`bridge.capture.inplace_rules`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn

from bridge.base.errors import Unsupported, UnsupportedModule, line_of_forward
from bridge.base.modes import replaced_here, while_active
from bridge.base.pytrees import tensor_leaves
from bridge.base.threads import raise_deferred
from bridge.base.torch_fakes import fake_type_hidden
from bridge.base.torch_higher_order import is_check_of_devices
from bridge.base.torch_internals import (
    VF,
    FakeTensor,
    HigherOrderOperator,
    TensorBase,
    innermost_transform,
    no_torch_function,
    pytree,
    storage_id,
)
from bridge.base.torch_recording import ScriptFunction, run_unfused
from bridge.capture.autograd_uses import use_of_autograd
from bridge.capture.custom_functions import Overwritten, function_running
from bridge.capture.higher_order import HigherOrder, TorchFunctions
from bridge.capture.inplace_rules import InPlaceRules
from bridge.capture.observation import Output
from bridge.capture.packed import PackedSequences
from bridge.capture.recorder import OperatorRecorder, nested
from bridge.capture.rows import form_of, values_in
from bridge.capture.scalar_guards import (
    COUNTS,
    FORMS,
    line_of_reading,
    names_of_reader,
    numbers_of,
    tensor_of,
    written_arrays,
)
from bridge.capture.select_at import at_numbers, shared_views
from bridge.capture.thread_isolation import functions_of_torch, replacements
from bridge.capture.whole_functions import HANDLERS
from bridge.guards import ADDRESSES, in_its_place, is_changeable

_SETTERS = {torch.Tensor.data.__set__: "data", torch.Tensor.grad.__set__: "grad", torch.Tensor.grad.__delete__: "grad"}
"""Function that an assignment to a tensor's attribute calls -> the attribute."""
_SWITCHES = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__, torch.Tensor.detach_)
"""Functions that may change whether autograd tracks a tensor."""
_ASKS = torch.Tensor.requires_grad.__get__
_BACKWARDS = (torch.Tensor.backward, torch.autograd.backward)
_BATCHED = "many derivatives at once inside forward, by vmap", "call autograd.grad for one after the other"
_OTHER_MEMORY = "gives a tensor other memory or another gradient inside forward"
_OLD_NAME = "what had the old memory of a tensor is read after it: it has the new numbers in a compiled call"
_RUN_BACKWARD = ("backward", "grad")
"""Functions that run the user's backward code."""


def _count(recorder: OperatorRecorder, name: str, x: torch.Tensor) -> int:
    with torch.no_grad():
        numbers = COUNTS[name](x)
    return recorder.read(numbers, lambda: int(numbers), is_size=True, is_least=name == "bins")


class Functions:
    """While active, handles every torch function that forward calls.

    Args:
        recorder: the run's recorder.
        rules: the rules of in-place writes in the real run; ``None`` in a fake run.

    Attributes:
        bases: the memory of tensors that were indexed with numbers in tensors.
        arrays: the numpy arrays that Python got, which share memory with tensors; their numbers then, and the lines.
        old_names: for each ``x.data = value``: the row after it, and other values in the old memory of ``x``.
        integers: globals of code that converted a tensor to an integer or took its length, by their ids.
        reads_addresses: whether forward called a method whose result depends on a tensor's address.
    """

    def __init__(self, recorder: OperatorRecorder, rules: InPlaceRules | None = None):
        self.recorder, self.rules, self.reads_addresses = recorder, rules, False
        self.old_names: list[tuple[int, set[int]]] = []
        self._uses = list[tuple]()
        self._before: list[tuple[torch.Tensor, str, Any]] = []
        self.bases, self.arrays = set[int](), list[tuple[np.ndarray, np.ndarray, str]]()
        self.integers: dict[int, dict[str, Any]] = {}
        #: A key of :data:`bridge.capture.scalar_guards.COUNTS` and a tensor -> the count, which is noted as read.
        self.count: Callable[[str, torch.Tensor], int] = partial(_count, recorder)
        self._packed = PackedSequences(self.count)
        self._higher_order, self._replaced = HigherOrder(recorder), replacements()

    def handle(self, mode: TorchFunctions, call: Callable, func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
        """Calls a torch function (:class:`bridge.capture.higher_order.TorchFunctions`)."""
        raise_deferred()
        self.reads_addresses |= getattr(func, "__name__", "") in ADDRESSES
        if any(kind.__module__.startswith("torch.nested.") for kind in types):
            raise UnsupportedModule("", [nested(getattr(func, "__name__", str(func)), line_of_forward())])
        inside, any_call = function_running(), partial(self._any, mode, call)
        return (any_call if inside is None else partial(inside.called, any_call))(func, args, kwargs)

    def _any(self, mode: TorchFunctions, call: Callable, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if "generator" in kwargs and kwargs["generator"] is None:  # ``generator=None`` would call another overload
            kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        if isinstance(func, HigherOrderOperator):
            return self._higher_order.called(mode, call, func, args, kwargs)
        if is_check_of_devices(func):
            return False
        if func in _BACKWARDS:
            reason = "runs a backward inside forward, which adds to gradients that are the caller's"
            raise UnsupportedModule("", [Unsupported("torch.autograd.grad or backward", line_of_forward(), reason)])
        if func is torch.autograd.grad:
            self._derive(*args, **kwargs)
        if innermost_transform() is not None:
            return call(func, args, kwargs)
        return self._called(func, args, kwargs) if self.rules is None else self._watched(call, func, args, kwargs)

    def _derive(self, outputs: Any, inputs: Any, *rest: Any, is_grads_batched: bool = False, **options: Any) -> None:
        """Notes the inputs of the run among the inputs of a derivative."""
        if is_grads_batched:
            raise UnsupportedModule("", [Unsupported("is_grads_batched", line_of_forward(), *_BATCHED)])
        for each in inputs if isinstance(inputs, tuple | list) else [inputs]:
            number = self.recorder.values.number_of(each) if isinstance(each, torch.Tensor) else None
            if number is None:
                reason = "takes a derivative with respect to something that it has not computed with"
                raise UnsupportedModule("", [Unsupported("torch.autograd.grad", line_of_forward(), reason)])
            is_given = number < self.recorder.record.inputs or number in self.recorder.record.free
            if is_given and self.rules is not None:
                self.rules.derivatives.derived.add(number)

    def _judge(self, op: Any, tensors: Sequence, written: Iterable, results: Iterable) -> None:
        """Checks the writes and results of an operator that has run."""
        self.rules.checkpointed.note(tensors)
        name, written = op.overloadpacket.__name__, [*written]
        is_of_lists = name.startswith("_foreach")
        for tensor in written:
            self.rules.mutated(name, tensor, len(written) == 1 and not is_of_lists)
        if is_of_lists:  # torch counts no writes of lists under a mode
            torch.autograd.graph.increment_version(written)
        self.rules.memory.note(map(storage_id, written))
        for result in results:
            self.rules.returned(tensors, result)

    def _called(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Calls a function in the form that a graph can hold → its result."""
        self.recorder.asked = _READ_AS.get(func)
        if func is TensorBase.__int__ or func is torch.Tensor.__len__:
            names = names_of_reader()
            self.integers[id(names)] = names
        try:
            return self._packed.called(self._in_form, func, args, kwargs)
        finally:
            self.recorder.asked = None

    def _in_form(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if (handler := HANDLERS.get(func)) is not None and not self._calls_replacement(func):
            with functions_of_torch(self._replaced):
                return handler(*args, **kwargs)
        if (form := _FORMS.get(func)) is not None:
            with functions_of_torch(self._replaced):
                made = form(self, *args, **kwargs)
            if made is not NotImplemented:
                return made
        return func(*args, **kwargs)

    def _calls_replacement(self, func: Any) -> bool:
        """Whether a function in Python (``F.ctc_loss``) may call one of this name that the user has replaced."""
        return type(func) is FunctionType and func.__name__ in self._replaced.get(torch, ())

    def shared_views(self, results: Sequence[tuple[torch.Tensor, Output]]) -> list[Unsupported]:
        """Refusals of results, see :func:`bridge.capture.select_at.shared_views`."""
        return shared_views(self.bases, results)

    def finish(self, result: Any) -> None:
        """Checks forward's result, arrays and reads of old memory after the run.

        Raises:
            UnsupportedModule: the result has a packed sequence.
        """
        self._packed.refuse(result, "forward's result")
        if self.rules is None:
            return
        self.rules.unsupported += written_arrays(self.arrays)
        number_of, rows = self.recorder.values.number_of, self.recorder.record.rows
        returned = set(map(number_of, tensor_leaves(result)))
        for first, names in self.old_names:
            read = (values_in((row.args, row.kwargs)) for row in rows[first:])
            if not all(map(names.isdisjoint, (returned, *read))):
                self.complain("Tensor.data =", _OLD_NAME, "clone it")

    def complain(self, op: str, reason: str, hint: str) -> None:
        """Notes a refusal in the real run; does nothing in a fake run."""
        if self.rules is not None:
            self.rules.complain(op, reason, hint)

    @contextmanager
    def active(self) -> Iterator[None]:
        """While active, this thread's torch functions are handled; TorchScript functions run operator by operator,
        without fused kernels; a parameter that is made is an alias of its data, detached from the graph."""
        scripts = replaced_here(ScriptFunction, __call__=lambda original: self._script)
        parameters = replaced_here(nn.Parameter, __new__=lambda original: partial(self._new_parameter, original))
        self.recorder.judge = None if self.rules is None else self._judge
        try:
            hidden = nullcontext() if self.rules is not None else _of_fakes()
            with scripts, parameters, hidden, TorchFunctions(self.handle):
                yield
        finally:
            self.recorder.judge = None  # no cycle: weak references to parameters would outlive the run
            with no_torch_function():  # parameters belong to the user
                for tensor, attribute, value in reversed(self._before):
                    setattr(tensor, attribute, value)

    def _script(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        with while_active(self.recorder.values, in_script=True):
            result = run_unfused(function, *args, fakes=self.rules is None, **kwargs)
            self.recorder.adopt(tensor_leaves(result))
        return result

    def _new_parameter(self, original: Any, kind: type, data: Any = None, requires_grad: bool = True) -> Any:
        recorder = self.recorder
        if recorder.paused or innermost_transform() is not None:
            return original(kind, data, requires_grad)
        values = (torch.empty(0) if data is None else data).detach()
        with recorder.pause(), no_torch_function():
            made = original(kind, values, requires_grad)
        recorder.stand_for(made, values)
        return made

    # Numbers

    def numbers(self, x: torch.Tensor) -> Any:
        """All numbers of a tensor as nested lists, noted as read."""
        with torch.no_grad():
            numbers = x.clone()
        return self.recorder.read(numbers, numbers.tolist)

    def integer(self, x: torch.Tensor) -> Any:
        """``int(x)`` of a one-element tensor, noted as read."""
        with no_torch_function(), torch.no_grad():
            numbers = numbers_of["__int__"](x)
            return self.recorder.read(numbers, lambda: int(numbers))

    def whole(self, x: torch.Tensor, given: Callable[[], Any]) -> Any:
        """``given()``, a Python value made from all numbers of a tensor, which are noted as read."""
        with torch.no_grad():
            numbers = x.detach().clone()
        return self.recorder.read(numbers, numbers.tolist, lambda _: given())

    # Writes

    def _watched(self, call: Callable, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Calls a function in the real run → its result; notes refusals of its uses of autograd."""
        rules, name = self.rules, getattr(func, "__name__", str(func))
        if (use := use_of_autograd(func, name, args, rules.without_grad)) is not None and use not in self._uses:
            self._uses.append(use)  # said once
            rules.complain(*use)
        attribute = _SETTERS.get(func) if name in ("__set__", "__delete__") else None
        if name == "__set__" and attribute == "grad":
            rules.complain("Tensor.grad =", _OTHER_MEMORY)
        if func == _ASKS:
            rules.derivatives.asked.add(id(args[0]))
        with no_torch_function():
            if attribute is not None and rules.is_given(args[0]):
                self._before.append((args[0], attribute, getattr(args[0], attribute)))
            followed = args[0].requires_grad if func in _SWITCHES else None
        is_watched = use is not None or _runs_users_code(func, name, _leaves((args, kwargs)))
        result = call(self._called, (func, args, kwargs), {}) if is_watched else self._called(func, args, kwargs)
        with no_torch_function():  # these reads of attributes are not forward's
            if followed is not None and args[0].is_leaf:
                rules.switched(args[0], followed, self.recorder.has_read(args[0]))
        return result


@contextmanager
def _of_fakes() -> Iterator[None]:
    """While active, ``tolist`` of fake tensors is a torch function in this thread, as it is for other tensors, and
    the type of fake tensors is hidden from forward."""
    thread = threading.get_ident()
    with replaced_here(FakeTensor, tolist=lambda original: TensorBase.tolist):
        with fake_type_hidden(lambda: threading.get_ident() == thread):
            yield


def _runs_users_code(func: Any, name: str, values: Sequence[Any]) -> bool:
    """Whether a function is not torch's, reads print options, or may call the user's code: a backward, or a callable or
    an object of a user's class, with special methods, among ``values``."""
    is_torchs = not isinstance(func, FunctionType) or func.__module__.partition(".")[0] == "torch"
    users = (callable(each) or (not isinstance(each, _PLAIN) and is_changeable(type(each))) for each in values)
    return not is_torchs or name in _RUN_BACKWARD or name in ("__repr__", "__format__") or any(users)


_PLAIN = (torch.Tensor, str, int, float, type(None), torch.dtype, torch.device)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, _PLAIN):
        return [value]
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in _leaves(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, slice):
        return [leaf for item in (value.start, value.stop, value.step) for leaf in _leaves(item)]
    return pytree.tree_leaves(value)


# Reads


def _as_text(function: Callable[..., Any], run: Functions, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """``repr(x)``, ``f"{x}"``, ``print(x)``: eager's text, by torch's print options."""
    return run.whole(x, in_its_place(lambda: function(x, *args, **kwargs)))


def _as_array(function: Callable[..., Any], run: Functions, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """``x.numpy()``: for real tensors the array in their memory, which must not change; for fake ones a copy of it."""
    array: list[np.ndarray] = []

    def given() -> Any:
        array.append(function(x, *args, **kwargs))
        run.arrays.append((array[0], array[0].copy(), line_of_reading()))
        return run.arrays[-1][1]

    copied = run.whole(x, given)
    return array[0] if array else copied


def _shared(function: Callable[..., Any], run: Functions, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    run.complain("Tensor.__dlpack__", "results of other libraries are not in a graph", "compute it with torch")
    return function(x, *args, **kwargs)


def _of_tensors(function: Any, run: Functions, data: Any, *, dtype=None, device=None, **others: Any) -> Any:
    """``torch.tensor([n, 2 * n])`` of tensors, which torch reads in C++: computed from them."""
    return NotImplemented if any(others.values()) else tensor_of(data, dtype, device or torch.get_default_device())


def _like_tensors(run: Functions, x: torch.Tensor, data: Any, *, dtype=None, device=None, **others: Any) -> Any:
    return NotImplemented if any(others.values()) else tensor_of(data, dtype, device or x.device)


def _split(function: Callable[..., Any], run: Functions, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """``tensor_split`` at positions in a tensor, which torch reads in C++: at numbers that are noted as read."""
    name, rest = "tensor_indices_or_sections", list(args)
    places = kwargs.pop(name) if name in kwargs else rest.pop(0) if rest else None
    if isinstance(places, torch.Tensor) and places.dtype is torch.int64 and places.dim() < 2:
        return function(x, run.numbers(places), *rest, **kwargs)
    return NotImplemented


def _narrowed(function: Callable[..., Any], run: Functions, x: torch.Tensor, dim: int, start: Any, length: int) -> Any:
    """``narrow`` from a start in a tensor, which torch reads in C++: from a number that is noted as read."""
    return function(x, dim, run.numbers(start), length) if isinstance(start, torch.Tensor) else NotImplemented


def _detached(run: Functions, x: torch.Tensor) -> torch.Tensor:
    """``x.data``: the same numbers in the same memory, detached from the graph.

    ``.data`` differs from ``detach()`` only in the version counter: autograd does not see its writes. Inside a custom
    autograd Function the writes are counted, because the counter reveals them.
    """
    made = x.detach()
    if run.rules is None or function_running() is not None or x.is_inference():
        return made
    run.rules.memory.by_data.add(storage_id(x))
    with run.recorder.pause(), no_torch_function():
        uncounted = made.data
    run.recorder.stand_for(uncounted, made)
    return uncounted


def _is_same_data(x: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether ``x.data = value`` changes nothing: ``p.data = p.data.to(p.device)``."""
    with no_torch_function():
        return (form_of(x)[:4], storage_id(x)) == (form_of(value)[:4], storage_id(value))


def _set_data(run: Functions, x: torch.Tensor, value: torch.Tensor) -> Any:
    """``x.data = value``: nothing if ``x`` stays the same; new numbers for a tensor that forward makes.

    An input gets the numbers in its own memory, which is the same for every reader under this name.
    """
    recorder, rules = run.recorder, run.rules
    if _is_same_data(x, value):
        if any(recorder.values.number_of(value) in names for _, names in run.old_names):
            run.complain("Tensor.data =", _OLD_NAME, "clone it")
        return None
    number, value = recorder.values.number_of(x), value.detach()
    if number is None or number >= recorder.record.inputs:
        if not x.is_leaf:  # autograd still tracks it; earlier readers may have saved it, and would see other numbers
            forms, rows = recorder.record.forms, recorder.record.rows
            reading = [row.results for row in rows if number in values_in((row.args, row.kwargs))]
            is_read = any(forms[each].requires_grad for each in values_in(reading))
            if is_read or (x.shape, x.dtype) != (value.shape, value.dtype):
                run.complain("Tensor.data =", _OTHER_MEMORY, "work on a clone")
            else:
                with torch.enable_grad():
                    given, value = value, Overwritten.apply(x, value)
                for each in (given, value) if rules is not None else ():
                    rules.given_to_input("Tensor.data =", each)
        with recorder.pause(), no_torch_function():
            x.data = value.detach()
        recorder.stand_for(x, value)
        return None
    if (x.dtype, x.shape, x.stride()) != (value.dtype, value.shape, value.stride()):
        run.complain("Tensor.data =", _OTHER_MEMORY, "keep its form")
        return NotImplemented
    if rules is not None:
        rules.memory.note_exchange(x)
        rules.given_to_input("Tensor.data =", value)
        memory = recorder.record.memory
        names = {each for each, first in enumerate(memory) if each != number and first == memory[number]}
        run.old_names.append((len(recorder.record.rows) + 2, names))
    with torch.no_grad():
        _detached(run, x).copy_(value)
    return None


def _of_counts(form: Callable[..., Any]) -> Callable[..., Any]:
    return lambda run, *args, **kwargs: form(run.count, *args, **kwargs)


_READ_AS = {TensorBase.__int__: "__int__", TensorBase.__bool__: "__bool__"}
"""Functions that read another number than their operator."""

_FORMS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.data.__get__: _detached,
    torch.Tensor.data.__set__: _set_data,
    TensorBase.tolist: Functions.numbers,
    TensorBase.new_tensor: _like_tensors,
    **{each: partial(_of_tensors, each) for each in (VF.tensor, VF.as_tensor, VF.asarray)},
    **{each: partial(_as_text, each) for each in (torch.Tensor.__repr__, torch.Tensor.__format__)},
    **{each: partial(_as_array, each) for each in (TensorBase.numpy, torch.Tensor.__array__)},
    torch.Tensor.__dlpack__: partial(_shared, torch.Tensor.__dlpack__),
    **{each: partial(_narrowed, each) for each in (VF.narrow, TensorBase.narrow)},
    **{each: partial(_split, each) for each in (VF.tensor_split, TensorBase.tensor_split)},
    **{function: _of_counts(form) for function, form in FORMS.items()},
    TensorBase.__getitem__: at_numbers,
    TensorBase.__setitem__: at_numbers,
}
"""torch's function → its replacement, which takes the mode first and returns the result or ``NotImplemented``."""
