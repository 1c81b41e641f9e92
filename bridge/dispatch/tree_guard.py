"""Whether a module tree is still the one that was compiled, and the way to its tensors.

Tensors are looked up in the tree at every call, so optimizers, ``load_state_dict`` and replaced parameters just work.
:meth:`TreeGuard.quick` compares everything at once, in loops that run in C, and knows only "exactly as it was";
:meth:`TreeGuard.match` goes through it piece by piece, allows what makes no difference, and names what does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from bridge.base.mismatch import MODULE, Mismatch
from bridge.base.torch_internals import MODULE_HOOKS
from bridge.dispatch.guards.tensors import tensor_checks
from bridge.dispatch.tensor_checks import LAYOUT
from bridge.state.code import CodeGuard
from bridge.state.dict_versions import dict_versions, same_versions
from bridge.state.module import hooks_of, own_attributes, written_class
from bridge.state.reachable import Reached
from bridge.state.tensors import ModuleTensor
from bridge.state.values import same

__all__ = ["TreeGuard"]

_DICT = attrgetter("__dict__")
_STATE = itemgetter(
    "_parameters",
    "_buffers",
    "_modules",
    "training",
    *MODULE_HOOKS,
)


def _state_without_flag(attributes: dict[str, Any]) -> tuple:
    """Of a module that keeps its flag elsewhere: torch.compile's wrapper leaves it to the module inside."""
    return _STATE({"training": None, **attributes})


_REGISTRY_OF = {"parameter": "_parameters", "buffer": "_buffers", "attribute": ""}
# The dispatcher sits in this attribute of the module that it serves; it says nothing about what forward does.
_DISPATCHER = "_compiled_call_impl"


class _Seen(NamedTuple):
    """Dictionaries of a tree that were found as they should be.

    Attributes:
        versions: of the modules' own dictionaries, then of ``registries``, at that time; ``None`` if there are none.
        registries: those of parameters, buffers and children that hold something, and settings.
        empty: the other ones, and hooks on inner modules: they must stay empty.
        tensors: the registry and the name of each parameter and buffer that the compiled code reads.
    """

    versions: list[int] | None
    registries: list[dict[str, Any]]
    empty: list[dict]
    tensors: list[tuple[dict[str, torch.Tensor], str]]


class TreeGuard:
    """The conditions of one entry on the module tree: types, flags, plain attributes, hooks inside, tensors' layouts.

    Args:
        root: the module as it is now; only its submodules are kept alive from here, since it owns its entries.
        tensors: those that the compiled code reads, in its order; all of the module's parameters and buffers.
    """

    def __init__(self, root: nn.Module, tensors: Sequence[ModuleTensor]):
        named = list(root.named_modules(remove_duplicate=False))
        paths: dict[nn.Module, str] = {}
        for path, module in named:
            paths.setdefault(module, path)
        modules = list(paths)
        dicts = list(map(_DICT, modules))
        self._paths = list(paths.values())
        self._modules = modules[1:]
        self._types = list(map(type, modules))
        self._children = [dict(d["_modules"]) for d in dicts]
        self._ordered = [(i, list(children)) for i, children in enumerate(self._children) if len(children) > 1]
        self._training = [module.training for module in modules]
        self._flags = [d.get("training") for d in dicts]
        self._state = _state_without_flag if None in self._flags else _STATE
        self._note_attributes(modules, dicts)
        self._note_tensors(dicts, tensors, {path: modules.index(module) for path, module in named})
        self._seen: _Seen | None = None

    def _note_attributes(self, modules: Sequence[nn.Module], dicts: Sequence[dict[str, Any]]) -> None:
        self._lengths = [len(d) - (_DISPATCHER in d) for d in dicts]
        self._lengths[0] += 1  # a call comes here through the root's dispatcher
        self._names = [frozenset(name for name, _ in own_attributes(module)) for module in modules]
        owned = [(i, *item) for i, module in enumerate(modules) for item in own_attributes(module)]
        self._attributes = [item for item in owned if not isinstance(item[2], torch.Tensor)]
        self._tensor_attributes = [(i, name) for i, name, value in owned if isinstance(value, torch.Tensor)]
        names_of: dict[int, list[str]] = {}
        for i, name, _ in self._attributes:
            names_of.setdefault(i, []).append(name)
        self._readers = [(i, _reader(names)) for i, names in names_of.items()]
        self._values = [value for *_, value in self._attributes]
        reached = Reached(registered=frozenset(modules))
        for i, name, value in self._attributes:
            reached.add((i, name), value)
        self._contents = reached.contents
        self._counted = {each: each.counted for each in reached.contents if each.counted is not None}
        self._uncounted = [each for each in reached.contents if each.counted is None]
        self._code = CodeGuard(dict.fromkeys((*self._types, *reached.kinds)), reached.functions)

    def _note_tensors(
        self, dicts: Sequence[dict[str, Any]], tensors: Sequence[ModuleTensor], index: Mapping[str, int]
    ) -> None:
        registries = [(i, kind, d[kind]) for kind in ("_parameters", "_buffers") for i, d in enumerate(dicts)]
        self._counts = [len(registry) for _, _, registry in registries]
        self._absent = [(i, kind, name) for i, kind, held in registries for name in held if held[name] is None]
        self._slots = [_Slot(spec, index) for spec in tensors]
        self._places = [(slot.registry, slot.owner, slot.name) for slot in self._slots]
        self._look_alike = {torch.is_inference_mode_enabled(): tensor_checks([slot.get(dicts) for slot in self._slots])}
        self._attribute_places = [(owner, name) for registry, owner, name in self._places if not registry]
        self._ties = [(i, slot.registry, *other) for i, slot in enumerate(self._slots) for other in slot.others]

    @property
    def reads_grad_mode(self) -> bool:
        """Whether the code asks if gradients are enabled, and so may do different things."""
        return self._code.mentions("is_grad_enabled", "is_inference_mode_enabled", "is_inference")

    def quick(self, root: nn.Module, inference: bool = False) -> list[torch.Tensor] | None:
        """The module's tensors if everything is exactly as it was; ``None`` where :meth:`match` has to look closer.

        ``inference``: whether inference mode is on.
        """
        modules = [root, *self._modules]
        if list(map(type, modules)) != self._types or not self._code.unchanged():
            return None
        dicts = list(map(_DICT, modules))
        seen = self._seen
        if seen is None or any(seen.empty) or not same_versions((*dicts, *seen.registries), seen.versions):
            seen = self._seen = self._look(dicts)
            if seen is None:
                return None
        for contents in self._uncounted:
            if not contents.unchanged():
                return None
        tensors = [registry[name] for registry, name in seen.tensors]
        tensors += [dicts[owner][name] for owner, name in self._attribute_places]
        look_alike = self._look_alike.get(inference)
        return tensors if look_alike is not None and look_alike(tensors) else None

    def _look(self, dicts: Sequence[dict[str, Any]]) -> _Seen | None:
        """Whether the dictionaries hold exactly what they held; if so, what spares a second look as long as they do."""
        if list(map(len, dicts)) != self._lengths:
            return None
        parameters, buffers, children, training, *hooks = zip(*map(self._state, dicts), strict=True)
        registries = parameters + buffers
        written = [*filter(None, registries + children), *self._counted.values()]
        versions = dict_versions((*dicts, *written))  # before the look: what is written meanwhile is seen next time
        if list(training) != self._flags or list(children) != self._children:
            return None
        if list(map(len, registries)) != self._counts:
            return None
        inner_hooks = [hook for kind in hooks for hook in kind[1:]]  # the root's run around the compiled call
        if any(inner_hooks) or any(list(children[i]) != names for i, names in self._ordered):
            return None
        held = {"_parameters": parameters, "_buffers": buffers, "": dicts}
        try:
            values = [value for i, read in self._readers for value in read(dicts[i])]
            for i, registry, name in self._absent:
                if held[registry][i][name] is not None:
                    return None
            for i, registry, owner, name in self._ties:
                first, place, slot = self._places[i]
                if held[registry][owner][name] is not held[first][place][slot]:
                    return None
            for i, name in self._tensor_attributes:
                if type(dicts[i][name]) is not torch.Tensor:
                    return None
            tensors = [(held[registry][owner], name) for registry, owner, name in self._places if registry]
            if not all(name in registry for registry, name in tensors):
                return None
        except KeyError:
            return None
        if not all(map(is_, values, self._values)) or not all(contents.unchanged() for contents in self._counted):
            return None
        empty = [*inner_hooks, *(registry for registry in registries + children if not registry)]
        return _Seen(versions, written, empty, tensors)

    def match(self, root: nn.Module, inference: bool = False) -> list[torch.Tensor]:
        """The module's tensors, in the order of the compiled code's inputs.

        Raises:
            Mismatch: names the first thing that differs.
        """
        modules = [root, *self._modules]
        for module, path, expected in zip(modules, self._paths, self._types, strict=True):
            if type(module) is not expected and written_class(module) is not expected:
                raise _differs(f"type of {_named(path)}", expected.__name__, type(module).__name__)
        self._code.match()
        for module, path, children in zip(modules, self._paths, self._children, strict=True):
            _match_children(module, path, children)
        for module, path in zip(self._modules, self._paths[1:], strict=True):
            if kind := hooks_of(module):
                raise Mismatch(MODULE, f"hook on submodule '{path}' ({kind})")
        for module, path, training in zip(modules, self._paths, self._training, strict=True):
            if module.training is not training:
                raise _differs(f"training flag of {_named(path)}", training, module.training)
        self._match_attributes(modules)
        tensors = self._match_tensors(list(map(_DICT, modules)))
        if inference:
            self._look_alike[True] = tensor_checks(tensors)
        return tensors

    def _match_attributes(self, modules: Sequence[nn.Module]) -> None:
        for module, path, expected in zip(modules, self._paths, self._names, strict=True):
            names = {name for name, _ in own_attributes(module)}
            if names != expected:
                _raise_forward_replaced("forward" in names ^ expected, path)
                name = min(names ^ expected)
                verb = "added to" if name in names else "removed from"
                raise Mismatch(MODULE, f"attribute '{name}' was {verb} {_named(path)}")
        for i, name, value in self._attributes:
            if not same(modules[i].__dict__[name], value):
                _raise_forward_replaced(name == "forward", self._paths[i])
                raise Mismatch(MODULE, f"attribute '{name}' of {_named(self._paths[i])} changed")
        for i, name in self._tensor_attributes:
            if not isinstance(modules[i].__dict__[name], torch.Tensor):
                raise Mismatch(MODULE, f"attribute '{name}' of {_named(self._paths[i])} is no tensor any more")
        for contents in self._contents:
            if not contents.unchanged():
                i, name = contents.place
                raise Mismatch(MODULE, f"attribute '{name}' of {_named(self._paths[i])} changed")

    def _match_tensors(self, dicts: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
        for i, registry, name in self._absent:
            if dicts[i][registry].get(name) is not None:
                raise Mismatch(MODULE, f"{_KIND_OF[registry]} '{_join(self._paths[i], name)}' was None")
        tensors = [slot.read(dicts) for slot in self._slots]
        then = iter(self._counts)
        for kind in ("parameter", "buffer"):
            for d, path in zip(dicts, self._paths, strict=True):
                if (now := len(d[_REGISTRY_OF[kind]])) != (expected := next(then)):
                    raise _differs(f"number of {kind}s of {_named(path)}", expected, now)
        return tensors


_KIND_OF = {registry: kind for kind, registry in _REGISTRY_OF.items()}


def _reader(names: Sequence[str]) -> Callable[[dict[str, Any]], tuple]:
    """The values of these keys of a dict as a tuple."""
    if len(names) > 1:
        return itemgetter(*names)
    (name,) = names
    return lambda d: (d[name],)


def _differs(field: str, then: Any, now: Any) -> Mismatch:
    return Mismatch(MODULE, field, f"compiled for {then}, called with {now}")


def _named(path: str) -> str:
    return f"submodule '{path}'" if path else "the module"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _raise_forward_replaced(replaced: bool, path: str) -> None:
    if replaced:
        raise Mismatch(MODULE, f"forward of {_named(path)} was replaced")


def _match_children(module: nn.Module, path: str, expected: dict[str, nn.Module]) -> None:
    now = module._modules
    for name, child in expected.items():
        if now.get(name) is not child:
            verb = "replaced" if now.get(name) is not None else "removed"
            raise Mismatch(MODULE, f"submodule '{_join(path, name)}' was {verb}")
    for name in now:
        if name not in expected:
            raise Mismatch(MODULE, f"submodule '{_join(path, name)}' was added")
    if list(now) != list(expected):
        raise Mismatch(MODULE, f"order of the submodules of {_named(path)} changed")


class _Slot:
    """Where one module tensor lives, and what it must look like."""

    def __init__(self, spec: ModuleTensor, index: Mapping[str, int]):
        self.kind = spec.kind
        self.path = spec.name
        self.registry = _REGISTRY_OF[spec.kind]
        (self.owner, self.name), *others = dict.fromkeys(self._locate(name, index) for name in spec.names)
        self.others = others
        self.stride = spec.stride
        self.layout = (torch.Size(spec.shape), spec.dtype, spec.requires_grad, torch.device("cpu"), torch.strided)

    @staticmethod
    def _locate(path: str, index: Mapping[str, int]) -> tuple[int, str]:
        owner, _, name = path.rpartition(".")
        return index[owner], name

    def read(self, dicts: Sequence[dict[str, Any]]) -> torch.Tensor:
        tensor = self.get(dicts)
        what = f"{self.kind} '{self.path}'"
        if type(tensor) is not nn.Parameter and (type(tensor) is not torch.Tensor or self.kind == "parameter"):
            raise Mismatch(MODULE, f"{what} is {_kind_of(tensor)}")
        fields = ("shape", "dtype", "requires_grad", "device", "layout")
        for field, now, then in zip(fields, LAYOUT(tensor), self.layout, strict=True):
            if now != then:
                now, then = (tuple(now), tuple(then)) if field == "shape" else (now, then)
                raise _differs(f"{field} of {what}", then, now)
        if tensor.stride() != self.stride:
            raise _differs(f"strides of {what}", self.stride, tensor.stride())
        for owner, name in self.others:
            if self._get(dicts, owner, name) is not tensor:
                raise Mismatch(MODULE, f"{what} is no longer tied to '{name}'")
        return tensor

    def get(self, dicts: Sequence[dict[str, Any]]) -> Any:
        """What is there now."""
        return self._get(dicts, self.owner, self.name)

    def _get(self, dicts: Sequence[dict[str, Any]], owner: int, name: str) -> Any:
        held = dicts[owner]
        return (held[self.registry] if self.registry else held).get(name)


def _kind_of(value: Any) -> str:
    if type(value) is torch.Tensor:
        return "a plain tensor, not a Parameter (torch.func.functional_call?)"
    return "None" if value is None else f"a {type(value).__name__}"
