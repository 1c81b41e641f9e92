"""Module state: a module → its Python attributes (a snapshot, to undo a capture) and its tensors (program inputs).

Tracing runs the user's ``forward``, which may change Python state (``self.calls += 1``). :class:`Snapshot` finds these
changes and undoes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from bridge.base.devices import TYPES
from bridge.base.errors import Unsupported, UnsupportedModule
from bridge.base.pytrees import packed_arguments, unpacked
from bridge.base.torch_distributed import Sharding, is_distributed, local_tensor, sharding_of
from bridge.base.torch_internals import COMPILED_CALL, MODULE_HOOKS, pytree
from bridge.state.values import CONTAINERS, refilled, same_inside, snapshot

__all__ = ["ModuleTensor", "SampleCall", "Snapshot", "hooks_of", "is_own_attribute", "module_tensors"]
__all__ += ["own_attributes", "tensor_problem", "written_class"]

# nn.Module's own entries of __dict__; parameters, buffers, submodules and flags are guarded separately.
# torch.compile(module) and transformers add a flag.
_INTERNAL = frozenset(nn.Module().__dict__) | {COMPILED_CALL, "_is_hf_initialized", "_is_torch_compile"}
# Parameter caches of torch's recurrent modules, which forward renews when they are stale.
_RECURRENT_CACHES = ("_flat_weights", "_flat_weight_refs")
# Prefixes of attributes that fully_shard and replicate set on a module.
_SHARDING_NOTES = ("__composable_api_state", "_fsdp_use_orig_params", "_is_fsdp_managed_module")


def own_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes that user code set on a module: all entries of ``__dict__`` that are not nn.Module's."""
    return ((name, value) for name, value in module.__dict__.items() if is_own_attribute(module, name))


def is_own_attribute(module: nn.Module, name: str) -> bool:
    """Whether an entry of a module's ``__dict__`` is one of :func:`own_attributes`."""
    return name not in _INTERNAL and not name.startswith(_SHARDING_NOTES) and not _is_renewed(module, name)


def written_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The user's class of a module: ``fully_shard`` replaces it by a subclass that adds no computation."""
    position = getattr(kind, "_orig_cls_mro_index", None)
    return kind if position is None else kind.__mro__[position]


def _is_renewed(module: nn.Module, name: str) -> bool:
    """Whether the attribute is a parameter cache that forward renews."""
    return name in _RECURRENT_CACHES and isinstance(module, nn.RNNBase)


def hooks_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The hooks registered on ``module``: kind, as in ``"forward_hooks"``, and function."""
    for kind in MODULE_HOOKS:
        for hook in getattr(module, kind, {}).values():
            yield kind[1:], hook


class Snapshot:
    """The Python state of a module tree: finds later changes and undoes them.

    Tensors are compared by identity; the fake run detects in-place changes of tensors.
    """

    def __init__(self, root: nn.Module):
        self._modules = [(name, module, dict(module.__dict__)) for name, module in root.named_modules()]
        self._containers = [
            (module, key, value, snapshot(value))
            for _, module, attributes in self._modules
            for key, value in attributes.items()
            if issubclass(type(value), CONTAINERS)
        ]
        self._containers += [  # attributes that a user has set on parameters and buffers
            (module, name, vars(tensor), dict(vars(tensor)))
            for _, module, _ in self._modules
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        ]

    def changes(self) -> list[str]:
        """Dotted names of attributes that were set, deleted or changed in place since the snapshot."""
        owners = {id(own): name for name, module, _ in self._modules for own in (module, module.__dict__)}
        found = [
            (owners[id(own)], key)
            for own, key, held in self.written()
            if not (held and key in own and same_inside(held[0], own[key]))
        ]
        for module, key, value, contents in self._containers:
            if not _is_renewed(module, key) and not same_inside(contents, value):
                found.append((owners[id(module)], key))
        return sorted({f"{path}.{key}" if path else key for path, key in found})

    def has(self, path: str, name: str) -> bool:
        """Whether the module at ``path`` had the attribute."""
        return any(name in attributes for found, _, attributes in self._modules if found == path)

    def written(self) -> Iterator[tuple[dict[str, Any], str, list[Any]]]:
        """Attributes that hold another object than before: dictionary, name, list of the old value (empty: none)."""
        for _, module, before in self._modules:
            own = module.__dict__
            for name in dict.fromkeys((*before, *own)):
                if not _is_renewed(module, name) and own.get(name, self) is not before.get(name, self):
                    yield own, name, [before[name]] if name in before else []

    def contents(self) -> Iterator[tuple[Any, Any]]:
        """Containers among the attributes, with copies of their old contents."""
        for module, name, value, held in self._containers:
            if not _is_renewed(module, name):
                yield value, held

    def value_of(self, path: str, name: str) -> Any:
        """The old value of an attribute of the module at ``path``, or ``None``."""
        return next(attributes.get(name) for found, _, attributes in self._modules if found == path)

    def restore(self) -> None:
        """Restores every attribute and the contents of every list, dict and set among them."""
        for _, module, before in self._modules:
            attributes = module.__dict__  # never emptied: another thread may be reading it
            for key in attributes.keys() - before.keys():
                del attributes[key]
            attributes.update(before)
        for _, _, value, contents in self._containers:
            if not same_inside(contents, value):
                refilled(value, contents)


@dataclass(frozen=True)
class ModuleTensor:
    """A tensor of the module that is an input of the compiled code.

    Attributes:
        kind: ``"parameter"``, ``"buffer"``, ``"attribute"`` (a plain attribute) or ``"free"`` (in a list or a global).
        names: its dotted names, several if tied, in the module's order; for a free tensor, the expression for it.
        held: for a free tensor, a function that returns it.
        sharding: for a DTensor, how it is distributed; the other fields are its local tensor's.
    """

    kind: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    held: Callable[[], torch.Tensor | None] | None = field(default=None, compare=False, repr=False)
    sharding: Sharding | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    def __str__(self) -> str:
        return f"{self.kind} '{self.name}'"


def module_tensors(module: nn.Module) -> tuple[list[ModuleTensor], list[torch.Tensor]]:
    """A module → its parameters and buffers, in its own order, tied ones once.

    Raises:
        UnsupportedModule: a tensor is not plain and dense, or its name does not lead to a module of the tree.
    """
    named: dict[int, tuple[str, torch.Tensor, list[str]]] = {}
    kinds = (
        ("parameter", module.named_parameters(remove_duplicate=False)),
        ("buffer", module.named_buffers(remove_duplicate=False)),
    )
    for kind, items in kinds:
        for name, tensor in items:
            named.setdefault(id(tensor), (kind, tensor, []))[2].append(name)
    tensors = []
    paths = {path for path, _ in module.named_modules(remove_duplicate=False)}
    for kind, tensor, names in named.values():
        sharding = sharding_of(tensor) if kind == "parameter" and is_distributed(tensor) else None
        local = tensor if sharding is None else local_tensor(tensor)
        problem = tensor_problem(local)
        if any(name.rpartition(".")[0] not in paths for name in names):
            problem = "a module names it in its own way (TensorDictParams), and no module of the tree holds it by that"
        if problem:
            raise UnsupportedModule(type(module).__name__, [Unsupported(names[0], names[0], problem)])
        layout = (tuple(local.shape), local.stride(), local.dtype)
        tensors.append(ModuleTensor(kind, tuple(names), *layout, tensor.requires_grad, sharding=sharding))
    return tensors, [tensor for _, tensor, _ in named.values()]


def tensor_problem(tensor: torch.Tensor) -> str | None:
    """Why a tensor cannot be an input of compiled code, or ``None``."""
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return "a tensor subclass"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.layout != torch.strided:
        return f"layout {tensor.layout}"
    if tensor.dtype == torch.complex32:
        return "complex numbers of half precision are not supported"
    if tensor.device.type not in TYPES:
        return f"a tensor on device {tensor.device}: compiled code runs on {' and '.join(TYPES)}"
    if tensor.is_inference():
        return "a tensor made under torch.inference_mode(), which autograd cannot follow: make a clone outside of it"
    return None


@dataclass(frozen=True)
class SampleCall:
    """One call of a module.

    Attributes:
        module: the module; ``args``, ``kwargs``: forward's arguments.
        dims: dynamic dimensions of the arguments (:func:`bridge.capture.dynamic_dims`).
        followed: places of the argument tensors on which forward turns ``requires_grad`` on first.
    """

    module: nn.Module
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    dims: Sequence[Any] = ()
    followed: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        """Name of the module's class."""
        return type(self.module).__name__

    @property
    def leaves(self) -> list[Any]:
        """Leaves of the arguments, and of Python objects among them."""
        return pytree.tree_leaves(packed_arguments((self.args, self.kwargs)))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def as_pytree(self) -> SampleCall:
        """The call with nodes for Python objects among its arguments."""
        args, kwargs = packed_arguments((self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)

    def forward(self) -> Any:
        """Runs the module's forward, without hooks."""
        args, kwargs = unpacked((self.args, self.kwargs))
        return self.module.forward(*args, **kwargs)
