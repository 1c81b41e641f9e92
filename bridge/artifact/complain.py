"""Complaints: one warning for each kind of trouble with the cache, however often it is met."""

from __future__ import annotations

from bridge.base.log import channel

__all__ = ["complain", "forget_complaints"]

_LOG = channel("cache")

_TOLD: set[str] = set()


def complain(trouble: str, detail: str) -> None:
    """Warns of ``trouble`` the first time, tells the log's details later."""
    if trouble in _TOLD:
        _LOG.debug("%s: %s", trouble, detail)
        return
    _TOLD.add(trouble)
    _LOG.warning("%s: %s (said once; compiled as without a cache)", trouble, detail)


def forget_complaints() -> None:
    """Warn again."""
    _TOLD.clear()
