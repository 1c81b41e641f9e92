"""Module state: a module → its Python attributes and its tensors (program inputs)."""

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

__all__ = ["ModuleTensor", "SampleCall", "hooks_of", "is_own_attribute", "is_renewed", "module_tensors"]
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
    return name not in _INTERNAL and not name.startswith(_SHARDING_NOTES) and not is_renewed(module, name)


def written_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The user's class of a module: ``fully_shard`` replaces it by a subclass that adds no computation."""
    position = getattr(kind, "_orig_cls_mro_index", None)
    return kind if position is None else kind.__mro__[position]


def is_renewed(module: nn.Module, name: str) -> bool:
    """Whether the attribute is a parameter cache that forward renews."""
    return name in _RECURRENT_CACHES and isinstance(module, nn.RNNBase)


def hooks_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The hooks registered on ``module``: kind, as in ``"forward_hooks"``, and function."""
    for kind in MODULE_HOOKS:
        for hook in getattr(module, kind, {}).values():
            yield kind[1:], hook


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
