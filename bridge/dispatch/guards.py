"""Whether a call is what an entry was compiled for: a pure function of the call, with a reason when it is not.

The checks go from the cheap and global to the particular: interpreter state, argument structure, argument tensors,
the module tree (:mod:`bridge.dispatch.tree_guard`), memory shared with what the call changes. The first difference is
the reason. :meth:`Guard.quick` answers the common case, a call exactly like the sample, in a few microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, ne
from typing import Any

import torch
from torch import nn

from bridge.base.mismatch import ARGUMENTS, INTERPRETER, MODULE, STRUCTURE, Mismatch
from bridge.base.modes import MODES, interpreter_state, mode_values
from bridge.base.pytrees import leaf_names, structure_difference
from bridge.base.torch_internals import pytree, storage_id
from bridge.capture.captured import Captured
from bridge.dispatch.guards.tensors import tensor_checks
from bridge.dispatch.tensor_checks import LAYOUT
from bridge.dispatch.tree_guard import TreeGuard
from bridge.state.values import same

__all__ = ["Guard", "Mismatch", "interpreter_state"]

#: Asked of a nested tensor, Dynamo's check ends the process: it has no strides.
_IS_NESTED = attrgetter("is_nested")


def _serving(state: tuple[Any, ...], requires_grad: bool) -> tuple[tuple[Any, ...], ...]:
    """The states in which an entry of this state computes what eager does.

    Without gradients, ``no_grad`` and ``inference_mode`` are the same to the code; where nothing requires a gradient,
    whether they are enabled is nothing to it either.
    """
    grad, inference, *rest = state
    if grad and requires_grad:
        return (state,)
    modes = [(False, False), (False, True)] + ([] if requires_grad else [(True, False), (True, True)])
    modes.sort(key=lambda mode: mode != (grad, inference))
    return tuple((*mode, *rest) for mode in modes)


class Guard:
    """The conditions of one entry.

    Args:
        module: the dispatched module as it is now.
        captured: what was compiled; its sample defines the expected arguments.
        arguments: the sample's argument tensors (their layouts are what is expected).
    """

    def __init__(self, module: nn.Module, captured: Captured, arguments: Sequence[torch.Tensor]):
        self._tree = TreeGuard(module, captured.module_tensors)
        requires_grad = any(tensor.requires_grad for tensor in (*captured.module_tensors, *arguments))
        self._expected_state = state = mode_values()
        self._states = (state,) if self._tree.reads_grad_mode else _serving(state, requires_grad)
        self._saves = state[0] and requires_grad
        self._spec = captured.in_spec
        self._num_positional = self._spec.child(0).num_children
        self._keywords = list(self._spec.child(1).context)
        self._shape = [_shape_of(part, i) for part in self._spec.children() for i in range(part.num_children)]
        self._is_flat = not any(self._shape)
        self._constants = [
            (i, leaf)
            for i, (leaf, is_tensor) in enumerate(
                zip(captured.argument_leaves, captured.argument_is_tensor, strict=True)
            )
            if not is_tensor
        ]
        self._tensors = [i for i, is_tensor in enumerate(captured.argument_is_tensor) if is_tensor]
        self._leaf_paths = leaf_names(self._spec)
        self._layouts = [LAYOUT(tensor) for tensor in arguments]
        self._strides = [tensor.stride() for tensor in arguments]
        self._look_alike = {state[1]: tensor_checks(arguments)}  # in inference mode tensors look another way
        self._written = [(index, captured.module_tensors[index].name) for index, _ in captured.mutated]
        self._names = [spec.name for spec in captured.module_tensors] + [self._leaf_paths[i] for i in self._tensors]

    def quick(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
        """The inputs of the compiled code if the call is exactly like the sample; ``None`` to ask :meth:`match`."""
        state = mode_values()
        if state not in self._states:
            return None
        leaves = self._quick_leaves(args, kwargs)
        if leaves is None:
            return None
        for i, constant in self._constants:
            if not same(leaves[i], constant):
                return None
        tensors = [leaves[i] for i in self._tensors] if self._constants else leaves
        look_alike = self._look_alike.get(state[1])
        try:
            if look_alike is None or any(map(_IS_NESTED, tensors)) or not look_alike(tensors):
                return None
        except AttributeError:  # no tensor
            return None
        owned = self._tree.quick(module, state[1])
        if owned is None:
            return None
        inputs = owned + tensors
        return None if self._written and self._shared_memory(inputs) else inputs

    def _quick_leaves(self, args: tuple, kwargs: dict[str, Any]) -> list[Any] | None:
        """The leaves of the arguments if their structure is the sample's."""
        if len(args) != self._num_positional or len(kwargs) != len(self._keywords):
            return None
        try:
            values = [*args, *[kwargs[name] for name in self._keywords]]
        except KeyError:
            return None
        if self._is_flat:
            return values
        leaves: list[Any] = []
        return leaves if all(_take(*pair, leaves) for pair in zip(values, self._shape, strict=True)) else None

    def match(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The input tensors of the compiled code (module tensors, then arguments) if the call matches.

        Raises:
            Mismatch: naming the first thing that differs.
        """
        state = mode_values()
        if state not in self._states:
            likest = min(self._states, key=lambda each: sum(map(ne, each, state)))
            for name, now, then in zip(MODES, state, likest, strict=True):
                if now != then:
                    raise Mismatch(INTERPRETER, name, f"compiled for {then}, called with {now}")
        tensors = self._match_arguments(args, kwargs)
        inputs = self._tree.match(module, state[1]) + tensors
        if self._written and (shared := self._shared_memory(inputs)):
            raise Mismatch(MODULE, f"{shared[0]} shares memory with {shared[1]}, which the call changes")
        if state[1]:
            self._look_alike[True] = tensor_checks(tensors)
        return inputs

    def _match_arguments(self, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        if kwargs.keys() != set(self._keywords):
            detail = f"compiled for {sorted(self._keywords)}, called with {sorted(kwargs)}"
            raise Mismatch(STRUCTURE, "keyword arguments", detail)
        # the order of keywords carries no meaning
        leaves, spec = pytree.tree_flatten((args, {name: kwargs[name] for name in self._keywords}))
        if spec != self._spec:
            raise Mismatch(STRUCTURE, *structure_difference(self._spec, spec))
        for i, constant in self._constants:
            if not same(leaves[i], constant):
                detail = f"compiled for {constant!r}, called with {_brief(leaves[i])}"
                raise Mismatch(STRUCTURE, f"value of argument {self._leaf_paths[i]}", detail)
        tensors = [leaves[i] for i in self._tensors]
        for tensor, i in zip(tensors, self._tensors, strict=True):
            if not isinstance(tensor, torch.Tensor):
                detail = f"a tensor was compiled, called with {_brief(tensor)}"
                raise Mismatch(STRUCTURE, f"structure of argument {self._leaf_paths[i]}", detail)
        for tensor, i, layout, strides in zip(tensors, self._tensors, self._layouts, self._strides, strict=True):
            _match_tensor(tensor, self._leaf_paths[i], layout, strides)
            if self._saves and tensor.is_inference():
                raise Mismatch(ARGUMENTS, f"inference tensor {self._leaf_paths[i]}", "autograd cannot save it")
        return tensors

    def _shared_memory(self, inputs: Sequence[torch.Tensor]) -> tuple[str, str] | None:
        """Two inputs in one storage, the second of which the call changes: eager reads the new values in both."""
        storages = [storage_id(tensor) for tensor in inputs]
        for index, name in self._written:
            if storages.count(storages[index]) > 1 and inputs[index].numel():
                other = next(i for i, each in enumerate(storages) if each == storages[index] and i != index)
                return self._names[other], f"buffer '{name}'"
        return None


def _shape_of(spec: pytree.TreeSpec, index: int) -> tuple | None:
    """The structure of one child for :func:`_take`: ``None`` for a leaf."""
    child = spec.child(index)
    if child.is_leaf():
        return None
    return child.type, child.context, [_shape_of(child, i) for i in range(child.num_children)], child


def _take(value: Any, shape: tuple | None, leaves: list[Any]) -> bool:
    """Appends the leaves of ``value`` if it has this structure; far quicker than pytree for tuples, lists and dicts."""
    if shape is None:
        leaves.append(value)
        return True
    kind, context, children, spec = shape
    if type(value) is not kind:
        return False
    if kind is tuple or kind is list:
        fields = value
    elif kind is dict:
        if list(value) != context:
            return False
        fields = value.values()
    else:
        found, now = pytree.tree_flatten(value)
        leaves += found
        return now == spec
    return len(fields) == len(children) and all(map(_take, fields, children, [leaves] * len(children)))


def _match_tensor(tensor: torch.Tensor, path: str, layout: tuple, strides: tuple[int, ...]) -> None:
    shape, dtype, requires_grad, device, memory = layout
    if type(tensor) is not torch.Tensor and type(tensor) is not nn.Parameter:
        raise Mismatch(ARGUMENTS, f"type of {path}", f"a tensor subclass, {type(tensor).__name__}")
    if tensor.is_nested:
        raise Mismatch(ARGUMENTS, f"layout of {path}", "a nested tensor")
    if tensor.shape != shape:
        raise _differs("shape", path, tuple(shape), tuple(tensor.shape))
    if tensor.dtype is not dtype:
        raise _differs("dtype", path, dtype, tensor.dtype)
    if tensor.requires_grad is not requires_grad:
        raise _differs("requires_grad", path, requires_grad, tensor.requires_grad)
    if tensor.device != device:
        raise _differs("device", path, device, tensor.device)
    if tensor.layout is not memory:
        raise _differs("layout", path, memory, tensor.layout)
    if tensor.is_neg():
        raise Mismatch(ARGUMENTS, f"layout of {path}", "a tensor with its sign bit set aside (is_neg)")
    now = tensor.stride()
    if now != strides and _meaningful(now, shape) != _meaningful(strides, shape):
        raise _differs("strides", path, strides, now)


def _differs(field: str, path: str, then: Any, now: Any) -> Mismatch:
    return Mismatch(ARGUMENTS, f"{field} of {path}", f"compiled for {then}, called with {now}")


def _meaningful(strides: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Strides with those of extents 0 and 1 made 1: draws and results follow the others."""
    return tuple(stride if extent > 1 else 1 for extent, stride in zip(shape, strides, strict=True))


def _brief(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:80]
