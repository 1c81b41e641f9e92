"""Recorded call: a module's sample call → its runs, a key that equal calls have, and what is captured of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from bridge.base.devices import current_device, working_for
from bridge.base.torch_cuda import settle_attention_order
from bridge.base.torch_internals import pytree
from bridge.capture.captured import Captured
from bridge.capture.dynamic_shapes import DynamicDim, refuse_numbers
from bridge.capture.loops.lengths import LoopedCall, comparable
from bridge.capture.preconditions import check_call, device_of_call
from bridge.capture.record_key import key_of_sizes, observed_key
from bridge.capture.recorded import captured_of, captured_of_any_length
from bridge.capture.steady_call import SteadyCall, steady_call
from bridge.capture.thread_isolation import recording
from bridge.state import generators_put_back

__all__ = ["RecordedCall", "capture", "record_call"]


@generators_put_back()
def record_call(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], dims: Sequence[DynamicDim] = ()
) -> RecordedCall:
    """Runs the call ``module(*args, **kwargs)`` in the module's current mode, on real numbers and on fake tensors.

    Python attributes that forward sets once are left set; all else is as it was.

    Args:
        dims: dimensions of arguments whose sizes vary (:func:`bridge.capture.dynamic_shapes.dynamic_dims`).

    Raises:
        UnsupportedModule: what a compiled call cannot do exactly.
        Exception: eager's own, where the sample is one that PyTorch itself refuses.
    """
    check_call(module, args, kwargs)
    refuse_numbers(type(module).__name__, dims)
    device = device_of_call(module, args, kwargs)
    settle_attention_order(device)
    with working_for(device), recording():
        return RecordedCall(module, args, kwargs, tuple(dims), steady_call(module, args, kwargs, dims))


def capture(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    dims: Sequence[DynamicDim] = (),
    looped: LoopedCall | None = None,
) -> Captured:
    """The captured call ``module(*args, **kwargs)``, as :func:`record_call` and :meth:`RecordedCall.captured`.

    ``looped``: its run, with loops of any length.
    """
    if looped is not None:
        with working_for(device_of_call(module, args, kwargs)), recording():
            return captured_of_any_length(module, args, kwargs, dims, looped)
    return record_call(module, args, kwargs, dims).captured()


@dataclass
class RecordedCall:
    """A call and its runs.

    Attributes:
        module, args, kwargs, dims: as in :func:`record_call`.
        steady: the runs.
    """

    module: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    dims: tuple[DynamicDim, ...]
    steady: SteadyCall

    @cached_property
    def key(self) -> tuple | None:
        """Equal for calls that do the same; ``None`` where that cannot be told, or the call has more than its graph.

        Where sizes vary, for all sizes that a call with these conditions serves; asked before :meth:`captured`.
        """
        real, fake = self.steady.real, self.steady.fake
        if self.steady.counters or self.steady.problems or real.kept or len(real.tensors) > len(real.real_tensors):
            return None
        reads = tuple(each.reading.key for each in real.record.reads)
        key = observed_key(real.record, real.results, real.final, real.observation, reads)
        if key is None or fake.symbols is None:
            return key
        sizes = key_of_sizes(fake.record, fake.results, fake.out_spec, fake.symbols.draws, fake.mode.shape_env)
        return None if sizes is None else (*key, sizes)

    @property
    def given(self) -> dict[str, Any]:
        """Fields of :class:`Captured` that are this call's own, where another one like it was lowered before."""
        real, fake = self.steady.real, self.steady.fake
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return {
            "module_name": type(self.module).__name__,
            "module_tensors": tuple(real.tensors),
            "arguments": tuple(fake.arguments),
            "argument_leaves": tuple(real.argument_leaves),
            "argument_is_tensor": tuple(isinstance(leaf, torch.Tensor) for leaf in leaves),
            "in_spec": real.in_spec,
            "observation": real.observation,
            "readings": tuple(each.reading for each in real.record.reads),
            "recording": comparable(real) if real.loops is not None else None,
            "device": current_device(),
        }

    def captured(self) -> Captured:
        """The call as a functional graph.

        What this does not hold exactly is listed in ``problems``; importing the graph refuses it together with the
        operators that have no conversion.
        """
        with working_for(device_of_call(self.module, self.args, self.kwargs)), recording():
            captured = captured_of(self.module, self.args, self.kwargs, self.dims, self.steady)
        return replace(captured, counters=self.steady.counters)
