"""A training script run twice, eager and dispatched → their distance, and the dispatch counts."""

from __future__ import annotations

import importlib
import pkgutil
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from tests.zoo import scripts

Script = Callable[[Callable[..., Any]], Iterator[Any]]
"""``train(dispatch)``: calls ``dispatch(module, sample, **options)``, then yields the losses of each step."""

WARM_UP = 3
"""Untimed steps."""


@dataclass
class Dispatch:
    """Stands for ``add_tvm_dispatch`` in a script: notes modules, seconds and refusals."""

    enabled: bool
    modules: list[nn.Module] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def __call__(self, module: nn.Module, sample: Any, **options: Any) -> None:
        self.modules.append(module)
        if not self.enabled:
            return
        started = time.perf_counter()
        try:
            add_tvm_dispatch(module, sample, **options)
        except UnsupportedModule as refusal:
            self.refusals[type(module).__name__] = str(refusal)
        self.seconds += time.perf_counter() - started


@dataclass(frozen=True)
class Trained:
    """The results of a run of a script."""

    dispatch: Dispatch
    losses: Tensor
    seconds: list[float]
    generator: Tensor


@dataclass(frozen=True)
class Outcome:
    """The comparison of two runs.

    Attributes:
        loss: largest difference of a loss, relative to the largest loss of its kind.
        state: norm of the difference of a module's parameters and buffers, relative to their norm; the worst module.
        generator: whether the generator's final state is eager's, bit by bit.
        hits: dispatched calls, by the module's class.
        misses: reasons of the other calls.
        refusals: texts, by the class of the refused module.
        seconds: to add.
        ratio: of the median step, ours to eager's.
    """

    loss: float
    state: float
    generator: bool
    hits: dict[str, int]
    misses: Counter[str]
    refusals: dict[str, str]
    seconds: float
    ratio: float


def names() -> list[str]:
    return [found.name for found in pkgutil.iter_modules(scripts.__path__)]


def load(name: str) -> ModuleType:
    return importlib.import_module(f"{scripts.__name__}.{name}")


def compare(train: Script, steps: int, dtype: torch.dtype = torch.float32) -> Outcome:
    """Runs a script twice under the same seed, for a number of steps, with ``dtype`` as torch's default."""
    eager, ours = (_run(train, steps, dtype, enabled) for enabled in (False, True))
    largest = eager.losses.abs().amax(0)
    pairs = zip(ours.dispatch.modules, eager.dispatch.modules, strict=True)
    refusals = ours.dispatch.refusals
    counted = [(type(m).__name__, stats(m)) for m in ours.dispatch.modules if type(m).__name__ not in refusals]
    hits: Counter[str] = Counter()
    for name, found in counted:
        hits.update({name: found.hits})
    return Outcome(
        loss=float(((ours.losses - eager.losses).abs() / largest).max()),
        state=max(_apart(one, other) for one, other in pairs if other.state_dict()),
        generator=torch.equal(ours.generator, eager.generator),
        hits=dict(hits),
        misses=sum((found.misses for _, found in counted), Counter()),
        refusals=refusals,
        seconds=ours.dispatch.seconds,
        ratio=statistics.median(ours.seconds) / statistics.median(eager.seconds),
    )


def _run(train: Script, steps: int, dtype: torch.dtype, enabled: bool) -> Trained:
    dispatch, before = Dispatch(enabled), torch.get_default_dtype()
    losses, seconds = [], []
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's advice to the scripts
            torch.manual_seed(0)
            script = train(dispatch)
            while len(losses) < steps:
                started = time.perf_counter()
                found = next(script)
                seconds.append(time.perf_counter() - started)
                losses.append(torch.stack([leaf.detach().double() for leaf in pytree.tree_leaves(found)]))
            generator = torch.get_rng_state()
    finally:
        torch.set_default_dtype(before)
    return Trained(dispatch, torch.stack(losses), seconds[WARM_UP:], generator)


def _apart(one: nn.Module, other: nn.Module) -> float:
    got, want = (torch.cat([t.detach().double().flatten() for t in m.state_dict().values()]) for m in (one, other))
    return float((got - want).norm() / want.norm())
