"""A run of the user's module on fake tensors, to learn what eager PyTorch does and an exported graph no longer says.

``torch.export`` gives a functional graph: aliasing, the order and the memory layout of random draws (draws whose
result nobody uses included), what autograd reaches, custom ``autograd.Function``s and in-place tricks are gone from
it. Under ``FakeTensorMode`` the module runs as eager would, through the real dispatcher and autograd, without
computing anything, without touching the generator and without touching the module's tensors. What is seen here is
the reference that the compiled module must reproduce; what cannot be reproduced is refused by name.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bridge.base.errors import Unsupported, user_line
from bridge.base.threads import is_alone
from bridge.base.torch_internals import (
    TorchDispatchMode,
    applied_function,
    compiling_flags,
    current_graph_task_id,
    is_dense,
    pytree,
    schema,
    storage_id,
)
from bridge.capture.call_log import CallSequence
from bridge.capture.op_trace import OpTrace
from bridge.capture.overlap import overlaps
from bridge.capture.tracing import HERE, note_change_of_generator
from bridge.state.snapshot import modes_put_back, moved_generators

__all__ = ["CHANGES_ARGUMENT", "Draw", "Output", "Witness", "observe", "record_draws"]


CHANGES_ARGUMENT = "changes a tensor that was passed to the module"


@dataclass(frozen=True)
class Draw:
    """One random draw of eager's generator.

    Attributes:
        op: the ATen operator that drew, as in ``"aten.bernoulli_.float"``.
        shape, stride, dtype: of the tensor that it filled; the order in memory is the order of the draws.
        args: its further arguments: numbers, strings, dtypes (for bernoulli_: the probability of a one).
        kwargs: its keyword arguments.
    """

    op: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Output:
    """One leaf of the module's result, as eager returns it.

    Attributes:
        value: the leaf itself if it is not a tensor.
        is_tensor: whether it is a tensor.
        alias_of: ``("input", i)`` or ``("output", j)`` when it shares the memory of the i-th module tensor or
            argument, or of an earlier output that spans its memory; ``None`` when the memory is its own.
        is_same_object: the very same tensor object as ``alias_of``.
        shape, stride, offset, dtype: of the tensor; the offset (in elements) is relative to ``alias_of``.
        requires_grad: whether autograd tracks it.
        reaches: indices of the inputs that its autograd graph reaches.
    """

    value: Any = None
    is_tensor: bool = False
    alias_of: tuple[str, int] | None = None
    is_same_object: bool = False
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype | None = None
    requires_grad: bool = False
    reaches: frozenset[int] = frozenset()


@dataclass
class Witness:
    """What one eager call did: its outputs, its draws in order, and whatever stands in the way of compiling it.

    ``calls`` are the torch functions that forward called, ``trace`` are the operators that ran
    (:mod:`bridge.capture.op_trace`): ``None`` where they cannot be compared with those of another call. ``results``
    are the leaves of its result if its tensors were real.
    """

    outputs: list[Output] = field(default_factory=list)
    out_spec: Any = None
    draws: list[Draw] = field(default_factory=list)
    unsupported: list[Unsupported] = field(default_factory=list)
    calls: CallSequence = field(default_factory=CallSequence)
    trace: tuple | None = None
    results: list[Any] = field(default_factory=list)


class _DrawRecorder(TorchDispatchMode):
    """Appends a :class:`Draw` for every random operator that runs; tells what it cannot express.

    With a ``trace``, every operator is written down there.
    """

    def __init__(self, draws: list[Draw], complain: Callable[[str, str], None], trace: OpTrace | None = None):
        super().__init__()
        self.draws = draws
        self.complain = complain
        self.trace = trace
        self.in_backward = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.trace is None:
            result = func(*args, **(kwargs or {}))
        else:
            arguments = self.trace.arguments(func, args, kwargs or {})
            with _unwatched():
                result = func(*args, **(kwargs or {}))
            self.trace.add(func, arguments, result)
        if current_graph_task_id() != -1 and not torch.is_grad_enabled() and not self.in_backward:
            self.in_backward = True  # said once
            self.complain("torch.autograd.grad or backward", "runs autograd inside forward: its result is a constant")
        if torch.Tag.nondeterministic_seeded in func.tags and not _draws_nothing(func, args):
            self._record(func, args, kwargs or {}, result)
        return result

    def _record(self, func, args, kwargs, result) -> None:
        if isinstance(result, tuple):  # native_dropout called by name: the mask is what was drawn
            result = result[1] if str(func) == "aten.native_dropout.default" else result[0]
        # the dispatcher drops arguments that equal their default
        defaults = [a.default_value for a in schema(func).arguments[len(args) :] if not a.kwarg_only]
        args = (*args, *(value for value in defaults if value is not None))
        if str(func) == "aten.bernoulli.p" and args[0].requires_grad:
            self.complain(str(func), "eager has no derivative of it, and fails in the backward")
            return
        rest = args[1:] if _only_filled(func) else args
        values = (*rest, *kwargs.values())
        if any(isinstance(value, torch.Tensor) for value in values) or kwargs.get("generator") is not None:
            self.complain(str(func), "a random draw whose distribution is computed, or from a generator of its own")
            return
        self.draws.append(
            Draw(str(func), tuple(result.shape), result.stride(), result.dtype, tuple(rest), tuple(kwargs.items()))
        )


def _only_filled(func) -> bool:
    """Whether the operator's first tensor only says what to fill, and is no parameter of the distribution."""
    _, packet, _ = str(func).split(".")
    return packet.endswith(("_", "_like", "dropout")) or str(func) == "aten.bernoulli.p"


def _draws_nothing(func, args) -> bool:
    name = str(func)
    if name in ("aten.native_dropout.default", "aten.dropout.default"):
        return not args[2] or args[1] == 0 or args[0].numel() == 0
    # tagged, but random only when asked for dropout
    if "scaled_dot_product" in name:
        return not any(isinstance(arg, float) and arg > 0 for arg in args[3:])
    return False


class _InPlaceWatcher(TorchFunctionMode):
    """Sees every torch call of the module and reports in-place tricks that a functional graph would get wrong."""

    def __init__(self, watch: _Watch, calls: CallSequence):
        super().__init__()
        self.watch = watch
        self.calls = calls

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.watch.look_for_custom_function()
        name = getattr(func, "__name__", str(func))
        values = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in values if isinstance(leaf, torch.Tensor)]
        if name in ("register_hook", "retain_grad", "register_post_accumulate_grad_hook"):
            self.watch.complain(f"Tensor.{name}", "a tensor hook set inside forward")
        versions = [tensor._version for tensor in tensors]
        result = func(*args, **kwargs)
        written = [tensor for tensor, version in zip(tensors, versions, strict=True) if tensor._version != version]
        for tensor in written:
            self.watch.mutated(name, tensor)
        results = _leaves(result)
        for leaf in results:
            if isinstance(leaf, torch.Tensor):
                self.watch.returned(name, tensors, leaf)
        self.calls.add(name, values, tensors, results, written)
        return result


class _Watch:
    """The rules: what may be written in place, given who else can see the memory."""

    def __init__(self, arguments: Sequence[Any], parameters: Sequence[torch.Tensor]):
        self.unsupported: list[Unsupported] = []
        self._argument_storages = {storage_id(a) for a in arguments if isinstance(a, torch.Tensor)}
        self._parameter_storages = {storage_id(p) for p in parameters}
        self._detached: set[int] = set()
        self.custom_functions: dict[str, str] = {}

    def look_for_custom_function(self) -> None:
        """Inside the forward of a custom autograd.Function: remembers where the user applied it."""
        applied = applied_function(sys._getframe(2))
        if applied is not None and applied[0] not in self.custom_functions:
            name, caller = applied
            self.custom_functions[name] = user_line(traceback.extract_stack(caller)) or name

    def complain(self, op: str, reason: str, hint: str | None = None) -> None:
        where = user_line(traceback.extract_stack()) or "a line outside the module's own code"
        extra = {"hint": hint} if hint else {}
        self.unsupported.append(Unsupported(op, where, reason, **extra))

    def custom_function(self, name: str) -> None:
        op = f"autograd.Function {name}"
        if any(known.op == op for known in self.unsupported):
            return
        where = self.custom_functions.get(name, "forward")
        reason = "a custom autograd.Function: its backward is Python code that a graph does not hold"
        self.unsupported.append(Unsupported(op, where, reason))

    def foreign_draw(self, name: str, where: str | None = None) -> None:
        """A draw from Python's or numpy's generator, which is said once."""
        if not any(known.op == name for known in self.unsupported):
            reason = "draws from a generator that is not torch's: a compiled call would repeat one number for ever"
            hint = "draw with torch, or outside of the module and pass the number in"
            if where is None and not is_alone():
                hint += "; if it is another thread that draws, add the dispatch before it does"
            self.unsupported.append(Unsupported(name, where or "forward", reason, hint))

    def new_leaf(self) -> None:
        """A result depends on a tensor that requires grad and is no parameter and no argument."""
        op = "requires_grad_"
        if not any(known.op == op for known in self.unsupported):
            reason = "makes a tensor inside forward that requires grad by itself"
            self.unsupported.append(Unsupported(op, "forward", reason, "make it a parameter or an argument"))

    def mutated(self, name: str, tensor: torch.Tensor) -> None:
        storage = storage_id(tensor)
        if storage in self._argument_storages:
            self.complain(name, CHANGES_ARGUMENT, "work on a clone: x = x.clone() before it")
        elif storage in self._parameter_storages:
            self.complain(name, "changes a parameter inside forward", "move the update out of forward")
        elif storage in self._detached:
            self.complain(
                name, "changes memory in place that autograd sees under another name (detach, no_grad)", "clone first"
            )
        elif not torch.is_grad_enabled() and tensor.requires_grad:
            self.complain(name, "changes a tensor in place behind autograd's back (no_grad)", "clone first")

    def returned(self, name: str, sources: Sequence[torch.Tensor], result: torch.Tensor) -> None:
        if result.requires_grad:
            return
        if any(source.requires_grad and storage_id(source) == storage_id(result) for source in sources):
            self._detached.add(storage_id(result))


# Without setstate: Dynamo puts the generator back whenever it looks at a frame. A state that moves is seen anyway.
_PYTHONS_DRAWS = ("random", "getrandbits", "seed")
_RESEEDING = ("manual_seed", "seed", "set_state", "graphsafe_set_state", "set_offset")


def _geometry(tensor: torch.Tensor) -> tuple:
    """What an in-place change of a tensor's own description alters; a write of numbers has its own rules."""
    is_leaf_with_grad = tensor.grad_fn is None and tensor.requires_grad
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), storage_id(tensor), is_leaf_with_grad


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in _leaves(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    return []


def _exporting_flags() -> AbstractContextManager:
    """Libraries branch on ``torch.compiler.is_exporting()``, ``is_compiling()``: take the exported graph's branch.

    On real tensors too: transformers looks for packed sequences in numbers, but not while anything is traced.
    """
    return compiling_flags(HERE)


@contextmanager
def _generator_watch(watch: _Watch):
    """Complains when forward seeds a generator or sets its state, or draws from one that is not torch's: replayed draws
    would not follow.

    Nothing of torch's dispatcher passes there, so this listens to the interpreter's calls of C functions: those of
    the user's Python code, not those that torch makes to run an operator on fake tensors (see :func:`_unwatched`).
    """

    def listen(frame: FrameType, event: str, called: Any) -> None:
        if event != "c_call":
            return
        owner = getattr(called, "__self__", None)
        if isinstance(owner, torch.Generator):
            if called.__name__ in _RESEEDING:
                note_change_of_generator()
                watch.complain(f"torch.Generator.{called.__name__}", "changes a random generator inside forward")
        elif isinstance(owner, random.Random) and called.__name__ in _PYTHONS_DRAWS:
            watch.foreign_draw("random", user_line(traceback.extract_stack()))

    before = sys.getprofile()
    sys.setprofile(listen)
    try:
        with moved_generators() as moved:
            yield
        for name in moved:
            watch.foreign_draw(name)
    finally:
        sys.setprofile(None)
        if hasattr(before, "enable"):  # cProfile's profiler is no function that could be set again
            before.enable()
        else:
            sys.setprofile(before)


@contextmanager
def _unwatched():
    """While an operator runs on fake tensors: a listener would be called for each of its thousands of Python calls."""
    listener = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(listener)


def record_draws(run: Callable[[], Any], draws: list[Draw]) -> Any:
    """Runs ``run`` (on fake tensors) and appends its random draws to ``draws``."""
    with _DrawRecorder(draws, lambda op, reason: None):
        return run()


def observe(
    module: torch.nn.Module,
    state: dict[str, torch.Tensor],
    parameters: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    args: tuple,
    kwargs: dict[str, Any],
    mode: AbstractContextManager,
    *,
    traced: bool = True,
) -> Witness:
    """Runs ``module``, on fake tensors unless told otherwise, and reports what eager does.

    Args:
        module: the user's module; it is not changed.
        state: fake tensors for its parameters and buffers by name.
        parameters: those of them that are parameters.
        inputs: fake module tensors and argument tensors, in the order that indices in the result refer to.
        args, kwargs: the sample with fake tensors in it.
        mode: the fake mode that all of them belong to; of real ones, a context that does nothing.
        traced: whether the trace is wanted. It keeps every tensor until it is complete.
    """
    argument_leaves, argument_spec = pytree.tree_flatten((args, kwargs))
    watch = _Watch(argument_leaves, parameters)
    witness = Witness(unsupported=watch.unsupported)
    trace = OpTrace(inputs) if traced else None
    recorders = _InPlaceWatcher(watch, witness.calls), _DrawRecorder(witness.draws, watch.complain, trace)
    geometry = [_geometry(tensor) for tensor in inputs]
    with modes_put_back() as modes:
        with mode, _exporting_flags(), _generator_watch(watch), recorders[0], recorders[1]:
            result = torch.func.functional_call(module, state, args, kwargs, tie_weights=False)
    if geometry != [_geometry(tensor) for tensor in inputs] and not watch.unsupported:
        reason = "gives a tensor of the module's or the caller's another shape, memory or requires_grad"
        watch.complain("detach_, requires_grad_, set_ or a view in place", reason, "work on a view or a clone of it")
    for changed in modes:
        reason = "forward leaves it changed for what comes after the call"
        watch.unsupported.append(Unsupported(changed, "forward", reason, "set it around the call"))
    leaves_now, spec_now = pytree.tree_flatten((args, kwargs))
    if spec_now != argument_spec or any(now is not then for now, then in zip(leaves_now, argument_leaves, strict=True)):
        reason = "changes a list, a dict or an object that was passed to the module"
        watch.unsupported.append(Unsupported("an argument", "forward", reason, "work on a copy of it"))
    for tensor in set(state.values()) - set(parameters):
        if tensor.requires_grad and tensor.grad_fn is not None:
            watch.complain("buffer", "forward leaves a buffer that requires grad", "update it under torch.no_grad()")
    leaves, witness.out_spec = pytree.tree_flatten(result)
    if not traced:
        witness.results = leaves
    _describe_outputs(leaves, inputs, witness, watch)
    own = [leaf for leaf, seen in zip(leaves, witness.outputs, strict=True) if seen.is_tensor and not seen.alias_of]
    witness.unsupported += overlaps(own)
    witness.trace = trace.finish(leaves, list(state.items())) if trace else None
    return witness


def _describe_outputs(leaves: Sequence[Any], inputs: Sequence[torch.Tensor], witness: Witness, watch: _Watch) -> None:
    by_storage = {storage_id(tensor): ("input", index) for index, tensor in reversed(list(enumerate(inputs)))}
    index_of = {id(tensor): index for index, tensor in enumerate(inputs)}
    seen_outputs: dict[int, int] = {}
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            witness.outputs.append(Output(value=leaf))
            continue
        alias, same = None, False
        if id(leaf) in index_of:
            alias, same = ("input", index_of[id(leaf)]), True
        elif id(leaf) in seen_outputs:
            alias, same = ("output", seen_outputs[id(leaf)]), True
        elif storage_id(leaf) in by_storage and leaf.numel():
            alias = by_storage[storage_id(leaf)]
        elif leaf.numel():
            alias = _spanning_output(leaf, index, leaves)
        seen_outputs.setdefault(id(leaf), index)
        base = (inputs if alias[0] == "input" else leaves)[alias[1]] if alias else leaf
        if leaf.requires_grad and leaf.grad_fn is None and not same:
            witness.unsupported.append(
                Unsupported("requires_grad_", "the module's result", "returns a new leaf that requires grad")
            )
        if leaf.dtype != base.dtype:
            reason = "returns a view of another dtype of something that the caller can see"
            witness.unsupported.append(Unsupported("view_dtype", "the module's result", reason))
        reaches = _reachable(leaf, inputs, watch)
        witness.outputs.append(
            Output(
                is_tensor=True,
                alias_of=alias,
                is_same_object=same,
                shape=tuple(leaf.shape),
                stride=leaf.stride(),
                offset=leaf.storage_offset() - base.storage_offset(),
                dtype=leaf.dtype,
                requires_grad=leaf.requires_grad,
                reaches=reaches,
            )
        )


def _spanning_output(leaf: torch.Tensor, position: int, leaves: Sequence[Any]) -> tuple[str, int] | None:
    """The output that owns the memory and covers all of it, so that ``leaf`` is a view of it.

    Of several, the first of those that require grad, if any does. ``None`` for that one itself.
    """
    group = [
        (index, other)
        for index, other in enumerate(leaves)
        if isinstance(other, torch.Tensor) and storage_id(other) == storage_id(leaf) and _spans(other)
    ]
    for index, other in sorted(group, key=lambda pair: (not pair[1].requires_grad, pair[0])):
        if index == position:
            return None
        if other.dtype == leaf.dtype and (other.requires_grad or not leaf.requires_grad):
            return "output", index
    return None


def _spans(tensor: torch.Tensor) -> bool:
    covers = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    return covers and tensor.storage_offset() == 0 and is_dense(tensor)


def _reachable(leaf: torch.Tensor, inputs: Sequence[torch.Tensor], watch: _Watch) -> frozenset[int]:
    """Indices of the inputs whose gradient ``leaf`` contributes to; complains about custom autograd functions."""
    index_of = {id(tensor): index for index, tensor in enumerate(inputs)}
    found: set[int] = set()
    seen: set[Any] = set()
    stack = [leaf.grad_fn] if leaf.grad_fn is not None else []
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and id(node.variable) in index_of:
            found.add(index_of[id(node.variable)])
        elif hasattr(node, "variable"):
            watch.new_leaf()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            watch.custom_function(type(node).__name__.removesuffix("Backward"))
        stack.extend(parent for parent, _ in node.next_functions if parent is not None)
    return frozenset(found)
