"""Isolated RNG: eager code runs on the side → the default generators, those of GPUs included, are where they were.

Drawing from it and putting its state back would do in a process of one thread. Where another one draws meanwhile, that
would make its numbers come again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from bridge.base.devices import HOST, current_device
from bridge.base.generators import default_generator, generator_device, offset_of, on_side_states
from bridge.base.torch_internals import TorchDispatchMode, overload_packet, pytree, schema

__all__ = ["TORCHS", "IsolatedRNG", "draws", "watched_operators", "with_generator"]

TORCHS = ("aten", "prims", "tvm_dispatch")
"""Namespaces of operators whose tags say whether they draw."""


class IsolatedRNG(TorchDispatchMode):
    """While active, what this thread draws from a default generator comes from one of its own, at the same state.

    Args:
        watch: called with each operator that runs, its arguments, and what to call for its result, which it returns.
        isolates: whether draws are that; operators on fake tensors draw nothing.

    An operator that takes no generator (``native_dropout``, which is a GPU's dropout) moves the default one, which is
    put back; so is, at the end, a generator that the code itself passes to an operator.

    Attributes:
        advance: how far the last draw moved a GPU's offset.
        passed: generators that were passed to operators, and their states before.
    """

    advance: int | None = None

    def __init__(self, watch: Callable[..., Any] | None = None, isolates: bool = True) -> None:
        super().__init__()
        self._watch, self._isolates = watch, isolates
        # a branch on a draw is the one that comes next
        devices = {HOST, generator_device(current_device())} if isolates else ()
        self._generators = {device: _twin(device) for device in devices}
        self.passed: list[tuple[torch.Generator, torch.Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        call = func
        if self._isolates and (draws(func) or func.namespace not in TORCHS):
            call = partial(self._drawn if draws(func) else self._on_side, func)
        return call(*args, **kwargs) if self._watch is None else self._watch(call, func, args, kwargs)

    def _drawn(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        if (passed := kwargs.get("generator")) is not None:
            self.passed.append((passed, passed.get_state()))
            return func(*args, **kwargs)
        device = generator_device(_device(args, kwargs))
        if device not in self._generators:
            self._generators[device] = _twin(device)
        generator = self._generators[device]
        before = offset_of(generator)
        if (taker := with_generator(func)) is not None:
            result = taker(*args, **{**kwargs, "generator": generator})
        else:
            with on_side_states(default_generator(device), generator):
                result = func(*args, **kwargs)
        self.advance = None if before is None else offset_of(generator) - before
        return result

    def _on_side(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """An operator of the user's, which may draw without saying so."""
        with ExitStack() as stack:
            for device, generator in self._generators.items():
                stack.enter_context(on_side_states(default_generator(device), generator))
            return func(*args, **kwargs)

    def states(self) -> list[torch.Tensor]:
        """Where what is drawn takes its numbers from."""
        return [generator.get_state() for generator in self._generators.values()]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for generator, state in reversed(self.passed):
            generator.set_state(state)


def watched_operators(watch: Callable[[Any, tuple, dict[str, Any]], Any]) -> IsolatedRNG:
    """While active, each operator that runs is made by ``watch``, which returns what it gives."""
    return IsolatedRNG(lambda call, func, args, kwargs: watch(func, args, kwargs), isolates=False)


def _twin(device: torch.device) -> torch.Generator:
    """A generator in the state of the default one."""
    twin = torch.Generator(device)
    twin.set_state(default_generator(device).get_state())
    return twin


def _device(args: tuple, kwargs: dict[str, Any]) -> torch.device:
    """Where an operator draws: on the device that it is told, or that of its first tensor."""
    if (told := kwargs.get("device")) is not None:
        return torch.device(told)
    tensors = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    return next((tensor.device for tensor in tensors), HOST)


@functools.cache
def draws(func: Any) -> bool:
    """Whether an operator is told to draw random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


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
