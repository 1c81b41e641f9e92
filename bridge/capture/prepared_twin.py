"""Prepared twin: a module → the twin on which forward runs, in which some layers have another forward.

The twin's outermost module has no hooks: they run around the compiled call. Hooks of inner modules are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from itertools import count
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bridge.base.errors import Unsupported, UnsupportedModule, line_of_forward
from bridge.base.pytrees import unpacked
from bridge.base.torch_internals import (
    MODULE_HOOKS,
    BatchNormBase,
    has_storage,
    pytree,
    set_version_counters,
    storage_id,
)
from bridge.capture.inplace_rules import CHANGES_ARGUMENT, version_of
from bridge.capture.rows import memory_of
from bridge.capture.twin import Twin
from bridge.guards import Snapshot, in_its_place, reads_as_forward
from bridge.state import SampleCall, own_attributes


class PreparedTwin:
    """A twin on which forward runs.

    Args:
        module: the module, or an earlier twin in the state that a run has left.
        replace: a tensor of the module → the twin's tensor.
        watched: whether to take a snapshot of the twin's Python state.

    Attributes:
        module: the twin.
        before: its Python state before the run; ``None`` if it is not ``watched``.
        twin: the map between originals and copies.
    """

    def __init__(
        self,
        module: nn.Module,
        replace: Callable[[torch.Tensor], torch.Tensor],
        *,
        watched: bool = False,
    ):
        self.twin = Twin(module, replace)
        self.module = self.twin.module
        for kind in MODULE_HOOKS:
            self.module.__dict__[kind] = type(self.module.__dict__[kind])()
        self.before = Snapshot(self.module) if watched else None
        self._layers: list[nn.Module] = []
        for layer in self.module.modules():
            if "forward" not in layer.__dict__ and averages_cumulatively(layer):
                self._layers.append(layer)
                layer.__dict__["forward"] = MethodType(cumulative_forward, layer)

    @in_its_place
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs forward without the class's own ``__call__``, which runs around the compiled call.

        Context variables that forward sets stay inside of the run. Packed objects among the arguments are unpacked.
        """
        args, kwargs = unpacked((args, kwargs))
        return copy_context().run(nn.Module.__call__, self.module, *args, **kwargs)

    def finish(self) -> None:
        """Restores the layers' own forward: the twin may be copied again."""
        for layer in self._layers:
            del layer.__dict__["forward"]


# Batch normalization with ``momentum=None``: running averages over all batches seen so far.
#
# torch's module reads the number of batches as a Python number to divide by it, which a graph cannot hold. While a
# module is traced, these layers run a forward that divides in a tensor.

_TORCHS_FORWARD = BatchNormBase.forward


def averages_cumulatively(layer: nn.Module) -> bool:
    """Whether :func:`cumulative_forward` must replace the layer's forward."""
    if not isinstance(layer, BatchNormBase) or type(layer).forward is not _TORCHS_FORWARD:
        return False
    counts = layer.num_batches_tracked is not None
    return layer.training and layer.track_running_stats and layer.momentum is None and counts


@reads_as_forward
def cumulative_forward(self: BatchNormBase, x: Tensor) -> Tensor:
    """``_BatchNorm.forward`` with the new batch's weight, ``1 / num_batches_tracked``, as a tensor.

    Like torch's kernel, it uses float32 for half types, and keeps the running statistics for an empty batch.
    """
    if not (self.training and self.track_running_stats and self.momentum is None):
        return type(self).forward(self, x)
    self._check_input_dim(x)
    self.num_batches_tracked.add_(1)
    y = functional.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
    if x.numel() == 0:
        return y
    with torch.no_grad():
        axes = [axis for axis in range(x.dim()) if axis != 1]
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        share = 1.0 / self.num_batches_tracked.to(wide.dtype)
        new = (wide.mean(axes), wide.var(axes))
        for running, batch in zip((self.running_mean, self.running_var), new, strict=True):
            running.copy_(((1.0 - share) * running.to(wide.dtype) + share * batch).to(running.dtype))
    return y


# Private arguments of a run: argument tensors → leaves with the same numbers and layout, each in separate memory.
#
# A result in an argument's memory is a view of that argument. The sample's arguments may share memory, with each other
# or with parameters; later calls need not. With separate memory, a result's memory identifies its argument.


def own_leaves(call: SampleCall, owned: Iterable[torch.Tensor]) -> tuple[tuple, dict[str, Any]]:
    """The arguments with new leaves for tensors, which are copies where memory is shared with ``owned`` or another."""
    places = count()
    taken = {storage_id(tensor) for tensor in owned if has_storage(tensor)}

    def own(tensor: torch.Tensor) -> torch.Tensor:
        leaf = tensor.data  # with its own version counter
        if has_storage(leaf):
            leaf = copier()(leaf) if leaf.numel() and storage_id(leaf) in taken else leaf
            taken.add(storage_id(leaf))
        return with_attributes(leaf.requires_grad_(next(places) in call.followed or tensor.requires_grad), tensor)

    return pytree.tree_map_only(torch.Tensor, own, (call.args, call.kwargs))


def copier() -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function: tensor → its copy, one for each object. Tensors that share memory get copies that share
    memory, except computed tensors that autograd tracks: their copy is computed as well, so that it may be written."""
    memory: dict[int, Any] = {}
    copies: dict[int, torch.Tensor] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = _copied(tensor)
        return copies[id(tensor)]

    def _copied(tensor: torch.Tensor) -> torch.Tensor:
        if not has_storage(tensor) or tensor.is_conj() or tensor.is_neg():
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        storage, layout = tensor.untyped_storage(), (tensor.shape, tensor.stride(), tensor.storage_offset())
        if storage_id(tensor) not in memory:
            memory[storage_id(tensor)] = storage.clone()
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        if tensor.requires_grad and not tensor.is_leaf and torch.is_grad_enabled():
            return made.set_(memory[storage_id(tensor)]).requires_grad_().clone().as_strided(*layout)
        made.set_(memory[storage_id(tensor)], layout[2], *layout[:2])
        made = nn.Buffer(made, persistent=True) if type(tensor) is nn.Buffer else made
        made = nn.Parameter(made) if type(tensor) is nn.Parameter else made
        made.requires_grad_(tensor.requires_grad)
        if tensor.is_leaf and tensor.grad is not None:  # a backward that the user's code runs adds to it
            made.grad = copied(tensor.grad)
        return with_attributes(made, tensor)

    return copied


def with_attributes(made: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """``made`` with the attributes that the user has set on ``tensor``."""
    made.__dict__.update((name, value) for name, value in tensor.__dict__.items() if not hasattr(made, name))
    return made


class Protected:
    """Memory that a run may write but does not own: restored after the run, with torch's version counters.

    Args:
        memory: the memory.
        inputs: the run's input tensors.
        inner: arguments that are leaves in the run but computed in the caller's graph: eager may write them.

    Attributes:
        counted: ids of the inputs, and tensors from elsewhere, whose version counter the run has moved.
    """

    def __init__(self, memory: Iterable[int], inputs: Sequence[torch.Tensor], inner: Sequence[torch.Tensor]):
        self._inner, self._memory = {storage_id(each) for each in inner}, {*memory}
        self._counters, self.counted = [(each, version_of(each)) for each in inputs], set[int]()
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """Protects the memory of a tensor from elsewhere; :class:`UnsupportedModule` for a sparse one."""
        if tensor.layout is not torch.strided:
            problem = Unsupported("a tensor that forward reads", line_of_forward(), f"layout {tensor.layout}")
            raise UnsupportedModule("", [problem])
        if (memory := memory_of(tensor)) is not None:
            self._memory.add(memory)
            self._counters.append((tensor, version_of(tensor)))

    def note(self, tensor: torch.Tensor) -> None:
        """Saves memory before a write; :class:`UnsupportedModule` for a tensor that only eager may write."""
        memory = memory_of(tensor)
        if memory in self._inner and tensor.requires_grad and torch.is_grad_enabled():
            where = line_of_forward()
            hint = "work on a clone: x = x.clone() before it"
            raise UnsupportedModule("", [Unsupported("an argument", where, CHANGES_ARGUMENT, hint)])
        if memory in self._memory and memory not in self._before:
            storage = tensor.untyped_storage()
            self._before[memory] = storage, storage.clone()

    def restore(self) -> None:
        for storage, before in self._before.values():
            storage.copy_(before)
        moved = [(tensor, version) for tensor, version in self._counters if version_of(tensor) != version]
        self.counted = {id(tensor) for tensor, _ in moved}
        for tensor, version in moved:
            set_version_counters((tensor,), (version,))


def paths_of(module: nn.Module) -> dict[int, str]:
    return {id(each): path for path, each in module.named_modules()}


def attributes_of(module: nn.Module, known: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that are plain attributes of modules, by path; each once. Forward's reads of sparse ones are refused."""
    seen = set(map(id, known))
    found: dict[str, torch.Tensor] = {}
    for path, each in module.named_modules():
        for name, value in own_attributes(each):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided and id(value) not in seen:
                seen.add(id(value))
                found[f"{path}.{name}" if path else name] = value
    return found
