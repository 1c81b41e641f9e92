"""Samples of families: many cases of one path → parameters of which some run always and the others are sweeps.

One case of each path of the product runs always (``make test``): among cases that run the same code on other numbers,
shapes or types, the cheapest that is as strict as the others; a whole model, if it covers a path that no smaller test
covers. A family keeps at least one case, unless another family covers all of it. The rest is run by ``make test-all``,
and on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

import pytest

_PARAM = type(pytest.param())


def sampled(cases: Iterable[Any], always: Container | Callable[[Any], bool]) -> list[Any]:
    """Parameters for ``pytest.mark.parametrize``, in the order of the cases; ``make test-all`` runs all of them.

    Args:
        cases: values, tuples of them where a test has several parameters at once, or either as a ``pytest.param`` with
            marks, which stay.
        always: the cases that run in ``make test``, or a predicate. Each path of the product has one of them.
    """
    runs = always if callable(always) else always.__contains__
    found = []
    for case in cases:
        given = case if isinstance(case, _PARAM) else pytest.param(*(case if type(case) is tuple else (case,)))
        value = given.values[0] if len(given.values) == 1 else tuple(given.values)
        marks = [*given.marks] if runs(value) else [*given.marks, pytest.mark.sweep]
        found.append(pytest.param(*given.values, marks=marks, id=given.id))
    return found


def spread(cases: Iterable[Any], step: int = 2) -> list[Any]:
    """Every ``step``-th of the cases, the first among them: of families whose neighbours are of a kind."""
    return [*cases][::step]
