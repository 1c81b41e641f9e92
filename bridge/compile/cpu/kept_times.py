"""Measured products on disk: a class of products → seconds of its ways, measured once per machine and not once per
process.

Seconds are kept, not the choice: which way they speak for is decided anew, the same way in every process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple

from bridge.artifact import current_store, made_once, of_this_package
from bridge.compile.cpu.host import fingerprint
from bridge.compile.schedule.products import ProductShape

__all__ = ["kept_times"]

_KIND = "product"


def kept_times(
    target: str,
    threads: int,
    product: ProductShape | str,
    ways: Sequence[str],
    measure: Callable[[], Mapping[str, float]],
) -> Mapping[str, float]:
    """What ``measure`` returns: seconds of some of the ways; from the disk cache where it was measured before.

    Args:
        target: what generated ways are built for.
        threads: that products run on.
        product: the class, or a chain of products as text.
        ways: the candidates.
    """
    store = current_store()
    if not store.is_usable:
        return measure()
    plain = product if isinstance(product, str) else astuple(product)
    key = of_this_package(_KIND, target, threads, fingerprint(), str(product), plain, list(ways))

    def look() -> Mapping[str, float] | None:
        found = store.get(_KIND, key)
        return None if found is None else json.loads(found.parts["seconds"])

    def measure_and_keep() -> Mapping[str, float]:
        times = dict(measure())
        store.put(_KIND, key, {"seconds": json.dumps(times).encode()}, f"{product} on {threads} threads")
        return times

    return made_once(store, key, look, measure_and_keep)
