"""Torch's private names of distributed tensors (DTensor), and their collectives.

``torch.distributed.tensor`` is imported when a distributed tensor is met: its import takes longer than this package's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from bridge.base.devices import HOST
from bridge.base.torch_internals import find, no_torch_function

_PACKAGE = "torch.distributed.tensor"
_no_modes = find("torch.utils._python_dispatch._disable_current_modes")

FROM_LOCAL, REDISTRIBUTE, TO_LOCAL = "_FromTorchTensor", "Redistribute", "_ToTorchTensor"
"""Names of the autograd Functions by which local tensors become distributed ones, change placements, and come back."""


class Sharding(NamedTuple):
    """How a module's tensor is distributed: mesh, placements, and the placements of its gradient."""

    mesh: Any
    placements: tuple[Any, ...]
    gradient: tuple[Any, ...] | None = None


def is_distributed(value: Any) -> bool:
    """Whether a value is a DTensor."""
    package = sys.modules.get(_PACKAGE)
    return package is not None and isinstance(value, package.DTensor)


def local_tensor(tensor: Any) -> torch.Tensor:
    """This rank's part of a DTensor, outside of autograd's graph; another tensor itself."""
    return tensor._local_tensor if is_distributed(tensor) else tensor


def sharding_of(tensor: Any) -> Sharding:
    """The mesh and the placements of a DTensor."""
    return Sharding(tensor._spec.mesh, tensor._spec.placements)


def with_sharding(
    local: torch.Tensor, spec: Any, placements: tuple[Any, ...] | None = None, requires_grad: bool = False
) -> torch.Tensor:
    """A DTensor of a local tensor, with a specification, or with other placements; a leaf of autograd's graph."""
    if placements is not None:
        spec = _spec(spec.mesh, placements, spec.tensor_meta)
    with no_torch_function():
        return sys.modules[_PACKAGE].DTensor(local, spec, requires_grad=requires_grad)


def _spec(mesh: Any, placements: tuple[Any, ...], meta: Any) -> Any:
    return sys.modules[f"{_PACKAGE}._dtensor_spec"].DTensorSpec(mesh, placements, tensor_meta=meta)


def of_local(local: torch.Tensor, like: Any) -> torch.Tensor:
    """A DTensor like another one, with a local tensor outside of autograd's graph; a parameter if that is one."""
    made = with_sharding(local.detach(), like._spec, None, like.requires_grad)
    made._is_param = getattr(like, "_is_param", False)
    return made


def entering(tensor: Any, gradient: tuple[Any, ...]) -> torch.Tensor:
    """The local tensor of a parameter, for a compiled call: its gradient becomes a DTensor of these placements."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return tensor.to_local(grad_placements=gradient)
    return tensor._local_tensor.detach().requires_grad_(tensor.requires_grad)


def spec_of_local(local: torch.Tensor, mesh: Any, placements: tuple[Any, ...]) -> Any:
    """The specification of the DTensor whose part on each rank has the form of this rank's."""
    meta = sys.modules[f"{_PACKAGE}._dtensor_spec"].TensorMeta
    shape, stride = sys.modules[f"{_PACKAGE}._utils"].compute_global_tensor_info(local, mesh, placements)
    return _spec(mesh, placements, meta(torch.Size(shape), tuple(stride), local.dtype))


def local_shape(spec: Any, placements: tuple[Any, ...]) -> list[int]:
    """The shape of a rank's part of a DTensor on a mesh of one dimension, split evenly."""
    shape = list(spec.shape)
    if (axis := shard_axis(placements[0])) is not None:
        shape[axis] //= spec.mesh.size()
    return shape


def partial_sum() -> tuple[Any, ...]:
    """The placements of a value that is the sum over the ranks of a mesh of one dimension."""
    return (sys.modules[_PACKAGE].placement_types.Partial(),)


def changes_dtype(options: Sequence[Any], dtype: torch.dtype) -> bool:
    """Whether a redistribution computes in another type than the tensor's, forward or backward.

    ``options``: the forward's dtype and the backward's, or one dictionary with both, by version of torch.
    """
    for each in options:
        flat = {**each, **each.get("backward_options", {})} if isinstance(each, dict) else {"dtype": each}
        if any(value not in (None, dtype) for name, value in flat.items() if name.endswith("dtype")):
            return True
    return False


def output_sharding(op: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """An operator on DTensors → torch's decision about placements."""
    dispatcher = sys.modules[_PACKAGE].DTensor._op_dispatcher
    with ExitStack() as stack:
        stack.enter_context(no_torch_function())
        stack.enter_context(_no_modes())
        info = dispatcher.unwrap_to_op_info(op, args, kwargs)
        return dispatcher.sharding_propagator.propagate_op_sharding_non_cached(info.schema)


def is_special(op: Any) -> bool:
    """Whether torch computes an operator on DTensors in another way than on local tensors: draws, convolutions."""
    dispatcher = sys.modules[_PACKAGE].DTensor._op_dispatcher
    return op in dispatcher._random_ops or op in dispatcher._custom_op_handlers


def is_plain_sum(placement: Any) -> bool:
    """Whether a partial placement is a plain sum over the ranks."""
    types = sys.modules[_PACKAGE].placement_types
    return type(placement) is types.Partial and placement.reduce_op == "sum"


def shard_axis(placement: Any) -> int | None:
    """The axis that a placement splits in equal consecutive parts; ``None`` for any other placement."""
    types = sys.modules[_PACKAGE].placement_types
    return placement.dim if type(placement) is types.Shard else None


def group_of(mesh: Any) -> str:
    """The name of the process group of a mesh with one dimension."""
    return mesh.get_group().group_name


def size_of(group: str) -> int:
    """The number of ranks of a process group."""
    return _resolved(group).size()


def _resolved(group: str) -> Any:
    return find("torch.distributed.distributed_c10d._resolve_process_group")(group)


_functional = torch.ops._c10d_functional


def reduced(x: torch.Tensor, axis: int, group: str) -> torch.Tensor:
    """The sum over a process group."""
    return _functional.wait_tensor(_functional.all_reduce(x.contiguous(), "sum", group))


def gathered(x: torch.Tensor, axis: int, group: str) -> torch.Tensor:
    """The parts of all ranks, in order, joined along an axis."""
    size = size_of(group)
    made = _functional.wait_tensor(_functional.all_gather_into_tensor(x.contiguous(), size, group))
    return made if axis == 0 else torch.cat(made.chunk(size), axis)


def scattered(x: torch.Tensor, axis: int, group: str) -> torch.Tensor:
    """This rank's part, along an axis, of the sum over a process group."""
    size = size_of(group)
    x = x if axis == 0 else torch.cat(x.chunk(size, axis))
    return _functional.wait_tensor(_functional.reduce_scatter_tensor(x.contiguous(), "sum", size, group))


def greatest(numbers: Sequence[int], group: str) -> list[int]:
    """The greatest of each number over a process group; on the host, if the group has a backend for it."""
    resolved = _resolved(group)
    kinds = {each.type for each in resolved._device_types}
    device = torch.device(HOST.type if HOST.type in kinds else next(iter(kinds)))
    made = torch.tensor(numbers, device=device)
    torch.distributed.all_reduce(made, torch.distributed.ReduceOp.MAX, resolved)
    return made.tolist()


def own_part(x: torch.Tensor, axis: int, group: str) -> torch.Tensor:
    """This rank's part along an axis, in memory of its own."""
    resolved = _resolved(group)
    size = x.shape[axis] // resolved.size()
    return x.narrow(axis, resolved.rank() * size, size).clone(memory_format=torch.contiguous_format)
