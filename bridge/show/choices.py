"""Choices of an entry in words: which come from a tuning, which were measured at first use, which are the default."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.compile import CallLibrary, Instruction, Launch, Loop
from bridge.dispatch import Entry

__all__ = ["choices_of"]

_PRODUCTS = frozenset(["mm", "mm_lt", "mm_biased", "mm_swapped", "linear", "packed", "bmm"])
"""Library kernels that a way of a matrix product names."""


def choices_of(entry: Entry) -> Iterator[str]:
    """A line for each choice or kind of choices of an entry."""
    tuned, backend = entry.tuned, entry.backend
    if tuned is not None:
        yield str(tuned)
        yield from (f"{each} (tuned)" for each in tuned.choices.words(backend.limits, backend.order))
    if layers := sum(step.name == "recurrent_layers" for step in entry.forward.steps):
        calls = "1 call" if layers == 1 else f"{layers} calls"
        yield f"{calls} of recurrent layers: cuDNN's kernels, by sizes for which these were measured to be quicker"
    products = sum(_products(program.steps) for program in (entry.forward, entry.backward) if program is not None)
    if products:
        ways = "measured at first use, small ones the library's" if backend.measures_products else "the library's"
        others = "others " if tuned is not None and tuned.choices.products else ""
        yield f"{products} matrix products: {others}{ways}"
    yield "everything else: default" if tuned is not None else "limits, orders and partition: default; not tuned"


def _products(steps: tuple[Instruction, ...]) -> int:
    count = 0
    for step in steps:
        if isinstance(step, Loop):
            count += _products(step.steps)
        elif isinstance(step, Launch):
            count += any(operation.op == "matmul" for operation in step.contents.operations)
        elif isinstance(step, CallLibrary):
            count += step.name in _PRODUCTS
    return count
