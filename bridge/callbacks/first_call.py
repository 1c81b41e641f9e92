"""Dispatch at the first call: modules → each is dispatched in the state of the first call that is made of it.

The first call has everything around it: train mode, autocast, gradient checkpointing, the model inside DDP.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, Literal

from torch import nn

from bridge.base.log import channel
from bridge.callbacks.choose import Layers
from bridge.dispatch import NO_ENTRY, DispatchStats, dispatch_at_first_call, remove_tvm_dispatch, stats

__all__ = ["DispatchAtFirstCall"]

log = channel("dispatch")


class DispatchAtFirstCall:
    """Dispatches modules of a model at their first calls; refuses nothing.

    A module that cannot be dispatched stays eager, with one warning for each class, that names it and says why.

    Args:
        layers: which modules: see :func:`bridge.callbacks.chosen_layers`; by default the repeated blocks.
        on_miss: for calls unlike the first: ``"compile"``, the default, also serves evaluation and the smaller batch
            at the end of an epoch; ``"eager"``, ``"error"`` as in :func:`bridge.add_tvm_dispatch`.
        partition: as in :func:`bridge.add_tvm_dispatch`.

    Attributes:
        refused: name of each module of which a call could not be compiled → why.
    """

    def __init__(
        self,
        layers: Layers = None,
        *,
        on_miss: Literal["eager", "compile", "error"] = "compile",
        partition: Any = "min_cut",
    ):
        self.layers = layers
        self.on_miss = on_miss
        self.partition = partition
        self.refused: dict[str, str] = {}
        self._watched: dict[str, nn.Module] = {}
        self._warned: set[tuple[type, str]] = set()

    @property
    def dispatched(self) -> dict[str, nn.Module]:
        """The modules that calls have been compiled of, by name."""
        return {name: module for name, module in self._watched.items() if (of := _stats(module)) and of.entries}

    def watch(self, modules: dict[str, nn.Module]) -> None:
        """Dispatches each of these modules at its first call; those that are dispatched already stay as they are."""
        for name, module in modules.items():
            self._watched[name] = module
            if _stats(module) is None:
                try:
                    refused = partial(self._refused, name, module)
                    dispatch_at_first_call(module, refused, on_miss=self.on_miss, partition=self.partition)
                except ValueError as error:  # module.compile() was here before
                    self._refused(name, module, "it is called", error)

    def _refused(self, name: str, module: nn.Module, call: str, why: object) -> None:
        """Warns once for each class and kind of call."""
        self.refused[name] = str(why)
        kind = type(module), call.partition(":")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            where = "" if call.startswith(NO_ENTRY) else f" where {call}"
            words = "%s stays eager%s, as further ones of class %s may: %s"
            log.warning(words, name or "the model", where, type(module).__name__, why)

    def stop(self) -> None:
        """Takes the dispatch off modules that were never called, or never compiled."""
        for name, module in self._watched.items():
            if name not in self.dispatched:
                remove_tvm_dispatch(module)

    def report(self) -> str:
        """Hits and misses of all dispatched modules, in one line."""
        dispatched = list(self.dispatched.values())
        hits, misses = _counted(dispatched)
        kinds = Counter(type(module).__name__ for module in dispatched)
        line = f"{', '.join(f'{count} x {kind}' for kind, count in kinds.items()) or 'nothing'} dispatched to TVM: "
        line += f"{hits} hits, {sum(misses.values())} misses"
        if misses:
            reason, count = misses.most_common(1)[0]
            line += f" ({count} x {reason})"
        stays = [name for name in self.refused if name not in self.dispatched]
        return line + (f"; {len(stays)} stay eager" if stays else "")

    def end(self) -> None:
        """Stops waiting, and logs the report: as a warning if calls were missed more often than they were served."""
        self.stop()
        hits, misses = _counted(list(self.dispatched.values()))
        (log.warning if sum(misses.values()) > hits else log.info)("%s", self.report())


def _counted(modules: list[nn.Module]) -> tuple[int, Counter[str]]:
    counted = [stats(module) for module in modules]
    return sum(each.hits for each in counted), sum((Counter(each.misses) for each in counted), Counter())


def _stats(module: nn.Module) -> DispatchStats | None:
    try:
        return stats(module)
    except ValueError:
        return None
