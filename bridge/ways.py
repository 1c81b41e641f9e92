"""Ways around a refusal: a module that cannot be dispatched whole → a step in parts and a step under Dynamo, timed.

``whole=False`` leaves Python between modules as it is; ``torch.compile(model, backend="tvm_dispatch")`` also compiles
what lies between, and pays for guards and for the ends of its graphs. Which is quicker depends on where a model is cut,
so both are tried on copies of it, by turns with eager.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from bridge.base.devices import HOST
from bridge.base.errors import swallowed
from bridge.base.torch_internals import pytree
from bridge.capture import copier, device_of_call
from bridge.dispatch import add_tvm_dispatch, stats
from bridge.dynamo import graphs
from bridge.state import SampleCall, generators_put_back

__all__ = ["Way", "compare_ways", "quickest"]

_PARTS = "add_tvm_dispatch(model, sample, whole=False)"
_DYNAMO = 'torch.compile(model, backend="tvm_dispatch")'
_WARM_UP, _ROUNDS = 3, 15
_ENOUGH = 5.0
"""Seconds after which no further round begins, once there were a few."""
_NOISE = 0.05
"""Shares of eager's time that are too close to each other, or to 1, to be told apart."""

Step = Callable[[], None]


@dataclass(frozen=True)
class Way:
    """One way to run a module that cannot be dispatched whole.

    Attributes:
        spelling: what the user writes.
        ratio: median time of a step (forward, and backward where there is one), as a share of eager's; ``None`` where
            it cannot be run.
        told: what is compiled of it, or why it cannot be run.
    """

    spelling: str
    ratio: float | None
    told: str

    def __str__(self) -> str:
        time = "cannot be run" if self.ratio is None else f"{self.ratio:.2f} of eager's time"
        return f"{self.spelling}: {time}; {self.told}"


def quickest(ways: Sequence[Way]) -> str:
    """Which of some ways is to be taken, in a sentence."""
    timed = sorted((way for way in ways if way.ratio is not None), key=lambda way: way.ratio)
    if not timed or timed[0].ratio > 1 - _NOISE:
        return "neither is quicker than eager for this sample"
    if len(timed) > 1 and timed[1].ratio - timed[0].ratio < _NOISE:
        return f"both are about as quick; {_PARTS} needs no guards of Dynamo's"
    return f"quicker for this sample: {timed[0].spelling}"


def compare_ways(call: SampleCall) -> tuple[Way, ...]:
    """Times a step of copies of a call's module, in parts and under Dynamo, beside eager's.

    Dynamo's caches are emptied before and after (``torch.compiler.reset()``). Generators are put back.

    Raises:
        TypeError: the module cannot be copied.
    """
    torch.compiler.reset()
    try:
        with torch.random.fork_rng(), generators_put_back():
            eager = _stepper(copy.deepcopy(call.module), call)
            eager()
            tried = [_tried(_PARTS, _in_parts, call), _tried(_DYNAMO, _dynamo, call)]
            steps = [eager, *(step for _, step, _ in tried if step is not None)]
            ratios = iter(_ratios(steps))
            return tuple(
                Way(spelling, None if step is None else next(ratios), told() if callable(told) else told)
                for spelling, step, told in tried
            )
    finally:
        torch.compiler.reset()


def _tried(spelling: str, prepare: Callable[[SampleCall], tuple[Step, Callable[[], str]]], call: SampleCall) -> tuple:
    """The way, with its step after a first run (``None`` where that raises) and what is told of it."""
    try:
        step, told = prepare(call)
        step()
    except Exception as error:  # noqa: BLE001 - whatever a way raises, the answer is that it cannot be taken
        swallowed(error)
        first = (str(error).splitlines() or [""])[0]
        return spelling, None, f"{type(error).__name__}: {first}"
    return spelling, step, told


def _in_parts(call: SampleCall) -> tuple[Step, Callable[[], str]]:
    model = add_tvm_dispatch(copy.deepcopy(call.module), call.args, sample_kwargs=call.kwargs, whole=False)
    counted = stats(model)

    def told() -> str:
        found = getattr(counted, "parts", None)
        if found is None:
            return "dispatched whole"
        return f"{len(found)} parts, in which an eager forward spends {100 * counted.coverage:.0f}% of its time"

    return _stepper(model, call), told


def _dynamo(call: SampleCall) -> tuple[Step, Callable[[], str]]:
    known = set(map(id, graphs()))
    model = torch.compile(copy.deepcopy(call.module), backend="tvm_dispatch")

    def told() -> str:
        found = [graph for graph in graphs() if id(graph) not in known]
        eager = sum(not graph.stats.hits for graph in found)
        return f"{len(found)} graphs" + (f", of which {eager} stay eager" if eager else "")

    return _stepper(model, call), told


def _stepper(model: nn.Module, call: SampleCall) -> Step:
    """A forward, and a backward of ones where there are gradients, on copies of the sample."""
    device = device_of_call(call)
    args, kwargs = pytree.tree_map_only(torch.Tensor, copier(), (call.args, call.kwargs))

    def step() -> None:
        model.zero_grad()
        leaves = [leaf for leaf in pytree.tree_leaves(model(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
        outputs = [leaf for leaf in leaves if leaf.requires_grad]
        outputs = [leaf for leaf in outputs if leaf.ndim == 0] or outputs  # as a training loop goes backward
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
        if device != HOST:
            torch.cuda.synchronize(device)

    return step


def _ratios(steps: Sequence[Step]) -> list[float]:
    """The seconds of each step but the first, as shares of the first's: medians of rounds in which they take turns."""
    for _ in range(_WARM_UP):
        for step in steps:
            step()
    rounds: list[list[float]] = []
    begun = time.perf_counter()
    while len(rounds) < _ROUNDS and (len(rounds) < _WARM_UP or time.perf_counter() - begun < _ENOUGH):
        times = []
        for step in steps:
            started = time.perf_counter()
            step()
            times.append(time.perf_counter() - started)
        rounds.append(times)
    return [statistics.median(each[index] / each[0] for each in rounds) for index in range(1, len(steps))]
