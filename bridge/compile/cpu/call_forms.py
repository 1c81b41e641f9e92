"""Forms of a library call on the CPU → the seconds of those that give the same numbers, measured now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from bridge.base.log import channel
from bridge.compile.cpu.measure import in_a_plain_thread, seconds_of
from bridge.compile.runtime.background import settle
from bridge.compile.schedule.calls import CallShape
from bridge.library import FORMS, FUNCTIONS, TensorAt, invoke

__all__ = ["seconds_of_forms"]

_LOG = channel("compile")

_ROUNDING = 1e-3
"""Of the largest number, that two orders of the same sums may differ by; what is wrong differs by more."""


def seconds_of_forms(call: CallShape) -> Mapping[str, float]:
    """Seconds of the function itself, first, and of its forms; those that are not for such arguments are left out."""
    settle()
    return in_a_plain_thread(lambda: seconds_of(_runs(call)))


def _runs(call: CallShape) -> dict[str, Callable[[], list[torch.Tensor]]]:
    tensors = list(map(_tensor, call.operands))
    arguments = [TensorAt(int(each[1:])) if isinstance(each, str) else each for each in call.arguments]
    names = [name for name in (call.name, *FORMS[call.name]) if name in FUNCTIONS]
    runs = {name: partial(invoke, FUNCTIONS[name], arguments, tensors) for name in names}
    wanted = runs[call.name]()
    return {name: run for name, run in runs.items() if name == call.name or _is_same(name, run, wanted)}


def _tensor(operand: tuple[str, tuple[int, ...], tuple[int, ...]]) -> torch.Tensor:
    """Numbers in memory as the operand's lie."""
    name, extents, strides = operand
    tensor = torch.empty_strided(extents, strides, dtype=getattr(torch, name))
    generator = torch.Generator().manual_seed(0)
    return tensor.copy_(torch.randn(extents, generator=generator))


def _is_same(name: str, run: Callable[[], list[torch.Tensor]], wanted: list[torch.Tensor]) -> bool:
    try:
        found = run()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        _LOG.debug("%s is no form of a call: %s", name, error)
        return False
    pairs = list(zip(found, wanted, strict=True))
    alike = all(mine.shape == its.shape and mine.dtype == its.dtype for mine, its in pairs)
    return alike and all((mine - its).abs().max() <= _ROUNDING * its.abs().max() for mine, its in pairs)
