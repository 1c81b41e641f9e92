"""Uncomputed results: a call like one that was computed before -> tensors of its results' layouts, in less time.

A recorded run tells which calls forward makes; of its numbers nothing is used, and a run that looks at one is no
recording. What a call's results are like (layouts, whether autograd follows them, and from where) is a function of the
function, its constants, and the layouts of what it reads: so the second call of a kind need not compute. Its results
are memory as it comes, connected to what autograd would reach from them.

Only floating-point numbers are left out. One that became an integer could be an index out of range: the recording ends,
and another computes everything. So does each run on a GPU, where a number out of a kernel's range ends the process's
context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from bridge.base.devices import HOST
from bridge.base.torch_autograd import connected
from bridge.base.torch_internals import empty_strided, storage_id
from bridge.capture.loops.calls import Form

__all__ = ["INTEGERS", "LEAST_ELEMENTS", "Answer", "Like", "Uncomputed"]

INTEGERS = "integers that are made of numbers"
"""Why a recording ends that does not compute, and one that does would not."""

LEAST_ELEMENTS = 1 << 13
"""Elements that a call reads and makes from which leaving it out takes less time than computing it."""


class Answer(NamedTuple):
    """What is known of the results of a kind.

    Attributes:
        forms: shape, strides and element type of each.
        is_tuple: whether they are a tuple.
        reached: which of the tensors that it reads autograd reaches from the results; ``None``: none requires grad.
        numel: elements of the first one.
    """

    forms: tuple[tuple, ...]
    is_tuple: bool
    reached: tuple[int, ...] | None
    numel: int


class Like(NamedTuple):
    """What is known of a call that was made and watched: what it does is a function of the torch function, its
    constants and the layouts of what it reads, so that the next like it does the same.

    Attributes:
        kind, number: of its row.
        answer: how it is left out; ``None``: it is not.
        forms: of its results, each with a number that tells its layout and whether autograd follows it.
        operators: how many it runs.
    """

    kind: int
    number: int | float | None
    answer: Answer | None
    forms: tuple[tuple[Form, int], ...]
    operators: int


class Uncomputed:
    """The kinds of calls that are known in a run.

    Attributes:
        left_out: how many calls were not computed.
    """

    def __init__(self) -> None:
        self.left_out = 0
        self._answers: dict[tuple, Answer | None] = {}
        self._values: set[int] = set()

    def results(self, known: Answer, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results of a call, in memory of their own, that is left out."""
        self.left_out += 1
        results = [empty_strided(*form) for form in known.forms]
        if known.reached is not None:
            results = connected(results, [given[place] for place in known.reached])
        return results

    def learned(self, asked: tuple, given: Sequence[torch.Tensor], result: Any) -> Answer | None:
        """A call was computed: the next like it need not be, if its results are floating-point memory of their own."""
        if asked not in self._answers:
            self._answers[asked] = _answer(given, result)
        return self._answers[asked]

    def left_out_are(self, makes: Sequence[int]) -> None:
        """Notes the values of a call that was left out, which are of floating point."""
        self._values.update(makes)

    def made(self, reads: Sequence[int], makes: Sequence[int], forms: Sequence[Form]) -> str | None:
        """Notes the values of a call that was made. Why the recording ends, if it does."""
        if self._values.isdisjoint(reads):
            return None
        self._values.update(makes)
        if any(not forms[value].dtype.is_floating_point and forms[value].dtype != torch.bool for value in makes):
            return INTEGERS
        return None


def _answer(given: Sequence[torch.Tensor], result: Any) -> Answer | None:
    is_tuple = type(result) is tuple
    results = result if is_tuple else (result,)
    if connected is None or not given or not all(type(each) is torch.Tensor for each in results):
        return None
    if not all(each.dtype.is_floating_point and each.device == HOST for each in results):
        return None
    if not all(each.dtype.is_floating_point or each.dtype == torch.bool for each in given):
        return None
    if sum(each.numel() for each in (*given, *results)) < LEAST_ELEMENTS:
        return None
    own = {storage_id(each) for each in results}
    if len(own) < len(results) or not own.isdisjoint(map(storage_id, given)):
        return None  # a view, which takes no time
    follows = {each.requires_grad for each in results}
    if len(follows) > 1:
        return None
    reached = tuple(_reached(given, results)) if follows.pop() else None
    forms = tuple((tuple(each.shape), each.stride(), each.dtype) for each in results)
    return Answer(forms, is_tuple, reached, results[0].numel())


def _reached(given: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[int]:
    """Which of the given tensors autograd reaches from the results."""
    own = {(each.grad_fn, each.output_nr) for each in given if each.grad_fn is not None}
    seen, found, leaves = set(), set(), set()
    waiting = [(each.grad_fn, 0) for each in results]
    while waiting:
        node, place = waiting.pop()
        if (node, place) in own:
            found.add((node, place))
            continue
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        waiting += node.next_functions
    return [index for index, each in enumerate(given) if id(each) in leaves or (each.grad_fn, each.output_nr) in found]
