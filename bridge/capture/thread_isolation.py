"""Thread isolation: one thread captures a module, the others go on as if nothing happened.

A call of the module itself, or of one inside it, waits in any other thread until the capture is over, since
``forward`` may keep things on the module. Dynamo compiles under the same lock, for its tracers change the same things.
What is replaced in torch meanwhile (the table of docs/capture.md) asks which thread calls, or does for all of them what
it did before. What is left is a trace that the user starts beside a capture: ``torch.export``, ``torch.fx``
and ``torch.jit`` take no lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from bridge.base.generators import of_gpus
from bridge.base.interrupts import raise_deferred
from bridge.base.torch_shapes import pooled_by_division
from bridge.capture.tracing import changes_of_generators, marked_capturing, one_capture_at_a_time

__all__ = ["recording"]


@contextmanager
def recording() -> Iterator[None]:
    """Around the runs of a module's twin: dispatched modules that this thread calls run eager, uncounted."""
    with ExitStack() as stack:
        stack.enter_context(one_capture_at_a_time())
        stack.enter_context(_generators_put_back())
        stack.enter_context(pooled_by_division())
        stack.enter_context(marked_capturing())
        yield
    raise_deferred()


@contextmanager
def _generators_put_back() -> Iterator[None]:
    """Undoes what a seed set by the traced code does to the default generators, those of GPUs included.

    Fake tensors draw nothing. A generator that has merely moved on was moved by another thread: put back, it would give
    the same numbers again.
    """
    before = [(generator, generator.initial_seed(), generator.get_state()) for generator in _defaults()]
    changed_before = changes_of_generators()
    try:
        yield
    finally:
        for generator, seed, state in before:
            now = generator.get_state()
            if torch.equal(now, state):
                continue
            fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed()).get_state()
            seeded = generator.initial_seed() != seed or torch.equal(now, fresh)
            if seeded or changes_of_generators() != changed_before:
                generator.set_state(state)


def _defaults() -> list[torch.Generator]:
    return [torch.default_generator, *of_gpus()]
