"""One random module under dispatch beside eager: equal numbers, or a refusal, or a miss, each with a reason."""

from __future__ import annotations

import functools
import random
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bridge import UnsupportedModule, stats
from bridge.base.torch_internals import COMPILED_CALL
from bridge.dispatch import DispatchStats, PartStats
from partition import MinCut
from tests.device import DEVICE, generators, set_generators
from tests.fuzz.calls import Call, calls_of, every, nothing
from tests.fuzz.compare import Comparison
from tests.fuzz.play import play
from tests.fuzz.program import Program, make_arguments, make_module
from tests.fuzz.sample import add
from tests.fuzz.verdict import EagerRaises, Verdict, Wrong, is_lost, one_line, place

PARTITIONS = ("min_cut", "min_cut", "min_cut", "save_all", "recompute_all", MinCut(budget=0.3))
ON_MISS = ("eager", "eager", "compile")
EAGER_ERRORS = (RuntimeError, TypeError, ValueError, IndexError)
"""Eager's errors for a program that it refuses, in forward or in backward."""


def undisturbed(judge: Callable[..., Verdict]) -> Callable[..., Verdict]:
    """A judge that restores torch's generators and suppresses warnings."""

    @functools.wraps(judge)
    def judged(program: Program, **options: Any) -> Verdict:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            generator = generators()
            try:
                verdict = judge(program, **options)
            except BaseException:
                set_generators(generator)
                raise
            if not verdict.lost:
                set_generators(generator)
            return verdict

    return judged


@undisturbed
def check(program: Program) -> Verdict:
    """Runs a program eager and dispatched and compares: twice as the sample, then in variations chosen by the seed.

    On a GPU, skips calls that raise on the host: an index out of range there would leave the process without its GPU.
    """
    names = program.load()
    rng = random.Random(program.seed)
    options = {"partition": rng.choice(PARTITIONS), "on_miss": rng.choice(ON_MISS)}
    harmful: set[str] = set()
    if DEVICE.type != "cpu":
        on_host = program.load(torch.device("cpu"))
        if error := eager_error(on_host, _as_sample(on_host)):
            return Verdict("skipped", f"eager: {one_line(error)}")
        harmful = _harmful(program, on_host)
    if error := eager_error(names, _as_sample(names)):
        return Verdict("skipped", f"eager: {one_line(error)}", is_lost(error))
    names = program.load()  # with empty caches
    return judge(names, lambda: [call for call in calls_of(program, names) if call.name not in harmful], options)


def _as_sample(names: Mapping[str, Any]) -> Call:
    return Call("eager", lambda: make_arguments(names, 0), nothing, every)


def eager_error(
    names: Mapping[str, Any], call: Call, kinds: tuple[type[Exception], ...] = EAGER_ERRORS
) -> Exception | None:
    """Eager's error of these kinds in a call of a new module; it may come from the backward."""
    module = make_module(names)
    call.change(module)
    try:
        play(module, call)
    except kinds as error:
        return error
    return None


def _harmful(program: Program, on_host: Mapping[str, Any]) -> set[str]:
    """Names of calls with strange arguments that raise on the host, and of others with indices out of range there."""
    found = {call: eager_error(on_host, call, (Exception,)) for call in calls_of(program, on_host)}
    return {call.name for call, error in found.items() if error and (call.strange or "out of" in str(error).lower())}


def judge(
    names: Mapping[str, Any],
    calls: Callable[[], Sequence[Call]],
    options: Mapping[str, Any],
    look: Callable[[nn.Module, Call], None] | None = None,
) -> Verdict:
    """Dispatches a loaded program's module by the sample call, with options, and compares calls with eager.

    ``look``: called after each call that returned, may raise :class:`Wrong`.
    """
    eager, dispatched = make_module(names), make_module(names)
    comparison = Comparison(eager, dispatched)
    try:
        add(dispatched, make_arguments(names, 0), options)
        made, done, counts = calls(), 0, _counted(eager)
        for call in made:
            done += comparison.call(call)
            if look is not None:
                look(dispatched, call)
    except EagerRaises as skip:
        return Verdict("skipped", f"eager: {one_line(skip.__cause__)}", is_lost(skip.__cause__))
    except UnsupportedModule as refusal:
        if not refusal.ops or not all(op.op and op.reason and op.where for op in refusal.ops):
            return Verdict("wrong", f"a refusal without a reason: {refusal}")
        return Verdict("refused", "; ".join(f"{op.op}: {op.reason}" for op in refusal.ops)[:300])
    except Wrong as difference:
        return Verdict("wrong", one_line(difference))
    except RuntimeError as error:
        if str(error).startswith("create_graph=True through the backward of an autograd.Function"):
            return Verdict("refused", one_line(error))
        return Verdict("crash", f"{one_line(error)} @ {place(error)}", is_lost(error))
    except Exception as error:  # noqa: BLE001 - any other exception is a bug to be listed
        return Verdict("crash", f"{one_line(error)} @ {place(error)}", is_lost(error))
    counted = stats(dispatched)
    if not _counts_all(counted, counts, done, len(made)):
        return Verdict("wrong", f"{done} of {len(made)} calls returned, {counted}")
    if not counted.hits:
        return Verdict("missed", "; ".join(counted.misses))
    if comparison.imprecise:
        return Verdict("imprecise", f"eager's {', '.join(sorted(comparison.imprecise))} on {DEVICE.type}")
    return Verdict("same", "; ".join(counted.misses))


def _counted(module: nn.Module) -> Counter[str]:
    """Counts the calls of a module and of the modules inside it from now on, by path."""
    counts: Counter[str] = Counter()

    def counting(path: str, child: nn.Module) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[path] += 1
            return child._call_impl(*args, **kwargs)

        return call

    for path, child in module.named_modules():
        child.__dict__[COMPILED_CALL] = counting(path, child)
    return counts


def _counts_all(counted: DispatchStats, counts: Mapping[str, int], done: int, most: int) -> bool:
    """Whether each call is a hit or a miss: of the model, or of each part as often as eager called the part.

    Args:
        counts: eager's calls by path.
        done: the model's calls that returned; ``most``: all of them.
    """
    if not isinstance(counted, PartStats):
        return done <= counted.hits + counted.misses.total() <= most
    pairs = [(each.hits + each.misses.total(), counts[path]) for path, each in counted.parts.items()]
    return all(told == wanted or (told < wanted and done < most) for told, wanted in pairs)
