"""Seeds of the fuzzer as cases: plain modules, dynamic sizes, loops over time."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from bridge import add_tvm_dispatch
from tests.corpus.case import Case, Seen
from tests.device import generators
from tests.fuzz.calls import Call, every, nothing
from tests.fuzz.check import PARTITIONS
from tests.fuzz.dynamic import vary
from tests.fuzz.generate import generate
from tests.fuzz.loops import _short_loops, generate_loop
from tests.fuzz.play import play
from tests.fuzz.program import PREAMBLE, Arguments, Program, make_arguments, make_module

CALLS = 2
"""Calls of a plain module: with the sample's numbers, then with others."""
SIZES = 3
"""Number of called sizes in a variation's range, the sample's first."""


def plain(name: str) -> Case:
    """A seed of ``python -m tests.fuzz``."""
    return _case(generate(int(name)))


def loops(name: str) -> Case:
    """A seed of ``python -m tests.fuzz --loops``; short loops are recorded as well."""
    seed = int(name)
    return _case(generate_loop(seed), context=_short_loops)


def dynamic(name: str) -> Case | None:
    """A seed of ``python -m tests.fuzz --dynamic``; ``None`` if no size can vary."""
    program = generate(int(name))
    variation = vary(program)
    if variation is None:
        return None
    shapes = variation.dynamic_shapes()
    options = {"on_miss": "compile"} if shapes is None else {"on_miss": "eager", "dynamic_shapes": shapes}
    arguments = [partial(variation.arguments, sizes, seed) for seed, sizes in enumerate(variation.sizes[:SIZES])]
    return _case(variation.at(variation.sample), arguments, options, about=str(variation))


def _case(
    program: Program,
    arguments: list[Callable[[], Arguments]] | None = None,
    options: dict[str, Any] | None = None,
    about: str = "",
    **others: Any,
) -> Case:
    names = program.load()
    arguments = arguments or [partial(make_arguments, names, seed) for seed in range(CALLS)]
    options = {"partition": random.Random(program.seed).choice(PARTITIONS), **(options or {"on_miss": "eager"})}

    def add(module: nn.Module) -> None:
        given = make_arguments(names, 0)
        add_tvm_dispatch(module, given.args, sample_kwargs=given.kwargs, **options)

    calls = [partial(_played, Call(f"call {i}", make, nothing, every)) for i, make in enumerate(arguments)]
    text = program.source.removeprefix(PREAMBLE)
    return Case(partial(make_module, names), add, calls, f"{text}\n{about}", **others)


def _played(call: Call, module: nn.Module) -> Seen:
    found = play(module, call)
    values = {**found.values, "generator": found.generator, "generator at the end": generators()}
    return Seen(values, f"{found.form} {sorted(found.shared)}")
