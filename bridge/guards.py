"""Whether a call is what an entry was compiled for: a pure function of the call, with a reason when it is not.

The checks go from the cheap and global to the particular: interpreter state, argument structure, argument tensors,
the module tree. The first difference is the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree

from bridge.capture import Captured, ModuleTensor
from bridge.module_state import hooks_of, own_attributes

__all__ = ["Guard", "Mismatch", "has_global_hooks", "interpreter_state"]


class Mismatch(Exception):
    """A call that differs from what was compiled; the message names the differing thing."""

    def __init__(self, stage: int, reason: str):
        super().__init__(reason)
        self.stage = stage
        self.reason = reason


def interpreter_state() -> tuple[tuple[str, Any], ...]:
    """The global state that changes what a module computes, named."""
    return (
        ("grad mode", torch.is_grad_enabled()),
        ("inference mode", torch.is_inference_mode_enabled()),
        ("autocast", torch.is_autocast_enabled("cpu")),
        ("default dtype", torch.get_default_dtype()),
        ("torch dispatch mode", torch._C._len_torch_dispatch_stack() > 0),
        ("torch function mode", torch._C._len_torch_function_stack() > 0),
        ("functorch transform", torch._C._functorch.peek_interpreter_stack() is not None),
        ("global module hooks", has_global_hooks()),
    )


def has_global_hooks() -> bool:
    """Whether hooks are registered on all modules (``register_module_forward_hook`` and its kin)."""
    return bool(
        torch_module._global_forward_pre_hooks
        or torch_module._global_forward_hooks
        or torch_module._global_backward_pre_hooks
        or torch_module._global_backward_hooks
    )


class Guard:
    """The conditions of one entry.

    Args:
        module: the dispatched module as it is now.
        captured: what was compiled; its sample defines the expected arguments.
        arguments: the sample's argument tensors (their layouts are what is expected).
    """

    def __init__(self, module: nn.Module, captured: Captured, arguments: Sequence[torch.Tensor]):
        self._interpreter = interpreter_state()
        self._spec = captured.in_spec
        self._keywords = frozenset(pytree.tree_unflatten(captured.argument_leaves, captured.in_spec)[1])
        self._is_tensor = captured.argument_is_tensor
        self._constants = captured.argument_leaves
        self._paths = _leaf_paths(captured)
        self._arguments = [_Layout(tensor) for tensor in arguments]
        self._tree = _Tree(module, captured.module_tensors)

    def match(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The input tensors of the compiled code (module tensors, then arguments) if the call matches.

        Raises:
            Mismatch: naming the first thing that differs.
        """
        state = interpreter_state()
        if state != self._interpreter:
            for (name, now), (_, then) in zip(state, self._interpreter, strict=True):
                if now != then:
                    raise Mismatch(0, f"{name}: compiled for {then}, called with {now}")
        tensors = self._match_arguments(args, kwargs)
        return self._tree.match(module) + tensors

    def _match_arguments(self, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        if kwargs.keys() != self._keywords:
            raise Mismatch(1, f"keyword arguments: compiled for {sorted(self._keywords)}, called with {sorted(kwargs)}")
        if len(kwargs) > 1:  # their order carries no meaning
            kwargs = {key: kwargs[key] for key in self._spec.child(1).context}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._spec:
            raise Mismatch(1, f"structure of the arguments: compiled for {self._spec}, called with {spec}")
        tensors = []
        for leaf, is_tensor, constant, path in zip(leaves, self._is_tensor, self._constants, self._paths, strict=True):
            if is_tensor:
                if not isinstance(leaf, torch.Tensor):
                    raise Mismatch(1, f"structure: argument {path} was a tensor, is {type(leaf).__name__}")
                self._arguments[len(tensors)].match(leaf, path)
                tensors.append(leaf)
            elif type(leaf) is not type(constant) or (leaf != constant and constant == constant):
                raise Mismatch(1, f"value of argument {path}: compiled for {constant!r}, called with {_brief(leaf)}")
        return tensors


def _brief(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:80]


def _leaf_paths(captured: Captured) -> list[str]:
    paths = pytree.tree_flatten_with_path(pytree.tree_unflatten(captured.argument_leaves, captured.in_spec))[0]
    names = []
    for path, _ in paths:
        kind, *rest = path  # the first key tells args (0) from kwargs (1)
        base = "args" if kind.idx == 0 else "kwargs"
        names.append(base + "".join(str(key) for key in rest))
    return names


class _Layout:
    """What a tensor argument must look like."""

    __slots__ = ("device", "dtype", "requires_grad", "shape", "strides")

    def __init__(self, tensor: torch.Tensor):
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.requires_grad = tensor.requires_grad
        self.strides = _strides(tensor)

    def match(self, tensor: torch.Tensor, path: str) -> None:
        if tensor.shape != self.shape:
            raise Mismatch(2, f"shape of {path}: compiled for {tuple(self.shape)}, called with {tuple(tensor.shape)}")
        if tensor.dtype is not self.dtype:
            raise Mismatch(2, f"dtype of {path}: compiled for {self.dtype}, called with {tensor.dtype}")
        if tensor.requires_grad is not self.requires_grad:
            raise Mismatch(
                2, f"requires_grad of {path}: compiled for {self.requires_grad}, called with {tensor.requires_grad}"
            )
        if tensor.device != self.device:
            raise Mismatch(2, f"device of {path}: compiled for {self.device}, called with {tensor.device}")
        if type(tensor) is not torch.Tensor and type(tensor) is not nn.Parameter:
            raise Mismatch(2, f"type of {path}: a tensor subclass, {type(tensor).__name__}")
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            raise Mismatch(2, f"layout of {path}")
        if tensor.stride() != self.strides and _strides(tensor) != self.strides:
            raise Mismatch(2, f"strides of {path}: compiled for {self.strides}, called with {tensor.stride()}")


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides with the meaningless ones (of extents 0 and 1) made 1: draws and results follow the others."""
    return tuple(stride if extent > 1 else 1 for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))


class _Tree:
    """The module tree: same submodules, flags and plain attributes, no hooks inside; and the way to its tensors.

    Tensors are looked up in the tree at every call, so optimizers, ``load_state_dict`` and replaced parameters just
    work. Only the root is not kept alive from here: the dispatched module owns its entries.
    """

    def __init__(self, root: nn.Module, tensors: Sequence[ModuleTensor]):
        positions = {"": 0}
        self._children: list[tuple[int, str, str, nn.Module]] = []
        for path, child in root.named_modules(remove_duplicate=False):
            if path:
                parent, _, name = path.rpartition(".")
                positions[path] = len(self._children) + 1
                self._children.append((positions[parent], name, path, child))
        modules = [root] + [child for *_, child in self._children]
        paths = [""] + [path for _, _, path, _ in self._children]
        first_of = {id(module): index for index, module in reversed(list(enumerate(modules)))}
        unique = sorted(set(first_of.values()))
        self._flags = [(index, paths[index], modules[index].training) for index in unique]
        self._attributes = [
            (index, paths[index], name, expected)
            for index in unique
            for name, value in own_attributes(modules[index])
            if (expected := _expectation(value)) is not None
        ]
        self._has_forward = [(index, paths[index], "forward" in modules[index].__dict__) for index in unique]
        self._tensors = [_TensorSlot(spec, positions) for spec in tensors]

    def match(self, root: nn.Module) -> list[torch.Tensor]:
        modules = [root]
        for parent, name, path, expected in self._children:
            child = modules[parent]._modules.get(name)
            if child is not expected:
                raise Mismatch(3, f"submodule '{path}' was replaced")
            if child._forward_hooks or child._forward_pre_hooks or child._backward_hooks or child._backward_pre_hooks:
                raise Mismatch(3, f"hook on submodule '{path}' ({hooks_of(child)})")
            modules.append(child)
        for index, path, training in self._flags:
            if modules[index].training is not training:
                raise Mismatch(
                    3, f"training flag of {_named(path)}: compiled for {training}, called with {not training}"
                )
        for index, path, name, expected in self._attributes:
            if not expected(modules[index].__dict__.get(name)):
                raise Mismatch(3, f"attribute '{name}' of {_named(path)} changed")
        for index, path, expected in self._has_forward:
            if ("forward" in modules[index].__dict__) is not expected:
                raise Mismatch(3, f"forward of {_named(path)} was replaced")
        return [slot.read(modules) for slot in self._tensors]


def _named(path: str) -> str:
    return f"submodule '{path}'" if path else "the module"


def _expectation(value: Any) -> Callable[[Any], bool] | None:
    """A test that an attribute still means what it meant; ``None`` for attributes that are read anew (tensors)."""
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, bool | int | float | str | type(None)):
        return lambda now: now is value or (type(now) is type(value) and now == value)
    if type(value) in (list, dict, set):
        contents = value.copy()
        return lambda now: now is value and _equal(now, contents)
    if hasattr(value, "__dict__") and not isinstance(value, nn.Module | type) and not callable(value):
        attributes = dict(vars(value))  # a configuration object: its fields decide what forward does
        return lambda now: now is value and _equal(vars(now), attributes)
    return lambda now: now is value


def _equal(now: Any, then: Any) -> bool:
    """Equality of containers by identity first; values that cannot be compared count as changed."""
    if len(now) != len(then):
        return False
    if isinstance(now, dict):
        return all(key in now and _same_value(now[key], value) for key, value in then.items())
    if isinstance(now, set):
        return now == then
    return all(_same_value(a, b) for a, b in zip(now, then, strict=True))


def _same_value(now: Any, then: Any) -> bool:
    if now is then:
        return True
    plain = (bool, int, float, str, tuple, list, dict, set)
    return type(now) is type(then) and isinstance(now, plain) and bool(now == then)


class _TensorSlot:
    """Where one module tensor lives, and what it must look like."""

    __slots__ = ("_dtype", "_kind", "_name", "_others", "_owner", "_path", "_requires_grad", "_shape", "_stride")

    def __init__(self, spec: ModuleTensor, positions: dict[str, int]):
        (self._owner, self._name), *self._others = [self._locate(name, positions) for name in spec.names]
        self._path = spec.name
        self._kind = spec.kind
        self._shape = spec.shape
        self._stride = spec.stride
        self._dtype = spec.dtype
        self._requires_grad = spec.requires_grad

    @staticmethod
    def _locate(path: str, positions: dict[str, int]) -> tuple[int, str]:
        owner, _, name = path.rpartition(".")
        return positions[owner], name

    def _get(self, module: nn.Module, name: str) -> torch.Tensor | None:
        if self._kind == "parameter":
            return module._parameters.get(name)
        if self._kind == "buffer":
            return module._buffers.get(name)
        return module.__dict__.get(name)

    def read(self, modules: Sequence[nn.Module]) -> torch.Tensor:
        tensor = self._get(modules[self._owner], self._name)
        if type(tensor) is not nn.Parameter and type(tensor) is not torch.Tensor:
            raise Mismatch(3, f"{self._kind} '{self._path}' is {type(tensor).__name__}")
        if tensor.shape != self._shape:
            raise Mismatch(3, f"shape of {self._kind} '{self._path}': {self._shape} was compiled")
        if tensor.stride() != self._stride:
            raise Mismatch(3, f"strides of {self._kind} '{self._path}': {self._stride} was compiled")
        if tensor.dtype is not self._dtype:
            raise Mismatch(
                3, f"dtype of {self._kind} '{self._path}': compiled for {self._dtype}, called with {tensor.dtype}"
            )
        if tensor.requires_grad is not self._requires_grad:
            raise Mismatch(3, f"requires_grad of {self._kind} '{self._path}': {self._requires_grad} was compiled")
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise Mismatch(3, f"device or layout of {self._kind} '{self._path}'")
        for owner, name in self._others:
            if self._get(modules[owner], name) is not tensor:
                raise Mismatch(3, f"{self._kind} '{self._path}' is no longer tied to '{name}'")
        return tensor
