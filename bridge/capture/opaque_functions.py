"""Opaque Functions: a custom ``autograd.Function`` whose operators cannot be recorded → a Function that can be traced.

Its forward and its backward call one operator each, and the program runs the user's code for it
(:mod:`bridge.capture.applications`). The first application shows which arguments the Function keeps and changes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from bridge.base.devices import current_device
from bridge.base.errors import Unsupported
from bridge.base.modes import ambient_autocast, while_active
from bridge.base.pytrees import is_plain, tensor_leaves
from bridge.base.tensor_properties import bits_of
from bridge.base.torch_autograd import node_class
from bridge.base.torch_internals import VF, current_graph_task_id, pytree, storage_id
from bridge.base.torch_recording import own_operator, unrecorded
from bridge.base.torch_shapes import SYMBOLIC
from bridge.capture.applications import Application, application_of, form_of, key_of_application
from bridge.capture.autograd_uses import saved_unseen


class NotTraceable(Exception):
    """A Function cannot be traced; the message is the reason."""


_CODE = ("forward", "setup_context", "backward")
_BASES = [kind for kind in torch.autograd.Function.__mro__ if isinstance(kind, type(torch.autograd.Function))]
_MEMBERS = {name for kind in _BASES for name in vars(kind) if not name.startswith("_")} - {"apply"}
"""Names that a Function may define: its code, and settings that say how it is called."""


class NotedContext:
    """While active, notes forward's calls of ``ctx``, and gives backward the same tensor objects that forward saved.

    Autograd's unpacking may make new tensors of them, which the graph does not know.

    Attributes:
        kind: a Function with the same code, to be applied in the Function's place: no other has nodes of its class.
        partial: whether the Function wants ``None`` for the gradients of unused outputs.
        saved: the tensors that it saved; ``None`` while not active.
    """

    def __init__(self, kind: type) -> None:
        members = {name: getattr(kind, name) for name in _MEMBERS}
        members |= {name: staticmethod(each) for name, each in members.items() if callable(each)}
        self.kind = type(kind.__name__, (torch.autograd.Function,), {**members, "__module__": kind.__module__})
        self.partial, self.saved, node = False, None, node_class(self.kind)

        def note_materialize(ctx: Any, value: bool) -> None:
            self.partial = not value
            super(node, ctx).set_materialize_grads(value)

        def note_saved(ctx: Any, *tensors: Any) -> None:
            self.saved = tensors if self.saved is not None else None
            super(node, ctx).save_for_backward(*tensors)

        def saved(ctx: Any) -> Any:
            return super(node, ctx).saved_tensors if self.saved is None else self.saved

        node.set_materialize_grads, node.save_for_backward = note_materialize, note_saved
        node.saved_tensors = property(saved)

    def __enter__(self) -> None:
        self.saved = ()

    def __exit__(self, *error: object) -> None:
        self.saved = None


class _Thread(threading.local):
    """Per thread: the opaque Functions of its run, and the results of the application that it has just run."""

    run: Opaque | None = None
    results: list[torch.Tensor] | None = None


_thread = _Thread()


def _recorded(key: str, *_: Any) -> list[torch.Tensor]:
    """The results of the application that this thread has just run; meta tensors elsewhere."""
    found, _thread.results = _thread.results, None
    if found is None:
        raise RuntimeError("an autograd.Function that cannot be traced has no second derivative in a compiled call")
    return found


def _forms_of_apply(key: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    application = application_of(key)
    forms = [each[0] for each in application.results if each is not None]
    forms += [application.given[place][0] for place in sorted(application.changed)]
    forms.append(((1,), (1,), torch.uint8))
    device = tensors[0].device
    return [torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype in forms]


def _zero_gradients(key: str, state: torch.Tensor, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    application = application_of(key)
    pairs = zip(application.gradients, application.given, strict=True)
    return [torch.zeros(form[0], dtype=form[2], device=state.device) for has_one, (form, _) in pairs if has_one]


APPLY = own_operator("apply_opaque(str key, Tensor[] tensors) -> Tensor[]", _recorded, _forms_of_apply)
BACKWARD = own_operator("backward_opaque(str key, Tensor state, Tensor[] gradients) -> Tensor[]", _zero_gradients)


@dataclass
class Opaque:
    """The opaque Functions of a run.

    Attributes:
        draws: records the draws of the run, and runs its operators.
        protect: called with each tensor that an application may write.
        applied: keys of the applications, in order.
        known: the keys of the real run, for a run on fake tensors; ``None``: this is the real run.
        made: memory that the Functions have made.
    """

    draws: Any = None
    protect: Callable[[torch.Tensor], None] = lambda tensor: None
    known: Sequence[str] | None = None
    applied: list[str] = field(default_factory=list)
    made: dict[int, StorageWeakRef] = field(default_factory=dict)
    _task: int = -1

    def recorded(self) -> AbstractContextManager[None]:
        """While active, this thread's opaque Functions run here."""
        return while_active(_thread, run=self)

    def called(self, call: Callable[[], Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs an operator of a Function → its result, whose memory is noted.

        Raises:
            NotTraceable: a backward that began meanwhile runs it: it might add to gradients that are the caller's.
        """
        if current_graph_task_id() != self._task:
            raise NotTraceable("runs a backward inside, and cannot be traced")
        made, given = call(), {storage_id(each) for each in tensor_leaves((args, kwargs))}
        for each in tensor_leaves(made):
            if storage_id(each) not in given:
                self.made[storage_id(each)] = StorageWeakRef(each.untyped_storage())
        return made

    def leaks(self, free: Iterable[tuple[torch.Tensor, int]]) -> list[Unsupported]:
        """Refusals of tensors that the Functions have made, and that forward got otherwise than as their results."""
        if not self.made or self.made.keys().isdisjoint([storage_id(each) for each, _ in free]):
            return []
        reason = "a tensor that its forward or backward makes is used outside of it, and it cannot be traced"
        names = dict.fromkeys(application_of(key).kind.__name__ for key in self.applied)
        return [Unsupported(f"autograd.Function {name}", "forward", reason) for name in names]

    def apply(self, kind: type, args: tuple, follows: Sequence[bool]) -> tuple[Application, list[torch.Tensor]]:
        """Applies a Function → the application, and the operator's results; ``follows``: for each argument."""
        leaves, spec = pytree.tree_flatten(args)
        if self.known is not None:
            if any(type(size) in SYMBOLIC for each in tensor_leaves(leaves) for size in each.shape):
                raise NotTraceable("takes sizes that vary, and cannot be traced")
            key = self.known[len(self.applied)]
            self.applied.append(key)
            return application_of(key), APPLY(key, tensor_leaves(leaves))
        tensors = tensor_leaves(leaves)
        if not tensors:
            raise NotTraceable("has no tensor argument")
        if any(each.is_complex() or each.layout is not torch.strided for each in tensors):
            raise NotTraceable("takes complex numbers or sparse tensors, and cannot be traced")
        if closed := [each for name in _CODE for each in _closed_over(getattr(kind, name, None))]:
            raise NotTraceable(f"closes over a {type(closed[0]).__name__}, and cannot be traced")
        constants = tuple(torch.Tensor if isinstance(each, torch.Tensor) else each for each in leaves)
        if odd := [each for each in constants if each is not torch.Tensor and not _is_constant(each)]:
            raise NotTraceable(f"takes a {type(odd[0]).__name__}, and cannot be traced")
        flags = [flag for arg, flag in zip(args, follows, strict=True) for _ in pytree.tree_leaves(arg)]
        pairs = zip(leaves, flags, strict=True)
        given = tuple((form_of(each), flag) for each, flag in pairs if isinstance(each, torch.Tensor))
        application = Application(
            kind, spec, constants, given, any(follows), (current_device().type, ambient_autocast())
        )
        application, results = unrecorded(self._first, (application, tensors), {})
        key = key_of_application(application)
        self.applied.append(key)
        _thread.results = results
        return application, APPLY(key, tensors)

    def _first(
        self, application: Application, tensors: Sequence[torch.Tensor]
    ) -> tuple[Application, list[torch.Tensor]]:
        """Runs an application for the first time, forward and backward → it with forms and effects; its tensors."""
        before, drawn = [each.detach().clone() for each in tensors], len(self.draws.draws)
        for each in tensors:
            self.protect(each)
        noted, self._task = NotedContext(application.kind), current_graph_task_id()
        here = torch.autograd.set_multithreading_enabled(False)  # the mode sees a GPU's backward as well
        with while_active(self.draws, inside=self), saved_unseen(), noted, here:
            given = [each.data for each in tensors]
            addresses = {storage_id(each) for each in given}
            try:
                made, graph = application.run(given, noted.kind)
            except RuntimeError as error:
                if "_Entered" not in str(error):
                    raise
                raise NotTraceable("changes an argument that autograd follows, and cannot be traced") from None
            results = _results(made, addresses, noted.partial)
            application = replace(
                application,
                results=tuple(
                    each if each is None else (form_of(each), place in graph.outputs)
                    for place, each in enumerate(results)
                ),
                is_tuple=isinstance(made, tuple),
                changed=frozenset(n for n, then in enumerate(before) if bits_of(then) != bits_of(tensors[n])),
            )
            gradients: list[Any] = [None] * len(tensors)
            if graph.outputs:
                with_one = (results[place] for place in graph.outputs)
                zeros = [VF.zeros(each.shape, dtype=each.dtype, device=each.device) for each in with_one]
                (node,) = {edge.node for edge in graph.outputs.values()}
                begun = node.register_prehook(lambda _: setattr(self, "_task", current_graph_task_id()))
                gradients = application.backward(graph, zeros)
                begun.remove()
                if any(each._version for each in zeros):
                    raise NotTraceable("its backward changes a tensor in place that was there before")
        if len(self.draws.draws) != drawn:
            raise NotTraceable("draws random numbers, and cannot be traced")
        application = replace(application, gradients=tuple(each is not None for each in gradients))
        values = [each.clone() for each in tensor_leaves(results)]
        values += [tensors[place].detach().clone() for place in sorted(application.changed)]
        return application, [*values, VF.empty(1, dtype=torch.uint8, device=tensors[0].device)]


def _results(made: Any, given: Collection[int], is_partial: bool) -> list[torch.Tensor | None]:
    """The results of a Function, as an operator can return them; ``given``: the memory of its arguments."""
    results = list(made) if isinstance(made, tuple) else [made]
    tensors = [each for each in results if each is not None]
    if not tensors or not all(isinstance(each, torch.Tensor) for each in tensors):
        raise NotTraceable("returns something else than tensors, and cannot be traced")
    if any(each.is_complex() for each in tensors):
        raise NotTraceable("returns complex numbers, and cannot be traced")
    memory = {storage_id(each) for each in tensors}
    if len(memory) < len(tensors) or not memory.isdisjoint(given):
        raise NotTraceable("returns an argument, a view of it or a tensor twice, and cannot be traced")
    if is_partial and len(tensors) > 1:
        raise NotTraceable("has several outputs, and takes None for the gradients of unused ones")
    return results


def _closed_over(function: Any) -> list[Any]:
    """The objects in a function's closures that another call may have others of: no data, function, class or module."""
    function, found = getattr(function, "__wrapped__", function), []
    for cell in getattr(function, "__closure__", None) or ():
        value = cell.cell_contents
        if isinstance(value, FunctionType | staticmethod):
            found += _closed_over(getattr(value, "__func__", value))
        elif not (is_plain(value) or isinstance(value, type | ModuleType)):
            found.append(value)
    return found


def _is_constant(value: Any) -> bool:
    """Whether an argument is the same object in each call: plain data, or a function without a closure."""
    return is_plain(value) or (isinstance(value, FunctionType) and value.__closure__ is None)


_OPAQUE: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


def opaque(kind: type) -> type:
    """A Function → one that can be traced, whose forward and backward call one operator each."""
    found = _OPAQUE.get(kind)
    if found is not None:
        return found
    applied = weakref.ref(kind)

    def forward(ctx: Any, *args: Any) -> Any:
        run: Opaque = _thread.run
        application, made = run.apply(applied(), args, ctx.needs_input_grad)
        ctx.key, state = run.applied[-1], made[-1]
        ctx.save_for_backward(state)
        count = sum(each is not None for each in application.results)
        leaves = tensor_leaves(args)
        for place, now in zip(sorted(application.changed), made[count:-1], strict=True):
            leaves[place].copy_(now)
        results = iter(made[:count])
        results = [None if each is None else next(results) for each in application.results]
        plain = [r for r, each in zip(results, application.results, strict=True) if each is not None and not each[1]]
        ctx.mark_non_differentiable(*plain)
        return tuple(results) if application.is_tuple else results[0]

    def backward(ctx: Any, *grads: Any) -> Any:
        application, (state,) = application_of(ctx.key), ctx.saved_tensors
        given = [g for g, each in zip(grads, application.results, strict=True) if each is not None and each[1]]
        made = iter(BACKWARD(ctx.key, state, given))
        of = dict(zip(application.places, application.gradients, strict=True))
        return tuple(next(made) if of.get(leaf) else None for leaf in _outer_leaves(application))

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward), "__module__": kind.__module__}
    found = _OPAQUE[kind] = type(kind.__name__, (torch.autograd.Function,), members)
    return found


def _outer_leaves(application: Application) -> list[int | None]:
    """The leaf of each argument that is a leaf itself."""
    first, found = 0, []
    for child in application.spec.children():
        found.append(first if child.is_leaf() else None)
        first += child.num_leaves
    return found


def is_opaque(kind: type) -> bool:
    """Whether :func:`opaque` has made a Function."""
    return kind in _OPAQUE.values()
