"""One random module with dynamic sizes beside eager: equal numbers at each size, or a refusal, or a miss."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from bridge import stats
from tests.device import DEVICE
from tests.fuzz import inputs
from tests.fuzz.calls import Call, every, nothing
from tests.fuzz.check import PARTITIONS, eager_error, judge, undisturbed
from tests.fuzz.program import Arguments, Program
from tests.fuzz.sizes import Variation, everywhere, variations
from tests.fuzz.verdict import Verdict, Wrong

TRIES = 6
"""Variations of a program that eager is tried with."""


@undisturbed
def check_dynamic(program: Program, kind: str | None = None, far: bool = False) -> Verdict:
    """Dispatches a program once, with some dynamic sizes of its arguments, and compares calls of six sizes with eager.

    The detail of an equal program begins with the number of served calls within the range. ``kind``: see :func:`vary`;
    ``far``: tries the sizes where a guard may be too weak instead (:func:`everywhere`).
    """
    variation = vary(program, kind)
    if variation is None:
        return Verdict("skipped", "no size can vary")
    if far:
        variation = everywhere(variation)
    options = {"partition": random.Random(program.seed).choice(PARTITIONS)}
    options |= (
        {"on_miss": "compile"}
        if variation.kind == "automatic"
        else {"on_miss": "eager", "dynamic_shapes": variation.dynamic_shapes()}
    )
    watch, harmful = _Watch(variation), _harmful(variation)
    names = variation.at(variation.sample).load()
    verdict = judge(names, lambda: [call for call in calls_of(variation) if call.name not in harmful], options, watch)
    served = f"{watch.served} of {watch.within} served by {watch.entries}; " if verdict.status == "same" else ""
    detail = verdict.detail if verdict.status == "refused" else f"{served}{verdict.detail} [{variation}]"
    return Verdict(verdict.status, detail)


def vary(program: Program, kind: str | None = None) -> Variation | None:
    """The first variation, of the given kind or one chosen by the seed, that eager runs at two sizes at least."""
    for _, variation in zip(range(TRIES), variations(program, kind), strict=False):
        if _eager_takes(variation, variation.sample) and any(
            _eager_takes(variation, sizes) for sizes in variation.sizes[1:4] if sizes != variation.sample
        ):
            return variation
    return None


def _eager_takes(variation: Variation, sizes: tuple[int, ...]) -> bool:
    """Whether eager runs at these sizes; first on the host, since an index out of range would cost the GPU."""
    for device in dict.fromkeys((torch.device("cpu"), DEVICE)):
        call = Call("eager", _given(variation, sizes, 0, device), nothing, every)
        if eager_error(variation.program.load(device), call, (Exception,)):
            return False
    return True


def _harmful(variation: Variation) -> set[str]:
    """Names of the calls that raise on the host, which are not tried on a GPU."""
    host = torch.device("cpu")
    if DEVICE == host:
        return set()
    names = variation.program.load(host)
    return {call.name for call in calls_of(variation, host) if eager_error(names, call, (Exception,))}


def calls_of(variation: Variation, device: torch.device = DEVICE) -> list[Call]:
    """A call of each size, of the sample's size again, of one out of range, and some with special values or indices."""
    calls = [
        Call(f"at {sizes}", _given(variation, sizes, seed, device), nothing, every)
        for seed, sizes in enumerate((*variation.sizes, variation.sample, variation.outside))
    ]
    rng = random.Random(variation.program.seed + 1)
    again = _given(variation, rng.choice(variation.sizes), 2, device)
    special, indices = inputs.special_values(rng.random()), inputs.other_indices(rng.random())
    calls.append(Call("with special values", lambda: special(again()), nothing, every, special=True))
    calls.append(Call("with other indices", lambda: indices(again()), nothing, every))
    if inputs.share_memory(again()):
        calls.append(Call("with arguments of their own", lambda: inputs.of_their_own(again()), nothing, every))
    return calls


def _given(variation: Variation, sizes: tuple[int, ...], seed: int, device: torch.device) -> Callable[[], Arguments]:
    return lambda: variation.arguments(sizes, seed, device)


class _Watch:
    """Counts entries and served calls within the range; raises for a served call outside of it."""

    def __init__(self, variation: Variation):
        self.within = self.served = self.entries = self._hits = 0
        self._above = variation.kind == "named" and variation.outside[0] > max(size for size, *_ in variation.sizes)
        self._inside = Counter(f"at {sizes}" for sizes in variation.sizes)
        self._outside = f"at {variation.outside}"

    def __call__(self, module: nn.Module, call: Call) -> None:
        hit = stats(module).hits > self._hits
        self.entries = len(stats(module).entries)
        self._hits = stats(module).hits
        if call.name in self._inside:
            self.within += 1
            self.served += hit
        elif hit and self._above and call.name == self._outside:
            raise Wrong(f"{call.name}: above the range, and dispatched")
