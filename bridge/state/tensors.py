"""Module tensors: a module → its parameters, buffers and tensor attributes, each once: inputs of the compiled code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from bridge.base.devices import TYPES
from bridge.base.errors import Unsupported, UnsupportedModule

__all__ = ["ModuleTensor", "module_tensors", "once_per_owner", "tensor_attribute", "tensor_problem"]


@dataclass(frozen=True)
class ModuleTensor:
    """A tensor that the module owns and the compiled code takes as an input.

    Attributes:
        kind: ``"parameter"``, ``"buffer"``, ``"attribute"`` (a tensor that is just an attribute) or ``"free"`` (one
            that lies elsewhere: in a list, a global).
        names: its dotted names, the first one in the module's own order; further ones when tied. Of a free tensor, what
            reads it.
        held: of a free tensor, a reference to it.
    """

    kind: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    held: Callable[[], torch.Tensor | None] | None = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        return self.names[0]


def module_tensors(module: nn.Module, attributes: Sequence[str] = ()) -> tuple[list[ModuleTensor], list[torch.Tensor]]:
    """The tensors that the module owns, in its own order, tied ones once; then tensors that are plain attributes.

    Args:
        attributes: dotted names of the plain attributes that forward reads; names of no tensor are passed over.

    Raises:
        UnsupportedModule: a tensor is not a plain dense one, or named by no module that holds it.
    """
    named: dict[int, tuple[str, torch.Tensor, list[str]]] = {}
    kinds = (
        ("parameter", module.named_parameters(remove_duplicate=False)),
        ("buffer", module.named_buffers(remove_duplicate=False)),
    )
    for kind, items in kinds:
        for name, tensor in items:
            named.setdefault(id(tensor), (kind, tensor, []))[2].append(name)
    for name in attributes:
        if (tensor := tensor_attribute(module, name)) is not None:
            named.setdefault(id(tensor), ("attribute", tensor, []))[2].append(name)
    tensors = []
    paths = {path for path, _ in module.named_modules(remove_duplicate=False)}
    for kind, tensor, names in named.values():
        problem = tensor_problem(tensor)
        if kind != "attribute" and any(name.rpartition(".")[0] not in paths for name in names):
            problem = "a module names it in its own way (TensorDictParams), and no module of the tree holds it by that"
        if problem:
            raise UnsupportedModule(type(module).__name__, [Unsupported(names[0], names[0], problem)])
        layout = (tuple(tensor.shape), tensor.stride(), tensor.dtype)
        tensors.append(ModuleTensor(kind, tuple(names), *layout, tensor.requires_grad))
    return tensors, [tensor for _, tensor, _ in named.values()]


def tensor_attribute(module: nn.Module, path: str) -> torch.Tensor | None:
    """The tensor attribute at a dotted path, or ``None`` for a literal that export lifted out of the code."""
    value: object = module
    for part in path.split("."):
        value = getattr(value, part, None)
    return value if isinstance(value, torch.Tensor) else None


def tensor_problem(tensor: torch.Tensor) -> str | None:
    """Why a tensor cannot be an input of compiled code, or ``None``."""
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return "a tensor subclass"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout != torch.strided:
        return f"layout {tensor.layout}"
    if tensor.dtype == torch.complex32:
        return "complex numbers of half precision are not supported"
    if tensor.device.type not in TYPES:
        return f"a tensor on device {tensor.device}: compiled code runs on {' and '.join(TYPES)}"
    if tensor.is_inference():
        return "a tensor made under torch.inference_mode(), which autograd cannot follow: make a clone outside of it"
    return None


def once_per_owner(module: nn.Module, names: Sequence[str]) -> list[str]:
    """Of the names of a tensor, one for each submodule that holds it (a shared submodule has several paths)."""
    if len(names) == 1:
        return list(names)
    owners = {}
    for name in names:
        path, _, leaf = name.rpartition(".")
        owners.setdefault((id(module.get_submodule(path)), leaf), name)
    return list(owners.values())
