"""Derived attributes while a module is captured: hidden until their hooks set them, put back when forward ends.

After a compiled call the attribute is computed from the module's tensors (:func:`bridge.state.renew_derived`). That is
what eager leaves if the hook ran, in the modes of the call, and nobody changed the attribute or the tensors afterwards.
Anything else is refused by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bridge.base.errors import Unsupported, UnsupportedModule
from bridge.base.modes import autocast_setting, cuda_autocast_setting
from bridge.base.torch_internals import pytree
from bridge.state import derived_attribute, derived_attributes

__all__ = ["DerivedAttributes"]

_HINT = "use torch.nn.utils.parametrizations, or make it permanent (remove_weight_norm, prune.remove)"


class DerivedAttributes:
    """The derived attributes of the modules inside ``root``."""

    def __init__(self, root: nn.Module):
        self._root = root
        self._places = {
            (module, name): f"{path}.{name}"
            for path, module in root.named_modules()
            if module is not root
            for name in derived_attributes(module)
        }
        self._set: dict[tuple[nn.Module, str], tuple[Any, list[tuple[torch.Tensor, int]]]] = {}
        self._modes: tuple | None = None
        self._early: tuple[nn.Module, str] | None = None

    def watched(self, hook: Callable[..., Any]) -> Callable[..., Any] | None:
        """The hook, observed, if it sets a derived attribute."""
        name = derived_attribute(hook)
        if name is None:
            return None

        def run(module: nn.Module, args: tuple) -> None:
            hook(module, args)
            own = (*module._parameters.items(), *module._buffers.items())
            read = [tensor for held, tensor in own if held.startswith(f"{name}_") and tensor is not None]
            self._set[module, name] = module.__dict__[name], [(tensor, tensor._version) for tensor in read]
            if self._modes not in (None, _modes()):
                self._refuse((module, name), "is computed under another grad mode or autocast than the call's")

        return run

    def hide(self) -> None:
        """The module finds no derived attribute before its hook has set it."""
        self._before = [(module.__dict__, name, module.__dict__.get(name)) for module, name in self._places]

    def begin(self) -> None:
        """To be called before forward runs."""
        self._set.clear()
        for module, name in self._places:
            module.__dict__[name] = _Unset(functools.partial(self._used, (module, name)))
        self._modes, self._early = _modes(), None

    def check(self) -> None:
        """Raises what stands in the way, once forward has run."""
        self._check()
        self._modes = None
        self._set.clear()

    def put_back(self) -> None:
        """The module has the attributes that it had."""
        for attributes, name, value in self._before:
            attributes.pop(name, None)
            if value is not None:
                attributes[name] = value

    def _check(self) -> None:
        self._refuse_early()  # forward may have caught it
        for module, name in self._places:
            value, read = self._set.get((module, name), (None, []))
            if value is None:
                self._refuse((module, name), "is left as it was: forward does not call the module that it belongs to")
            if module.__dict__.get(name) is not value or any(tensor._version != then for tensor, then in read):
                self._refuse((module, name), "is changed by forward after its hook has set it, or what it is made of")

    def _refuse(self, place: tuple[nn.Module, str], reason: str) -> None:
        name = type(self._root).__name__
        problem = Unsupported(f"attribute '{self._places[place]}'", f"{name}.forward", reason, _HINT)
        raise UnsupportedModule(name, [problem])

    def _used(self, place: tuple[nn.Module, str]) -> None:
        self._early = place
        self._refuse_early()

    def _refuse_early(self) -> None:
        if self._early is not None:
            self._refuse(self._early, "is read before its hook sets it; what an earlier call left is no input")


def _modes() -> tuple:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast_setting(), cuda_autocast_setting()


class _Unset:
    """Stands for a derived attribute before its hook has run; any use of it is a refusal."""

    def __init__(self, used: Callable[[], None]):
        self._used = used

    def __getattr__(self, name: str) -> Any:
        self._used()

    @property
    def __class__(self) -> Any:  # isinstance
        self._used()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, *arguments: Any) -> Any:
        for each in pytree.tree_leaves(arguments):
            if type(each) is _Unset:
                each._used()


def _use(self: _Unset, *_: Any) -> Any:
    self._used()


_USES = (
    "abs add bool eq float ge getitem gt index int iter le len lt matmul mul ne neg pow radd rmatmul rmul rsub "
    "rtruediv setitem sub truediv"
)
for _name in _USES.split():
    setattr(_Unset, f"__{_name}__", _use)
