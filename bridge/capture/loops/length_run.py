"""Run of a call with loops of any length: its form for all sizes → rows on fake tensors with a symbol for that size.

Forward does not run: that it is this form at the sample's size, and at each further one, a record tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bridge.base.errors import swallowed
from bridge.base.log import channel
from bridge.base.torch_fakes import clear_fake_memo, fake_mode
from bridge.base.torch_internals import pytree
from bridge.base.torch_shapes import fake_results_not_kept, size_environment
from bridge.capture.dynamic_shapes import DynamicDim
from bridge.capture.loops.lengths import LoopedCall
from bridge.capture.loops.rolled import folded_of, spelled_out
from bridge.capture.own_leaves import own_leaves
from bridge.capture.symbolic_run import Symbols, symbolic_leaf
from bridge.capture.thread_isolation import recording
from bridge.capture.two_runs import FakeRecord, real_run_of
from bridge.guards import undo
from bridge.state import generators_put_back

log = channel("dispatch")

__all__ = ["looped_run", "run_of_any_length"]


@generators_put_back()
def looped_run(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> LoopedCall | None:
    """One run of a call, if that is all that is to be known of it: it has loops, and sets no Python state."""
    with recording(), undo() as before:
        try:
            real = real_run_of(module, args, kwargs)
        except Exception as error:  # noqa: BLE001 - whatever forward raises, it raises again where it is captured
            swallowed(error)
            log.debug("%s is not recorded for its length: %s", type(module).__name__, error)
            before.restore()
            return None
        if real.observation.unsupported or real.observation.objects or real.functions.uses or real.changed():
            before.restore()
            return None
        real.loops = folded_of(real.record, real.made, real.observation.draws)
    return None if real.loops is None else LoopedCall(real)


def run_of_any_length(call: LoopedCall, args: tuple, kwargs: dict[str, Any], dims: Sequence[DynamicDim]) -> FakeRecord:
    """The rows of a call of any length, one step of each loop in the place of all."""
    real, length = call.real, call.any_length
    with fake_results_not_kept():
        mode = fake_mode(allow_non_fake_inputs=True, static_shapes=True, shape_env=size_environment())
    try:
        own_args, own_kwargs = own_leaves(args, kwargs, real.real_tensors)
        given = [
            symbolic_leaf(mode, each, index, dims) if isinstance(each, torch.Tensor) else each
            for index, each in enumerate(pytree.tree_leaves((own_args, own_kwargs)))
        ]
        arguments = [each for each in given if isinstance(each, torch.Tensor)]
        count, behind = len(real.real_tensors), len(real.real_tensors) + len(arguments)
        owned, others = real.inputs[:count], real.inputs[behind:]
        inputs = [*(_fake(mode, each) for each in owned), *arguments, *(_fake(mode, each) for each in others)]
        form, *_ = length.form.at(given[length.leaf].shape[length.dimension])
        made = spelled_out(form, real.record, dict(enumerate(inputs)), mode)
        made.record.fakes = made.fakes
        symbols = Symbols(real.record, mode)
        return FakeRecord(
            made.record, mode, made.results, arguments, real.twin, real.observation.out_spec, given, symbols
        )
    finally:
        clear_fake_memo(mode)


def _fake(mode: Any, tensor: torch.Tensor) -> torch.Tensor:
    return mode.from_tensor(tensor if tensor.is_leaf else tensor.detach())
