"""Module attributes: what a module owns besides its tensors → a snapshot, to undo a capture and to guard a call.

Tracing runs the user's ``forward``. Whatever Python state that run changes (``self.calls += 1``) a compiled
call would not change again, so such a module is refused; and the change made by the tracing is undone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from bridge.base.torch_internals import COMPILED_CALL, MODULE_HOOKS
from bridge.state.derived import derived_attributes
from bridge.state.values import CONTAINERS, same_inside, snapshot

__all__ = ["Snapshot", "hooks_of", "own_attributes", "written_class"]

# What nn.Module keeps in __dict__ for itself; parameters, buffers, submodules and flags are guarded separately.
# torch.compile(module) notes on the module that it did.
_INTERNAL = frozenset(nn.Module().__dict__) | {COMPILED_CALL, "_is_hf_initialized", "_is_torch_compile"}
# What torch's recurrent modules keep of their parameters in another form, and renew in forward where it is stale.
_RECURRENT_CACHES = ("_flat_weights", "_flat_weight_refs")
# How attributes begin in which fully_shard and replicate note on a module what they did to it.
_SHARDING_NOTES = ("__composable_api_state", "_fsdp_use_orig_params", "_is_fsdp_managed_module")


def own_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes that a module's own code put on it: all in ``__dict__`` that is not nn.Module's or derived."""
    for name, value in module.__dict__.items():
        if name not in _INTERNAL and not name.startswith(_SHARDING_NOTES) and not _is_renewed(module, name):
            yield name, value


def written_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that the user wrote: ``fully_shard`` gives a module a class of its own that adds no computation."""
    position = getattr(kind, "_orig_cls_mro_index", None)
    return kind if position is None else kind.__mro__[position]


def _is_renewed(module: nn.Module, name: str) -> bool:
    """Whether forward computes the attribute of the module's tensors, or renews it where it is stale."""
    return (name in _RECURRENT_CACHES and isinstance(module, nn.RNNBase)) or name in derived_attributes(module)


def hooks_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The hooks registered on ``module``: kind, as in ``"forward_hooks"``, and function."""
    for kind in MODULE_HOOKS:
        for hook in getattr(module, kind, {}).values():
            yield kind[1:], hook


class Snapshot:
    """The Python state of a module tree, to find out what changed and to put it back.

    Tensors are compared by identity: in-place changes of tensors are seen by the fake run.
    """

    def __init__(self, root: nn.Module):
        self._modules = [(name, module, dict(module.__dict__)) for name, module in root.named_modules()]
        self._containers = [
            (module, key, value, snapshot(value))
            for _, module, attributes in self._modules
            for key, value in attributes.items()
            if type(value) in CONTAINERS
        ]
        self._containers += [  # attributes that a user has set on parameters and buffers
            (module, name, vars(tensor), dict(vars(tensor)))
            for _, module, _ in self._modules
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        ]

    def changes(self) -> list[str]:
        """Dotted names of attributes that were set, deleted or changed in place since the snapshot."""
        found = []
        for name, module, before in self._modules:
            prefix = name + "." if name else ""
            keys = list(dict.fromkeys((*before, *module.__dict__)))
            found += [
                prefix + key
                for key in keys
                if not _is_renewed(module, key)
                if key not in before or key not in module.__dict__ or not same_inside(before[key], module.__dict__[key])
            ]
        owners = {id(module): name for name, module, _ in self._modules}
        for module, key, value, contents in self._containers:
            if not _is_renewed(module, key) and not same_inside(contents, value):
                prefix = owners[id(module)]
                found.append(f"{prefix}.{key}" if prefix else key)
        return sorted(set(found))

    def has(self, path: str, name: str) -> bool:
        """Whether the module at ``path`` had the attribute."""
        return any(name in attributes for found, _, attributes in self._modules if found == path)

    def written(self) -> Iterator[tuple[dict[str, Any], str, list[Any]]]:
        """Attributes that hold another object than before: the dictionary, the name, what it held (nothing: none)."""
        for _, module, before in self._modules:
            own = module.__dict__
            for name in dict.fromkeys((*before, *own)):
                if not _is_renewed(module, name) and own.get(name, self) is not before.get(name, self):
                    yield own, name, [before[name]] if name in before else []

    def contents(self) -> Iterator[tuple[Any, Any]]:
        """Containers among the attributes, and copies of what they held."""
        for module, name, value, held in self._containers:
            if not _is_renewed(module, name):
                yield value, held

    def value_of(self, path: str, name: str) -> Any:
        """What the attribute of the module at ``path`` was; ``None`` if it had none."""
        return next(attributes.get(name) for found, _, attributes in self._modules if found == path)

    def restore(self) -> None:
        """Puts back every attribute and the contents of every list, dict and set among them."""
        for _, module, before in self._modules:
            attributes = module.__dict__  # never emptied: another thread may be looking
            for key in attributes.keys() - before.keys():
                del attributes[key]
            attributes.update(before)
        for _, _, value, contents in self._containers:
            if same_inside(contents, value):
                continue
            if isinstance(value, list):
                value[:] = contents
            else:
                value.clear()
                value.update(contents)
