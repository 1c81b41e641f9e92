"""Sample run: a module and a sample → the calls of its submodules, and their shares of an eager forward's time.

It runs on a twin of the module and copies of the sample; generators and Python state are restored. Submodules are
watched through the dispatcher's attribute, so that hooks, names and code are unchanged.
"""

from __future__ import annotations

import statistics
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from bridge.base.devices import HOST, current_device, working_for
from bridge.base.errors import refused_by_eager, swallowed
from bridge.base.generators import default_generator, of_gpus, states_put_back
from bridge.base.modes import ambient_autocast, autocast_to
from bridge.base.pytrees import packed_arguments, unpacked
from bridge.base.threads import is_alone
from bridge.base.torch_higher_order import no_frames_compiled
from bridge.base.torch_internals import COMPILED_CALL, VF, innermost_transform, pytree
from bridge.capture import IsolatedRNG, Twin, as_python, copier, device_of_call, is_capturing
from bridge.dispatch.dispatcher import call_with_hooks
from bridge.guards import Reads, recorded_reads, undo
from bridge.state import SampleCall, generators_put_back
from bridge.trials import Pace, Spans

__all__ = ["InnerCall", "inner_calls", "shares_of"]

_WHOLE = ""
"""The path of the module itself."""
_SAME_RUNS, _MOST_RUNS = 3, 32
"""Consecutive runs without a new call that end the search, once each partly called ``ModuleList`` was called in full;
most runs."""
_PACE = Pace(fewest=1, most=5, seconds=2.0)


@dataclass(frozen=True)
class InnerCall:
    """The first call of a module inside another one, in one grad mode.

    Attributes:
        path: the module's path; ``parent``: the path of the module whose forward calls it.
        args, kwargs: its arguments, with copied tensors.
        grad, autocast, cached: the modes of the call: grad mode, autocast's dtype, whether autocast caches casts.
    """

    path: str
    parent: str
    args: tuple
    kwargs: dict[str, Any]
    grad: bool
    autocast: torch.dtype | None
    cached: bool

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Context with the modes of the call."""
        with torch.set_grad_enabled(self.grad), autocast_to(self.autocast, cache_enabled=self.cached):
            yield


def inner_calls(call: SampleCall, redraws: bool = False) -> list[InnerCall]:
    """The calls of the submodules, in order: the first per module, parent, grad mode and set of arguments that require
    grad.

    ``redraws``: collect calls over several runs with different random draws, since the draws select the code to run.

    If a call with gradients calls a module without, a backward runs as well: a reentrant checkpoint calls the module
    there, with gradients.
    """
    found: list[InnerCall] = []
    known: set[tuple] = set()
    stack = [""]

    def enter(path: str, child: nn.Module, *args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        needs = tuple(leaf.requires_grad for leaf in leaves if isinstance(leaf, torch.Tensor))
        key = path, stack[-1], torch.is_grad_enabled(), needs
        if key not in known:
            known.add(key)
            given = unpacked(_with_copies(packed_arguments((args, kwargs)), copier()))
            found.append(InnerCall(*key[:2], *given, key[2], ambient_autocast(), torch.is_autocast_cache_enabled()))
        stack.append(path)
        try:
            return child.forward(*args, **kwargs)
        finally:
            stack.pop()

    with _on_copies(call, enter) as copied, IsolatedRNG():
        lists = [set(each) for each in copied.module.modules() if isinstance(each, nn.ModuleList)]
        same, called = 0, set()
        for _ in range(_MOST_RUNS if redraws else 1):
            before = len(found)
            try:
                leaves = pytree.tree_leaves(copied.forward())  # hooks of the module are not the sample's
            except Exception as error:  # noqa: BLE001 - the user's code may raise any, for other draws than before
                swallowed(error)
                raise refused_by_eager(error) from error.__cause__
            outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            if outputs and torch.is_grad_enabled() and not all(each.grad for each in found):
                with suppress(Exception):  # errors of the user's hooks and functions do not affect the calls found
                    torch.autograd.backward(outputs, [VF.ones_like(each) for each in outputs])
            same = 0 if len(found) > before else same + 1
            called.update(map(copied.module.get_submodule, (each.path for each in found[before:])))
            if same >= _SAME_RUNS and not any(0 < len(called & each) < len(each) for each in lists):
                break
    return found


def shares_of(call: SampleCall, paths: Sequence[str]) -> dict[str, float]:
    """Path → share of an eager forward's time spent inside the module: the median of a few runs.

    The time of a nested module counts for the outer one.
    """
    inside: list[str] = []
    is_gpus = current_device().type == "cuda" or any(each.is_cuda for each in call.module.parameters())
    spans = Spans(partial(torch.cuda.synchronize, device_of_call(call)) if is_gpus else lambda: None)

    def enter(path: str, child: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if inside or path not in paths:
            return child.forward(*args, **kwargs)
        inside.append(path)
        try:
            with spans.part(path):
                return child.forward(*args, **kwargs)
        finally:
            inside.pop()

    def whole() -> Counter[str]:
        spans.seconds.clear()
        with spans.part(_WHOLE):
            copied.forward()
        return spans.seconds

    runs: list[dict[str, float]] = []
    # IsolatedRNG slows each operator down: only needed if other threads can draw meanwhile
    put_back = states_put_back([default_generator(HOST), *of_gpus()]) if is_alone() else IsolatedRNG()
    with _on_copies(call, enter) as copied, put_back:
        with IsolatedRNG() as drawn:
            whole()
        for _ in _PACE.runs():
            seconds = whole()
            runs.append({path: seconds[path] / seconds[_WHOLE] for path in paths})
        for generator, state in reversed(drawn.passed):
            generator.set_state(state)
    return {path: statistics.median(run[path] for run in runs) for path in paths}


@contextmanager
def _on_copies(call: SampleCall, enter: Enter) -> Iterator[SampleCall]:
    """Context: a call → the call on a watched twin with copied tensors; restores Python state and generators."""
    copied = copier()
    twin = Twin(call.module, copied)
    _watch(call.module, twin.module, enter)
    with undo(always=True):
        own = {key: each for key, each in twin.originals.items() if not isinstance(each, torch.Tensor)}
        reads = recorded_reads(Reads(own, twin.module.named_modules()))
        with (
            working_for(device_of_call(call)),
            generators_put_back(),
            no_frames_compiled(),
            as_python(),
            reads.recorded(),
        ):
            given = call.as_pytree()
            yield SampleCall(twin.module, *_with_copies((given.args, given.kwargs), copied))


def _with_copies(given: Any, copied: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Arguments with copied tensors; a ``torch.Size`` stays one."""
    return pytree.tree_map_only(torch.Tensor, copied, given, is_leaf=lambda each: isinstance(each, torch.Size))


Enter = Callable[..., Any]


class _Watcher:
    """Replaces a module's dispatcher: passes this thread's calls to ``enter``, with path and module prepended."""

    def __init__(self, module: nn.Module, path: str, enter: Enter):
        self._module, self._enter, self._thread = module, partial(enter, path, module), threading.get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        if threading.get_ident() != self._thread or is_capturing() or innermost_transform() is not None:
            return module._call_impl(*args, **kwargs)
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            return call_with_hooks(module, self._enter, args, kwargs)
        return self._enter(*args, **kwargs)


def _watch(root: nn.Module, twin: nn.Module, enter: Enter) -> None:
    """Watches the submodules of a twin, except where the original was compiled by ``module.compile()``."""
    own = dict(root.named_modules())
    for path, child in twin.named_modules():
        known = own[path].__dict__.get(COMPILED_CALL)
        if child is not twin and (known is None or type(known).__module__.startswith("bridge.")):
            child.__dict__[COMPILED_CALL] = _Watcher(child, path, enter)
