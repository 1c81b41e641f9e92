"""Isolated RNG: eager code runs on the side → the default generator is where it was.

Drawing from it and putting its state back would do in a process of one thread. Where another one draws meanwhile, that
would make its numbers come again.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import torch

from bridge.base.torch_internals import TorchDispatchMode, overload_packet, schema

__all__ = ["IsolatedRNG", "with_generator"]


class IsolatedRNG(TorchDispatchMode):
    """While active, what this thread draws from the default CPU generator comes from one of its own.

    An operator that takes no generator (``native_dropout`` called by name) moves the default one, which is put back; so
    is, at the end, a generator that the code itself passes to an operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator()
        self._generator.set_state(torch.default_generator.get_state())  # a branch on a draw is the one that comes next
        self._passed: list[tuple[torch.Generator, torch.Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if (passed := kwargs.get("generator")) is not None:
            self._passed.append((passed, passed.get_state()))
            return func(*args, **kwargs)
        if (taker := with_generator(func)) is not None:
            return taker(*args, **kwargs, generator=self._generator)
        with torch.random.fork_rng(devices=[]):
            return func(*args, **kwargs)

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        while self._passed:
            generator, state = self._passed.pop()
            generator.set_state(state)


@functools.cache
def with_generator(func: Any) -> Any:
    """The operator with an argument for a generator, or its overload that differs in that only; ``None`` without."""

    def arguments(operator: Any) -> list[tuple[str, str]]:
        return [(argument.name, str(argument.type)) for argument in schema(operator).arguments]

    generator, wanted = ("generator", "Optional[Generator]"), arguments(func)
    if generator in wanted:
        return func
    packet = overload_packet(func)
    for overload in map(partial(getattr, packet), packet.overloads()):
        found = arguments(overload)
        if generator in found and [argument for argument in found if argument != generator] == wanted:
            return overload
    return None
