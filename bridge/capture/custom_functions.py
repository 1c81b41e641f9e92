"""Custom ``autograd.Function`` in a traced graph: the operators of its forward and, beside them, of its backward.

The user's backward replaces autograd's formulas of the forward's operators. So it is traced at once, in the ``ctx``
that eager's backward would have, on *tangents*: placeholders for the unknown gradients of the outputs:

    custom_gradient(inputs, gradients, tangents)     links inputs to their gradients for the outputs' tangents
    with_gradient(output, its field of that)         the output, whose gradient goes only to that field

:mod:`autodiff.differentiate` puts the gradients in the tangents' places. The backward shares with the forward every
value that depends on no tangent, so that the partition chooses the saved tensors.

Why that is exact: autograd sees nothing inside of a Function either. Refused by name are tensors made inside and used
outside, tensors that backward reads and that are written later, and effects that a graph of tensors cannot hold.

An argument that autograd tracks and forward writes (TabNet's sparsemax, ``mark_dirty``) is passed as a copy, which is
written back afterwards: with the Function's gradient if it returns the argument, else with the old value's gradient.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from textwrap import shorten
from types import MappingProxyType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from bridge.base.errors import Unsupported, UnsupportedModule, swallowed, user_line
from bridge.base.modes import autocast_to, while_active
from bridge.base.torch_autograd import GENERATED, FunctionNode, applications_through, apply_function
from bridge.base.torch_higher_order import INDEX
from bridge.base.torch_internals import no_torch_function, pytree, set_grad_enabled, storage_id
from bridge.base.torch_recording import own_operator
from bridge.capture.autograd_uses import AnotherRunError
from bridge.capture.opaque_functions import NotedContext, NotTraceable, Opaque, is_opaque, opaque
from bridge.capture.rows import values_in, written
from bridge.guards import read_later

FUNCTION = own_operator("function(int number) -> ()", lambda number: None)
"""Marks the start of a Function's forward, during the trace."""
TANGENT = own_operator(
    "tangent(Tensor like, int number, int index) -> Tensor",
    lambda like, number, index: torch.zeros(like.shape, dtype=like.dtype, device=like.device),
)
CUSTOM_GRADIENT = own_operator(
    "custom_gradient(Tensor[] inputs, Tensor[] gradients, Tensor[] tangents) -> Tensor[]",
    lambda inputs, gradients, tangents: [torch.zeros_like(each) for each in tangents],
)
WITH_GRADIENT = own_operator(
    "with_gradient(Tensor output, Tensor? gradient) -> Tensor",
    lambda output, gradient: output.clone(memory_format=torch.contiguous_format),
)
for _op in (FUNCTION, WITH_GRADIENT):
    torch.fx.node.has_side_effect(_op)  # keeps them from dead code elimination

AGAIN, ONCE, UNKNOWN = "again", "once", "unknown"
OWN = "own"
"""The key in ``meta`` of a node inside a Function: its number, part and ``Use.again``."""


class _Thread(threading.local):
    """Per thread: the handler and the DTensors of the run, the chosen Functions, the Function that runs."""

    handler: Callable[[type, tuple, dict[str, Any]], Any] | None = None
    distributed: Any = None
    chosen: Chosen | None = None
    inside: Inside | None = None


_thread = _Thread()
_TORCHS_OWN = ("CheckpointFunction", "_NoopSaveInputs")  # their backward runs forward again, or never runs


@dataclass(frozen=True)
class Use:
    """One application of a Function in grad mode.

    Attributes:
        name: the Function's name.
        without: positions among its tensor arguments for which backward returns ``None``.
        again: whether its backward may be differentiated: :data:`AGAIN`, :data:`ONCE` (torch's error) or
            :data:`UNKNOWN` (it sets grad modes, which the graph does not hold).
    """

    name: str
    without: frozenset[int] = frozenset()
    again: str = "again"


class Overwritten(torch.autograd.Function):
    """A tensor with new numbers that were written unseen by autograd; its gradient stays the old tensor's."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, now: torch.Tensor):
        return now.clone()

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor):
        return grad_out.clone(), None


class CustomFunctions:
    """The Functions that a run of a module applies.

    Args:
        module_name: the module's name for refusals.
        recorder: of the run, whose rows show the reads and writes of forward and backward.
        writing: classes of Functions that write arguments that autograd tracks → (positions of the written arguments
            that they return, positions of the others).
        known: in a run on fake tensors, the keys of the opaque applications of the real run.

    Attributes:
        opaque: the opaque Functions.
        uses: the applications, in order; ``nodes``: autograd's node of each → its use.
        problems: refusals found after an application.
        shared: the memory of outputs that are views of an argument.
        lines: name of each of torch's Functions that is not traced → the user's line.
    """

    def __init__(
        self,
        module_name: str,
        recorder: Any,
        writing: Mapping[tuple[str, str], tuple[frozenset[int], frozenset[int]]] = MappingProxyType({}),
        known: Sequence[str] | None = None,
    ) -> None:
        self._module_name, self.writing = module_name, writing
        self.opaque = Opaque(protect=recorder.protect, known=known)
        self._record, self._values, self._distributed = recorder.record, recorder.values, recorder.values.distributed
        self.uses: list[Use] = []
        self.problems: list[Unsupported] = []
        self.nodes: dict[Any, Use] = {}
        self.shared: set[int] = set()
        self.lines: dict[str, str] = {}
        self._read: list[tuple[str, str, set[int], int]] = []

    @contextmanager
    def traced(self) -> Iterator[None]:
        """While active, this thread's Functions record the operators of their backward as well."""
        with _handled_by(self._trace, self._distributed), self.opaque.recorded():
            yield
            self.problems += self.opaque.leaks(self._record.free.values())
            for name, where, memory, end in self._read:
                if not memory.isdisjoint(self._written(end)):
                    reason = "its backward reads a tensor that forward changes in place afterwards"
                    problem = Unsupported(f"autograd.Function {name}", where, reason, "clone what it saves")
                    self.problems.append(problem)
                    break
            self._read.clear()

    def _memory(self, numbers: Iterable[int]) -> set[int]:
        record = self._record
        return {record.memory[record.same.get(number, number)] for number in numbers}

    def _written(self, start: int) -> set[int]:
        """The memory that rows write from row ``start`` on."""
        return self._memory(number for row in self._record.rows[start:] for number in values_in(written(row)))

    def _numbers(self, tensors: Iterable[Any]) -> set[int | None]:
        return {self._values.number_of(each) for each in tensors if isinstance(each, torch.Tensor)}

    def _trace(self, kind: type, args: tuple, kwargs: dict[str, Any]) -> Any:
        name, where = kind.__name__, user_line(traceback.extract_stack()) or "forward"
        if _is_torchs_own(kind):
            self.lines[name] = where
            return apply_function(kind, args, kwargs)
        try:
            return self._traced_application(kind, args, kwargs, name, where)
        except NotTraceable as refused:
            problem = Unsupported(f"autograd.Function {name}", where, str(refused))
            raise UnsupportedModule(self._module_name, [problem]) from None

    def _traced_application(self, kind: type, args: tuple, kwargs: dict[str, Any], name: str, where: str) -> Any:
        if kwargs:
            raise NotTraceable("is applied to keyword arguments")
        inside, ctx = Inside(), NotedContext(kind)
        tensors = {place: arg for place, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
        given, followed = [*tensors.values()], {place: arg for place, arg in tensors.items() if arg.requires_grad}
        returned, others = self.writing.get(name_of(kind), (frozenset(), frozenset()))
        copies = {place: args[place].clone() for place in others & followed.keys()}
        number = len(self.uses)
        with while_active(_thread, inside=inside), ctx:
            FUNCTION(number)
            copies |= {place: args[place].clone() for place in returned & followed.keys()}
            inside.copies = frozenset(map(storage_id, copies.values()))
            inside.runs_forward, start, first = True, len(self._record.rows), len(self._record.forms)
            made = apply_function(ctx.kind, tuple(copies.get(place, arg) for place, arg in enumerate(args)), kwargs)
            inside.runs_forward = False
            memory = self._written(start)
            changed = {n for n, arg in followed.items() if not memory.isdisjoint(self._memory(self._numbers([arg])))}
            if any(n in copies or storage_id(followed[n]) in self.shared or followed[n].is_leaf for n in changed):
                raise NotTraceable("changes its arguments in place")
            if changed:
                same = {place for place in changed if any(each is args[place] for each in tensors_in(made))}
                places = frozenset(same) | returned, frozenset(changed - same) | others
                raise AnotherRunError(writing={name_of(kind): places})
            outputs = list({id(each): each for each in tensors_in(made)}.values())
            nodes = {each.grad_fn for each in outputs if isinstance(each.grad_fn, FunctionNode)}
            if not nodes:
                without = frozenset(range(len(given)))
                with torch.no_grad(), autocast_to(None):  # as in a backward
                    for each in outputs:
                        WITH_GRADIENT(each, None)
            else:
                (node,) = nodes
                without = self._backward(node, made, args, (number, first), inside, ctx, name, where)
                if is_opaque(kind):  # it may keep its arguments and results
                    kept = self._numbers((*map(copies.get, tensors, tensors.values()), *outputs)) - {None}
                    self._read.append((name, where, self._memory(kept), len(self._record.rows)))
        is_once = getattr(kind.backward, "__code__", None) is once_differentiable(lambda *_: None).__code__
        again = ONCE if is_once else UNKNOWN if inside.sets_modes else AGAIN
        self.uses.append(Use(name, without, again))
        memory = {storage_id(each) for each in given}
        for each in tensors_in(made):
            if isinstance(each.grad_fn, FunctionNode):
                self.nodes[each.grad_fn] = self.uses[-1]
            if storage_id(each) in memory:
                self.shared.add(storage_id(each))
        for place, copied in copies.items():
            seen = place in returned
            args[place].copy_(copied if seen else self._trace(Overwritten, (args[place], copied.detach()), {}))
        back = {id(copied): args[place] for place, copied in copies.items()}
        return pytree.tree_map_only(torch.Tensor, lambda each: back.get(id(each), each), made) if back else made

    def _backward(
        self,
        node: Any,
        made: Any,
        args: tuple,
        begun: tuple[int, int],
        inside: Inside,
        ctx: NotedContext,
        name: str,
        where: str,
    ) -> frozenset[int]:
        """Records backward → the positions of the tensor arguments that get no gradient from it.

        ``begun``: the number of the application, and of the first value that forward made.
        """
        (number, made_first), record = begun, self._record
        results, partial = made if isinstance(made, tuple) else (made,), ctx.partial
        followed = [each for each in results if isinstance(each, torch.Tensor) and each.grad_fn is node]
        if len({id(each) for each in followed}) != len(followed):
            raise NotTraceable("returns a tensor twice")
        if partial and len(followed) > 1:
            raise NotTraceable("has several outputs, and takes None for the gradients of unused ones")
        needed = [index for index, needs in enumerate(node.needs_input_grad) if needs]
        with torch.no_grad(), autocast_to(None):  # as in a backward
            tangents = {id(each): TANGENT(each, number, index) for index, each in enumerate(followed)}
            upstream = [
                tangents.get(
                    id(each), None if partial or not isinstance(each, torch.Tensor) else torch.zeros_like(each)
                )
                for each in results
            ]
            start, first = len(record.rows), len(record.forms)
            with while_active(inside, runs_backward=True), read_later():
                found = _gradients(node, upstream, len(args))
            used = {number for row in record.rows[start:] for number in values_in((row.args, row.kwargs))}
            used = {number for number in used if number < first or number in record.free}
            found = [_fitting(each, args[i]) if i in needed else None for i, each in enumerate(found)]
            if inside.unheld is not None:
                raise NotTraceable(f"its backward cannot be traced: it {inside.unheld}")
            known = self._numbers((*ctx.saved, *results)) | {*range(made_first, first)} - record.free.keys()
            if not used <= known:
                raise NotTraceable(
                    "its backward reads a tensor that forward did not save, and that may change until then"
                )
            if any(memory < first for memory in self._written(start)):
                raise NotTraceable("its backward changes a tensor in place that was there before")
            with_one = [index for index in needed if found[index] is not None]
            fields = CUSTOM_GRADIENT([args[i] for i in with_one], [found[i] for i in with_one], list(tangents.values()))
            field = dict(zip(tangents, fields, strict=True))
            for each in {id(each): each for each in tensors_in(results)}.values():
                WITH_GRADIENT(each, field.get(id(each)))
        self._read.append((name, where, self._memory(used), len(record.rows)))
        tensors = [index for index, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        return frozenset(place for place, index in enumerate(tensors) if index not in with_one)


def _gradients(node: Any, upstream: Sequence[torch.Tensor | None], count: int) -> list[Any]:
    """Runs backward → its gradient, or ``None``, for each of ``count`` arguments."""
    try:
        found = node.apply(*upstream)
    except (UnsupportedModule, AnotherRunError):
        raise
    except Exception as error:  # backward runs the user's code, which may raise any error on fake tensors
        swallowed(error)
        words = shorten(str(error), 200, placeholder=" …")
        raise NotTraceable(f"its backward cannot be traced: {type(error).__name__}: {words}") from error
    found = list(found) if isinstance(found, tuple) else [found]
    if len(found) < count or any(each is not None for each in found[count:]):
        raise NotTraceable(f"its backward returns {len(found)} gradients for {count} arguments")
    return found[:count]


def _fitting(gradient: Any, argument: torch.Tensor) -> torch.Tensor | None:
    """The gradient in the argument's shape and dtype; ``None`` for none."""
    if gradient is None:
        return None
    if not isinstance(gradient, torch.Tensor) or gradient.layout is not torch.strided:
        raise NotTraceable("its backward returns something else than a dense tensor")
    if gradient.shape != argument.shape:
        try:
            gradient = gradient.sum_to_size(argument.shape)
        except RuntimeError:
            shapes = f"{tuple(gradient.shape)} for an argument of shape {tuple(argument.shape)}"
            raise NotTraceable(f"its backward returns a gradient of shape {shapes}") from None
    if gradient.is_complex() != argument.is_complex():
        raise NotTraceable("its backward returns complex numbers for real ones, or the reverse")
    return gradient.to(argument.dtype)


@contextmanager
def _handled_by(handler: Callable[[type, tuple, dict[str, Any]], Any], distributed: Any) -> Iterator[None]:
    """While active, the handler runs this thread's applications in grad mode; other applications run as before.

    An application inside of the handler runs as before: a Function's forward and backward run without grad mode. The
    handler also runs an application to tensors that autograd does not track, because its forward may reach tracked
    tensors in a list or a closure.
    """

    def apply(kind: type, *args: Any, **kwargs: Any) -> Any:
        current, into, inside = _thread.handler, _thread.distributed, backward_running()
        if inside is not None:
            inside.sets_modes = True
        if into is not None and (made := into.applied(kind, args)) is not NotImplemented:
            return made
        is_torchs = kind is INDEX or kind.__name__.startswith(GENERATED)
        is_opaque = False
        if (chosen := _thread.chosen) is not None and current is not None and not (is_torchs or _is_torchs_own(kind)):
            chosen.applied.add(name_of(kind))
            is_opaque = name_of(kind) in chosen.kinds
        if current is None or is_torchs or not (is_opaque or torch.is_grad_enabled()):
            return apply_function(kind, args, kwargs)
        with while_active(_thread, handler=None):
            return current(opaque(kind) if is_opaque else kind, args, kwargs)

    with while_active(_thread, handler=handler, distributed=distributed), applications_through(apply):
        yield


def _is_torchs_own(kind: type) -> bool:
    return kind.__name__.startswith(_TORCHS_OWN)


def name_of(kind: type) -> tuple[str, str]:
    """Module and name of a Function: forward may make the class anew in each run."""
    return kind.__module__, kind.__qualname__


@dataclass
class Chosen:
    """Functions, by name, that are opaque in this thread's captures, and all Functions that were applied."""

    kinds: frozenset[tuple[str, str]] = frozenset()
    applied: set[tuple[str, str]] = field(default_factory=set)

    def active(self) -> AbstractContextManager[None]:
        """While active, this choice holds."""
        return while_active(_thread, chosen=self)


def functions_of_torchs() -> AbstractContextManager[None]:
    """While active, this thread's applications run without the handler: they are not forward's."""
    return while_active(_thread, handler=None)


def function_running() -> Inside | None:
    """The Function whose forward or backward runs in this thread, or ``None``."""
    return _thread.inside


def backward_running() -> Inside | None:
    """The Function whose backward is traced in this thread, or ``None``."""
    inside = function_running()
    return inside if inside is not None and inside.runs_backward else None


@dataclass
class Inside:
    """State inside a Function, where grad modes have no effect on the graph, because autograd tracks nothing.

    While the Function runs, the mode of torch functions (:mod:`bridge.capture.functions`) calls :meth:`called`.

    Attributes:
        runs_forward, runs_backward: whether forward runs, or backward.
        unheld: an effect of backward that no graph holds, in words: reads a number, draws.
        copies: the memory of its copied arguments, which it may write.
        sets_modes: whether forward enables grad, or backward sets it or applies a Function (for second derivatives).
    """

    runs_forward: bool = False
    runs_backward: bool = False
    unheld: str | None = None
    copies: frozenset[int] = frozenset()
    sets_modes: bool = False

    def called(self, call: Callable[..., Any], func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Calls a torch function by ``call(func, args, kwargs)`` → its result; notes changes of grad mode."""
        if func is set_grad_enabled:
            self.sets_modes |= self.runs_backward or (self.runs_forward and args[0])
            with no_torch_function():
                return func(*args)
        return call(func, args, kwargs)


def tensors_in(made: Any) -> list[torch.Tensor]:
    fields = made if isinstance(made, tuple | list) else (made,)
    return [each for each in fields if isinstance(each, torch.Tensor)]
