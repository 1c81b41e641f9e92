"""Forward pre-hooks of a dispatched module: a sample → forward's call, in the state that the hooks leave.

A module's own hooks run around the compiled call. So forward sees the attributes that they set (a normalized weight, a
mask) and the arguments that they return. Adding a sample runs the hooks once, and undoes their changes at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bridge.base.errors import swallowed
from bridge.base.pytrees import unpacked
from bridge.base.torch_internals import COMPILED_CALL, has_storage, storage_id
from bridge.capture.draws import IsolatedRNG
from bridge.capture.refusals import check_call
from bridge.capture.rows import written_operands
from bridge.guards import Reads, recorded_reads, undo
from bridge.state import SampleCall, generators_put_back

__all__ = ["after_pre_hooks"]


@contextmanager
def after_pre_hooks(call: SampleCall) -> Iterator[SampleCall]:
    """Yields forward's call; while active, the attributes that the module's forward pre-hooks set are set."""
    module = call.module
    args, kwargs = _as_called(module, *unpacked((call.args, call.kwargs)))
    hooks = module._forward_pre_hooks
    if not hooks:
        yield SampleCall(module, args, kwargs).as_pytree()
        return
    check_call(SampleCall(module, args, kwargs).as_pytree())  # a shard's hook would gather it
    with undo(module) as before:
        reads = recorded_reads(Reads({}, module.named_modules()))
        try:
            with _Aside(), generators_put_back(), reads.recorded():
                for key, hook in hooks.items():
                    args, kwargs = _hooked(module, key in module._forward_pre_hooks_with_kwargs, hook, args, kwargs)
        except BaseException:
            before.restore()
            raise
    left = before.take_back()
    if left is None:
        yield SampleCall(module, args, kwargs).as_pytree()
        return
    left.do()
    try:
        yield SampleCall(module, args, kwargs).as_pytree()
    finally:
        left.undo()


class _Given(BaseException):
    """The arguments of a call; no ``except Exception`` catches it."""


def _as_called(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments that ``nn.Module.__call__`` gets, if the module's class overrides ``__call__``."""
    if type(module).__call__ is nn.Module.__call__:
        return args, kwargs
    thread, own = threading.get_ident(), module.__dict__
    before = own.get(COMPILED_CALL)

    def given(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return (before or module._call_impl)(*args, **kwargs)
        raise _Given(args, kwargs)

    own[COMPILED_CALL] = given
    try:
        with _Aside(), generators_put_back():
            module(*args, **kwargs)
    except _Given as found:
        return found.args
    except Exception as error:  # noqa: BLE001 - eager's own error, which the capture reports
        swallowed(error)
    finally:
        own[COMPILED_CALL] = before
        if before is None:
            del own[COMPILED_CALL]
    return args, kwargs


def _hooked(module: nn.Module, keywords: bool, hook: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
    result = hook(module, args, kwargs) if keywords else hook(module, args)
    if result is None:
        return args, kwargs
    if keywords:
        return result
    return (result if isinstance(result, tuple) else (result,)), kwargs


class _Aside(IsolatedRNG):
    """While active, draws come from private generators; at the end, written memory is restored."""

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def called(self, call: Callable[..., Any], func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        for tensor in written_operands(func, args, kwargs):
            if isinstance(tensor, torch.Tensor) and has_storage(tensor) and storage_id(tensor) not in self._before:
                storage = tensor.untyped_storage()
                self._before[storage_id(tensor)] = storage, storage.clone()
        return call(*args, **kwargs)

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for storage, numbers in self._before.values():
            storage.copy_(numbers)
