"""Choices by the clock → fixed ones, here and in processes that tests start: tests compare no times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bridge.compile.cpu import products
from bridge.compile.schedule.products import GENERATED
from bridge.dispatch import profitability
from bridge.trials import Pace


def choose_without_clock(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Matrix products are generated code where it is a candidate, torch's elsewhere; small calls are timed once.

    A small call is timed beside eager after first-use set-up. ``put``: pytest's ``setattr``, which takes it back.
    """
    put(products, "measured", lambda policy, product, ways: {GENERATED if GENERATED in ways else ways[0]: 1.0})
    put(profitability, "_PACE", Pace(fewest=1, most=1, warm_up=2))
