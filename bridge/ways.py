"""Ways around a refusal: a module that cannot be dispatched whole → a step in parts and a step under Dynamo, timed.

``whole=False`` leaves the Python code between modules eager; ``torch.compile(model, backend="tvm_dispatch")`` also
compiles that code, at the price of guards and graph breaks. Which way is quicker depends on the model, so both are
timed on copies of it, in turns with eager.
"""

from __future__ import annotations

import copy
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
from bridge.trials import Pace, Step, as_quick, losses_of, ratios

__all__ = ["Way", "compare_ways", "quickest"]

_PARTS = "add_tvm_dispatch(model, sample, whole=False)"
_DYNAMO = 'torch.compile(model, backend="tvm_dispatch")'
_EAGER = "eager"
_PACE = Pace(fewest=3, most=15, seconds=10.0, warm_up=3)
_CLEARLY = 0.95
"""A way is clearly quicker than another if it takes less than this share of its time; closer times are a tie."""


@dataclass(frozen=True)
class Way:
    """One way to run a module that cannot be dispatched whole.

    Attributes:
        code: the user's code for it.
        ratio: median time of a step (forward, and backward if there is one) divided by eager's; ``None``: it fails.
        told: the number of compiled parts or graphs, or the error.
    """

    code: str
    ratio: float | None
    told: str

    def __str__(self) -> str:
        time = "cannot be run" if self.ratio is None else f"{self.ratio:.2f} of eager's time"
        return f"{self.code}: {time}; {self.told}"


def quickest(ways: Sequence[Way]) -> str:
    """The recommended way, as a sentence."""
    shares = {way.code: way.ratio for way in ways if way.ratio is not None}
    near = as_quick({_EAGER: 1.0} | shares, _CLEARLY)
    if _EAGER in near:
        return "neither is quicker than eager for this sample"
    if len(near) > 1:
        return f"both are about as quick; {_PARTS} needs no guards of Dynamo's"
    return f"quicker for this sample: {near[0]}"


def compare_ways(call: SampleCall) -> tuple[Way, ...]:
    """Times a step of copies of a call's module: in parts, under Dynamo, and eager.

    Dynamo's caches are emptied before and after (``torch.compiler.reset()``). Random generators are restored.

    Raises:
        TypeError: the module cannot be copied.
    """
    torch.compiler.reset()
    try:
        with torch.random.fork_rng(), generators_put_back():
            eager = _stepper(copy.deepcopy(call.module), call)
            eager()
            tried = [_tried(_PARTS, _in_parts, call), _tried(_DYNAMO, _dynamo, call)]
            steps = {_EAGER: eager} | {code: step for code, step, _ in tried if step is not None}
            shares = ratios(_PACE.rounds(steps), _EAGER)
            return tuple(Way(code, shares.get(code), told() if callable(told) else told) for code, _, told in tried)
    finally:
        torch.compiler.reset()


def _tried(code: str, prepare: Callable[[SampleCall], tuple[Step, Callable[[], str]]], call: SampleCall) -> tuple:
    """Prepares a way and runs it once → its code, its step (``None`` if it raised), a description or the error."""
    try:
        step, told = prepare(call)
        step()
    except Exception as error:  # noqa: BLE001 - whatever a way raises, the answer is that it cannot be taken
        swallowed(error)
        first = (str(error).splitlines() or [""])[0]
        return code, None, f"{type(error).__name__}: {first}"
    return code, step, told


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
    """A step on copies of the sample: a forward, and a backward of ones if an output requires grad."""
    device = device_of_call(call)
    args, kwargs = pytree.tree_map_only(torch.Tensor, copier(), (call.args, call.kwargs))

    def step() -> None:
        model.zero_grad()
        if outputs := losses_of(model(*args, **kwargs)):
            torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
        if device != HOST:
            torch.cuda.synchronize(device)

    return step
