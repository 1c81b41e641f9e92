"""While one thread captures a module, the others go on as if nothing happened.

``torch.export`` and the runs on fake tensors change things that every thread of the process sees. Here each of them is
made to be seen by the capturing thread alone:

    ``nn.Module.__call__`` and ``__getattr__``, and        functions that ask whether the calling thread captures
    ``max``, ``min``, ``math.pow``
    ``torch.compiler.is_compiling`` and its kin            a flag that is true in that thread
    parameters, buffers and hooks of the module            mappings with two sides (:class:`_TwoSided`)
    oneDNN, switched off                                   it stays on: nothing that is captured asks for it
    the generator, if the traced code seeds it             put back, and only then

A call of the module itself, or of one inside it, waits in any other thread until the capture is over, since
``forward`` may keep things on the module. Dynamo compiles under the same lock, for its tracers change the same things.
What is left is a trace that the user starts beside a capture: ``torch.export``, ``torch.fx`` and ``torch.jit`` take no
lock.
"""

from __future__ import annotations

import builtins
import copy
import functools
import math
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.hub import tqdm

from bridge.base.torch_internals import (
    MODULE_HOOKS,
    FakeTensor,
    compiling_flags,
    export_tracer,
    mkldnn_switch,
    pytree,
    symbolic_trace,
)
from bridge.capture.passes.cumulative import averages_cumulatively, cumulative_forward
from bridge.capture.tracing import HERE, changes_of_generators, is_capturing, marked_capturing, one_capture_at_a_time

__all__ = ["capturing"]


def _here_only(here: Callable[..., Any], elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """``here`` in a thread that captures, ``elsewhere`` in any other."""

    @functools.wraps(here)
    def choose(*args: Any, **kwargs: Any) -> Any:
        return (here if is_capturing() else elsewhere)(*args, **kwargs)

    return choose


def _with_own_globals(function: FunctionType) -> FunctionType:
    """The function with a copy of its globals, where it sets its flags: torch.fx's says that somebody is tracing.

    Of what Dynamo, once it has run, keeps itself out of by a wrapper, it is the function inside.
    """
    function = getattr(function, "_torchdynamo_orig_callable", function)
    own = FunctionType(
        function.__code__, {**function.__globals__}, function.__name__, function.__defaults__, function.__closure__
    )
    return functools.update_wrapper(own, function)


class _Patcher(symbolic_trace._Patcher):
    """torch.fx's, which replaces methods of ``nn.Module`` while it traces; those of this thread, if it captures."""

    def patch_method(self, cls: type, name: str, new_fn: Callable[..., Any], deduplicate: bool = True) -> None:
        if is_capturing():
            new_fn = _here_only(new_fn, getattr(cls, name))
        super().patch_method(cls, name, new_fn, deduplicate)


def _unless_capturing(original: Callable[[], Any], ours: Callable[..., Any]) -> Callable[[], Any]:
    """A context manager for whoever asks: another thread may be exporting something on its own."""
    return lambda: ours(original) if is_capturing() else original()


@contextmanager
def _compiling_here(original: Callable[[], Any]) -> Iterator[None]:
    with compiling_flags(HERE):
        yield


@contextmanager
def _builtins_here(original: Callable[[], Any]) -> Iterator[None]:
    before = builtins.max, builtins.min, math.pow
    with original():
        builtins.max, builtins.min, math.pow = map(_here_only, (builtins.max, builtins.min, math.pow), before)
        yield


@contextmanager
def _replaced(owner: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


class _TwoSided(dict):
    """A registry of a module: one content for the thread that captures, the real one for all others.

    What reads a dictionary's memory directly, as Dynamo's guards do, sees the real content.
    """

    def __init__(self, real: dict[str, Any], here: dict[str, Any]):
        super().__init__(real)
        self._real = real
        self._here = here

    def _side(self) -> dict[str, Any]:
        return self._here if is_capturing() else self._real

    def __getattr__(self, name: str) -> Any:  # what an OrderedDict has besides
        return getattr(self._side(), name)

    def __reduce_ex__(self, protocol: int) -> Any:
        return type(self._real), (list(self._side().items()),)


def _of_side(name: str) -> Callable[..., Any]:
    def method(self: _TwoSided, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._side(), name)(*args, **kwargs)

    return method


for _name in (
    *("__contains__", "__delitem__", "__eq__", "__getitem__", "__ior__", "__iter__", "__len__", "__ne__", "__or__"),
    *("__repr__", "__reversed__", "__ror__", "__setitem__", "clear", "copy", "get", "items", "keys", "pop", "popitem"),
    *("setdefault", "update", "values"),
):
    setattr(_TwoSided, _name, _of_side(_name))

_REGISTRIES = ("_parameters", "_buffers")


@contextmanager
def _registries_here(root: nn.Module) -> Iterator[None]:
    """This thread may swap parameters and buffers, and sees no hooks on ``root``: they run around the compiled call.

    What it leaves changed (swaps are undone by those who make them) is changed for all in the end.
    """
    sides = [
        (module.__dict__, kind, module.__dict__[kind], module.__dict__[kind].copy())
        for module in root.modules()
        for kind in _REGISTRIES
    ]
    before = [here.copy() for _, _, _, here in sides]
    hooks = [(root.__dict__, kind, root.__dict__[kind], OrderedDict()) for kind in MODULE_HOOKS]
    for attributes, kind, real, here in sides + hooks:
        attributes[kind] = _TwoSided(real, here)
    try:
        yield
    finally:
        for (_, _, real, here), then in zip(sides, before, strict=True):
            real.update((name, value) for name, value in here.items() if name not in then or then[name] is not value)
            for name in then.keys() - here.keys():
                real.pop(name, None)
        for attributes, kind, real, _ in sides + hooks:
            attributes[kind] = real


@contextmanager
def _forwards_here(root: nn.Module) -> Iterator[None]:
    """Layers that must be traced in another form than they are written run another forward in this thread."""
    layers = [layer for layer in root.modules() if "forward" not in layer.__dict__]
    forwards = [(layer, forward) for layer in layers if (forward := _forward_here(layer)) is not None]
    for layer, forward in forwards:
        layer.__dict__["forward"] = _here_only(forward, layer.forward)
    try:
        yield
    finally:
        for layer, _ in forwards:
            layer.__dict__.pop("forward", None)


def _forward_here(layer: nn.Module) -> Callable[..., Any] | None:
    if averages_cumulatively(layer):
        return MethodType(cumulative_forward, layer)
    if type(layer) in (nn.RNN, nn.LSTM, nn.GRU):  # these note the parameters that they see, here the swapped ones
        twin = object.__new__(type(layer))
        twin.__dict__.update((name, copy.copy(v) if type(v) is list else v) for name, v in layer.__dict__.items())
        return twin.forward
    return None


_PATIENCE = 30
"""Seconds to wait for the end of a capture: the traced forward might wait for the waiting thread."""


@contextmanager
def _calls_wait(root: nn.Module) -> Iterator[None]:
    """Calls of ``root`` and of what is inside it that other threads make wait for the end of this context."""
    busy = frozenset(map(id, root.modules()))
    over = threading.Event()
    original = nn.Module.__call__

    @functools.wraps(original)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if id(module) in busy and not (over.is_set() or is_capturing() or _is_traced(args, kwargs)):
            over.wait(_PATIENCE)
        return original(module, *args, **kwargs)

    nn.Module.__call__ = call
    try:
        yield
    finally:
        if nn.Module.__call__ is call:  # else someone traces beside us, and will put ours back, which does no harm
            nn.Module.__call__ = original
        over.set()


@contextmanager
def _called_plainly(root: nn.Module) -> Iterator[None]:
    """What a ``__call__`` of ``root``'s own class does around ``nn.Module``'s is left out of what is captured.

    It will run around the compiled call, as it runs around ``forward`` now.
    """
    kind = next(base for base in type(root).__mro__ if "__call__" in vars(base))
    if kind.__module__.partition(".")[0] == "torch":
        yield
        return
    written = vars(kind)["__call__"]

    @functools.wraps(written)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = module is root and is_capturing()
        return nn.Module.__call__(module, *args, **kwargs) if plain else written(module, *args, **kwargs)

    with _replaced(kind, __call__=call):
        yield


def _is_traced(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether the traced forward itself makes this call, in a thread of its own: it would wait for its own end."""
    return any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((args, kwargs)))


@contextmanager
def _generator_put_back() -> Iterator[None]:
    """Undoes what a seed set by the traced code does to the default generator.

    Fake tensors draw nothing. A generator that has merely moved on was moved by another thread: put back, it would give
    the same numbers again.
    """
    seed, state = torch.initial_seed(), torch.get_rng_state()
    changed_before = changes_of_generators()
    try:
        yield
    finally:
        now = torch.get_rng_state()
        if not torch.equal(now, state):
            fresh = torch.Generator().manual_seed(torch.initial_seed()).get_state()
            seeded = torch.initial_seed() != seed or torch.equal(now, fresh)
            if seeded or changes_of_generators() != changed_before:
                torch.set_rng_state(state)


_EXPECTED_WARNINGS = (
    (".*LeafSpec", FutureWarning),  # torch copies its own pytree specs in a way that it deprecated
    ("The tensor attribute", UserWarning),  # what forward does to attributes is judged by bridge.state.module
)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """As ``warnings.catch_warnings``, which would take other threads' filters away, or leave ours behind in them."""
    for message, category in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)
    filters = warnings.filters
    ours = filters[: len(_EXPECTED_WARNINGS)]
    try:
        yield
    finally:
        for held in (filters, warnings.filters):
            for item in ours:
                if item in held:
                    held.remove(item)


@contextmanager
def capturing(module: nn.Module, *, fakes: bool = True) -> Iterator[None]:
    """Around everything that runs ``module``'s forward in order to learn what it does.

    While active, dispatched modules called from this thread run eager, uncounted; ``module`` has no hooks here;
    what must be traced in another form than it is written has that form. One thread captures at a time.

    Args:
        fakes: whether it runs on fake tensors, which others must not find on the module.
    """
    with ExitStack() as stack:
        stack.enter_context(one_capture_at_a_time())
        export = export_tracer()
        stack.enter_context(_without_warnings())
        stack.enter_context(_generator_put_back())
        if fakes:
            stack.enter_context(_calls_wait(module))
        stack.enter_context(_called_plainly(module))
        stack.enter_context(_registries_here(module))
        stack.enter_context(_forwards_here(module))
        tracer = symbolic_trace.Tracer
        stack.enter_context(_replaced(tracer, trace=_here_only(_with_own_globals(tracer.trace), tracer.trace)))
        stack.enter_context(_replaced(symbolic_trace, _Patcher=_Patcher))
        if hasattr(tqdm, "monitor_interval"):  # torch.fx makes a bar that it does not show; its thread would stay
            stack.enter_context(_replaced(tqdm, monitor_interval=0))
        owner, name = mkldnn_switch
        stack.enter_context(_replaced(owner, **{name: _here_only(lambda: False, getattr(owner, name))}))
        stack.enter_context(
            _replaced(
                export,
                _compiling_state_context=_unless_capturing(export._compiling_state_context, _compiling_here),
                _override_builtin_ops=_unless_capturing(export._override_builtin_ops, _builtins_here),
                _ignore_backend_decomps=_unless_capturing(export._ignore_backend_decomps, lambda _: nullcontext()),
            )
        )
        stack.enter_context(marked_capturing())
        yield
