"""Which modules of a model to dispatch: class names, a predicate, or the model's repeated blocks → modules by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

__all__ = ["Layers", "chosen_layers"]

Layers = str | type | Iterable[str | type] | Callable[[str, nn.Module], bool] | None

WHOLE = "whole"


def chosen_layers(model: nn.Module, layers: Layers = None) -> dict[str, nn.Module]:
    """The modules to dispatch, by their names in ``model``; none of them lies inside another.

    Args:
        model: where to look.
        layers: ``None`` for the repeated blocks (children of one class in an ``nn.ModuleList`` or ``nn.Sequential``,
            that have children of their own), or the whole model where there are none; ``"whole"`` for the whole model;
            a class or its name, or several; or a predicate of a module's name and the module.

    Raises:
        ValueError: nothing in the model is meant by ``layers``.
        TypeError: ``layers`` is none of these.
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
            if not isinstance(children[0][1], nn.ModuleList | nn.ModuleDict):  # these are never called
                return [(_joined(name, child_name), child) for child_name, child in children]
    return [block for child_name, child in children for block in _repeated_blocks(child, _joined(name, child_name))]


def _joined(*parts: str) -> str:
    return ".".join(filter(None, parts))
