"""Chosen chains: the chains of a neutral graph → the products of those that a trial found quicker as one kernel.

A trial is a program of the chain alone, in both forms, run by turns on memory of its own. It is made once per machine:
its seconds are kept as those of products are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial

import torch

from bridge.base.log import channel
from bridge.base.threads import held
from bridge.compile.backend import Backend
from bridge.compile.loop_ir.graph import Graph, Value
from bridge.compile.loop_ir.neutral import MatMul
from bridge.compile.options import CompileOptions
from bridge.compile.passes.chains import Chain, chains_in
from bridge.compile.passes.choose_layouts import choose_layouts
from bridge.compile.runtime.link import assemble
from bridge.compile.schedule.products import ProductPolicy

__all__ = ["STEPS", "chosen_chains", "clear_chains"]

_LOG = channel("compile")

STEPS, CHAIN = "steps", "chain"

_WORTH = 0.95
"""What a chain may take at most, of the time of its steps, to be chosen."""

Optimize = Callable[[Graph, Backend], Graph]
"""What every graph goes through once its layouts are chosen."""

_CHOSEN: dict[tuple, bool] = {}
_LOCK = threading.Lock()


def clear_chains() -> None:
    """Forgets every choice made in this process."""
    with _LOCK:
        _CHOSEN.clear()


def chosen_chains(
    graph: Graph, options: CompileOptions, policy: ProductPolicy, optimize: Optimize
) -> frozenset[MatMul]:
    """Products of a frozen call that chains are to compute.

    Where gradients are asked for, the way of a product follows from its shape alone, and there are no chains.
    """
    if not policy.chains or not options.constants:
        return frozenset()
    chosen: set[MatMul] = set()
    for chain in chains_in(graph):
        if not chosen & {chain.first, chain.second} and _is_quicker(chain, graph.constants, options, policy, optimize):
            chosen |= {chain.first, chain.second}
    return frozenset(chosen)


def _is_quicker(
    chain: Chain, constants: Mapping[Value, object], options: CompileOptions, policy: ProductPolicy, optimize: Optimize
) -> bool:
    backend, text = options.backend, chain.text
    key = backend.key, options.threads, text
    with held(_LOCK):
        if key not in _CHOSEN:
            make = partial(_forms, chain, constants, backend, policy, optimize)
            times = policy.seconds_of_chain(text, (STEPS, CHAIN), make)
            _CHOSEN[key] = len(times) == 2 and times[CHAIN] <= _WORTH * times[STEPS]
            seconds = ", ".join(f"{way} {1e3 * each:.3f}" for way, each in times.items())
            name = f"{chain.first.out.shape} {chain.second.out.shape}"
            _LOG.info("chain %s: %s (milliseconds: %s)", name, CHAIN if _CHOSEN[key] else STEPS, seconds)
        return _CHOSEN[key]


def _forms(
    chain: Chain, constants: Mapping[Value, object], backend: Backend, policy: ProductPolicy, optimize: Optimize
) -> dict[str, Callable[[], object]]:
    """What runs each form; the steps alone where the other one is no chain after all."""
    graph, products = chain.graph(dict(constants))
    inputs = [torch.ones(param.shape, dtype=getattr(torch, param.dtype)) for param in graph.params]
    programs = {}
    for way, chained in ((STEPS, frozenset()), (CHAIN, products)):
        placed = optimize(choose_layouts(graph, backend, policy, chained=chained), backend)
        programs[way] = assemble(placed, f"trial_{way}", backend, {})
    if len(programs[CHAIN].steps) >= len(programs[STEPS].steps):
        del programs[CHAIN]
    return {way: partial(program, inputs) for way, program in programs.items()}
