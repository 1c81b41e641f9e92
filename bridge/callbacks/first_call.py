"""Dispatch at the first call: modules of a model → each is dispatched in the state of its first call.

The first call has the training loop's state: train mode, autocast, gradient checkpointing, the model inside DDP.
:func:`chosen_layers` selects the modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

from torch import nn

from bridge.base.log import channel
from bridge.dispatch import NO_ENTRY, DispatchStats, add_tvm_dispatch, dispatcher_of, remove_tvm_dispatch, stats

__all__ = ["DispatchAtFirstCall", "Layers", "LightningMethods", "chosen_layers"]

Layers = str | type | Iterable[str | type] | Callable[[str, nn.Module], bool] | None

WHOLE = "whole"


def chosen_layers(model: nn.Module, layers: Layers = None) -> dict[str, nn.Module]:
    """A model → the modules to dispatch, by name; none is inside another.

    Args:
        model: the model to search.
        layers: ``None`` for the repeated blocks (children of one class in an ``nn.ModuleList`` or ``nn.Sequential``
            that have children of their own), or the whole model if there are none; ``"whole"`` for the whole model; a
            class or its name, or several; or a predicate of a module's name and the module.

    Raises:
        ValueError: no module of the model matches ``layers``.
        TypeError: ``layers`` has another type.
    """
    if layers == WHOLE:
        return {"": model}
    if layers is None:
        return dict(_repeated_blocks(model, "")) or {"": model}
    found = _outermost(model, "", _predicate(layers))
    if not found:
        classes = ", ".join(sorted({type(child).__name__ for child in model.modules() if any(child.children())}))
        raise ValueError(f"layers={layers!r} names nothing in {type(model).__name__}; its classes are {classes}")
    return found


def _predicate(layers: Layers) -> Callable[[str, nn.Module], bool]:
    if isinstance(layers, str | type):
        layers = [layers]
    if not isinstance(layers, Iterable):
        if not callable(layers):
            raise TypeError(f"layers: wanted class names, classes, a predicate, 'whole' or None, got {layers!r}")
        return layers
    wanted = list(layers)
    names = {each for each in wanted if isinstance(each, str)}
    kinds = tuple(each for each in wanted if isinstance(each, type))
    if len(names) + len(kinds) < len(set(wanted)):
        raise TypeError(f"layers: wanted class names or classes, got {wanted!r}")
    return lambda name, module: type(module).__name__ in names or isinstance(module, kinds)


def _outermost(module: nn.Module, name: str, chosen: Callable[[str, nn.Module], bool]) -> dict[str, nn.Module]:
    if chosen(name, module):
        return {name: module}
    found: dict[str, nn.Module] = {}
    for child_name, child in module.named_children():
        found.update(_outermost(child, _joined(name, child_name), chosen))
    return found


def _repeated_blocks(module: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    children = list(module.named_children())
    of_one_class = len({type(child) for _, child in children}) == 1
    enough = len(children) > 1 or (isinstance(module, nn.ModuleList) and bool(children))
    if isinstance(module, nn.ModuleList | nn.Sequential) and of_one_class and enough:
        if all(any(child.children()) and any(True for _ in child.parameters()) for _, child in children):
            if not isinstance(children[0][1], nn.ModuleList | nn.ModuleDict):  # containers are never called
                return [(_joined(name, child_name), child) for child_name, child in children]
    return [block for child_name, child in children for block in _repeated_blocks(child, _joined(name, child_name))]


def _joined(*parts: str) -> str:
    return ".".join(filter(None, parts))


log = channel("dispatch")


class DispatchAtFirstCall:
    """Dispatches modules of a model at their first calls; raises for none.

    A module that cannot be dispatched stays eager, with one warning per class, which names it and the reason.

    Args:
        layers: the modules: see :func:`bridge.callbacks.chosen_layers`; by default the repeated blocks.
        on_miss: for calls that match no entry: ``"compile"``, the default, also serves evaluation and the smaller batch
            at the end of an epoch; ``"eager"``, ``"error"`` as in :func:`bridge.add_tvm_dispatch`.
        partition: as in :func:`bridge.add_tvm_dispatch`.

    Attributes:
        refused: name of a module with a call that could not be compiled → the reason.
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
        """The modules with a compiled call, by name."""
        return {name: module for name, module in self._watched.items() if (of := _stats(module)) and of.entries}

    def watch(self, modules: dict[str, nn.Module]) -> None:
        """Dispatches each of these modules at its first call, except modules that are dispatched already."""
        for name, module in modules.items():
            self._watched[name] = module
            if _stats(module) is None:
                try:
                    add_tvm_dispatch(module, on_miss=self.on_miss, partition=self.partition)
                    dispatcher_of(module).on_refused = partial(self._refused, name, module)
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
        """Removes the dispatch from modules without a compiled call."""
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
        """Calls :meth:`stop` and logs the report: as a warning if there were more misses than hits."""
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


class LightningMethods(DispatchAtFirstCall):
    """The hooks of ``lightning.pytorch.Callback`` that dispatch a module's layers; needs no Lightning."""

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Watches the layers; Lightning calls this after its validation sanity check, so the first call is training."""
        chosen = chosen_layers(pl_module, self.layers)
        if "" in chosen:  # Lightning calls the module's steps, which call its children, not its forward
            held = dict(pl_module.named_children())
            chosen = {name: child for name, child in held.items() if any(True for _ in child.parameters())}
        self.watch(chosen)

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        self.end()
