"""Scopes as data: a scope ↔ its symbols and guards as frozen values, for a file or another process."""

from __future__ import annotations

from dataclasses import dataclass

from autodiff.extents.extent import ExtentScope
from autodiff.extents.guard import SizeGuard

__all__ = ["ScopeState", "scope_of_state", "state_of_scope"]


@dataclass(frozen=True)
class ScopeState:
    """A scope as it is now: of each symbol ``(name, sample, low, high)``, and the guards."""

    symbols: tuple[tuple[str, int, int | None, int | None], ...]
    guards: tuple[SizeGuard, ...]


def state_of_scope(scope: ExtentScope) -> ScopeState:
    """What a scope holds."""
    symbols = ((symbol, scope.ranges[symbol], sample) for symbol, sample in scope.samples.items())
    return ScopeState(
        tuple((symbol.name, sample, bounds.low, bounds.high) for symbol, bounds, sample in symbols), scope.guards
    )


def scope_of_state(state: ScopeState) -> ExtentScope:
    """A new scope that holds the same."""
    scope = ExtentScope()
    for name, sample, low, high in state.symbols:
        scope.symbol(name, sample, low, high)
    scope._guards.update(dict.fromkeys(state.guards))
    return scope
