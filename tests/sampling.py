"""Samples of families: many cases of one path → parameters of which some run always and the others are sweeps."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

import pytest

__all__ = ["sampled"]


def sampled(cases: Iterable[Any], always: Container | Callable[[Any], bool]) -> list[Any]:
    """Parameters for ``pytest.mark.parametrize``, in the order of the cases; ``make test-all`` runs all of them.

    Args:
        cases: values, or tuples of them where a test has several parameters at once.
        always: those that run in ``make test``, or what says so of a case. Each path of the product has one of them.
    """
    runs = always if callable(always) else always.__contains__
    marks = {True: (), False: (pytest.mark.sweep,)}
    return [pytest.param(*(each if type(each) is tuple else (each,)), marks=marks[bool(runs(each))]) for each in cases]
