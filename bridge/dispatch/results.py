"""Results of a call: computed tensors and inputs → eager's result, with its structure, aliases and strides.

:func:`forward_orders`, :func:`backward_orders`: channels_last tensors of a call → layouts for its programs. A program
reads a channels_last parameter in its memory layout, and any other layout through a contiguous copy. A gradient gets
its input's layout, as in eager: autograd would copy it otherwise.

:func:`complex_places`: programs take complex tensors as real pairs. :func:`host_inputs`: integers on the host (lengths,
say), which a GPU program takes as copies on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from bridge.base.devices import HOST, may_be_on_host
from bridge.base.pytrees import WithWholes, has_objects, unpacked
from bridge.base.tensor_properties import view_in
from bridge.base.torch_internals import VF, pytree
from bridge.capture import Captured, Output
from bridge.compile import dense_strides
from bridge.lowering import LoweredCall

__all__ = ["assembly", "backward_orders", "complex_places", "forward_orders", "host_inputs", "memory_orders"]
__all__ += ["relaid", "result_layouts"]


def assembly(
    outputs: Sequence[Output], positions: Sequence[int | None], spec: pytree.TreeSpec
) -> Callable[[Any], None]:
    """A function that assembles the module's result from a call's computed tensors and inputs, and sets it on the call.

    Args:
        outputs: metadata of the result's leaves.
        positions: place of each leaf among the computed tensors; ``None`` for a constant or an alias.
        spec: the result's pytree structure.
    """
    plain = list(positions) == list(range(len(outputs)))
    if plain and spec.is_leaf():
        return _only
    if plain and spec.type in (tuple, list) and all(child.is_leaf() for child in spec.children()):
        return partial(_several, spec.type, len(outputs))

    def depth(leaf: int) -> int:
        """Length of a result's chain of views on other results: shorter chains are assembled first."""
        alias = outputs[leaf].alias_of
        return 1 + depth(alias[1]) if alias and alias[0] == "output" else 0

    objects = has_objects(spec)
    order = sorted(range(len(outputs)), key=depth)

    def put_together(call: Any) -> None:
        leaves: list[Any] = [None] * len(outputs)
        for leaf in order:
            leaves[leaf] = _leaf(outputs[leaf], positions[leaf], call.computed, call.inputs, leaves)
        result = pytree.tree_unflatten(leaves, spec)
        if spec.context is WithWholes:
            result = result.result
        call.result = unpacked(result) if objects else result

    return put_together


def _only(call: Any) -> None:
    call.result = call.computed[0]


def _several(kind: type, count: int, call: Any) -> None:
    call.result = kind(call.computed[:count])


def _leaf(observed: Output, position: int | None, computed: Any, inputs: list[torch.Tensor], leaves: list[Any]) -> Any:
    """One leaf of the result: a constant, a computed tensor, or a view of an input or another leaf."""
    if not observed.is_tensor:
        return observed.value
    if position is not None:
        return computed[position]
    source, index = observed.alias_of
    base = inputs[index] if source == "input" else leaves[index]
    if observed.is_same_object:
        return base
    if base.requires_grad and not observed.requires_grad:
        base = base.detach()
    view = view_in(base, observed.dtype, observed.shape, observed.stride, observed.offset)
    return view.conj() if observed.is_conjugate else view


def memory_orders(captured: Captured, positions: Sequence[int | None]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The forward's results that the program writes in eager's non-row-major order: place and axes, outermost first.

    Empty with dynamic shapes.

    Args:
        positions: as for :func:`assembly`.
    """
    found = {}
    if captured.sizes.scope is not None:
        return ()
    for observed, position in zip(captured.outputs, positions, strict=True):
        stride = None if position is None or observed.dtype.is_complex else _other_order(observed)
        if stride is not None:
            order = tuple(sorted(range(len(stride)), key=lambda axis: -stride[axis]))
            turned = VF.empty([observed.shape[axis] for axis in order], device="meta")
            if tuple(stride[axis] for axis in order) == turned.stride():
                found[position] = order
    return tuple(sorted(found.items()))


def result_layouts(
    outputs: Sequence[Output],
    positions: Sequence[int | None],
    shared: Iterable[int],
    strides: Mapping[int, tuple[int, ...]],
) -> list[tuple[int, tuple[int, ...] | None]]:
    """The forward's results to copy, each with eager's strides; ``None``: its own strides, out of shared memory.

    Args:
        outputs, positions: as for :func:`assembly`.
        shared: places of the program's results in shared memory.
        strides: place → strides of the program's results that are views.
    """
    others = {
        position: stride
        for observed, position in zip(outputs, positions, strict=True)
        if position is not None and (stride := _other_order(observed)) not in (None, strides.get(position))
    }
    return [(position, others.get(position)) for position in sorted({*shared, *others})]


def relaid(value: torch.Tensor, stride: tuple[int, ...] | None) -> torch.Tensor:
    """A copy of a result in new memory, with these strides."""
    if stride is None:
        return VF.clone(value)
    return VF.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)


def _other_order(observed: Output) -> tuple[int, ...] | None:
    """Strides of a dense tensor with eager's memory order; ``None`` if that order is row-major.

    Gaps of a slice are not reproduced. The order is, since later ``*_like`` draws follow it.
    """
    if dense_strides(observed.shape) == tuple(observed.stride):
        return None
    plain = VF.empty(observed.shape, device="meta").stride()
    eagers = VF.empty_strided(observed.shape, observed.stride, dtype=observed.dtype, device="meta")
    stride = VF.empty_like(eagers).stride()
    same = all(a == b for a, b, extent in zip(stride, plain, observed.shape, strict=True) if extent != 1)
    if same or 0 in observed.shape:
        return None
    return (*(2 * step for step in stride), 1) if observed.dtype.is_complex else stride


def complex_places(
    captured: Captured, outputs: Sequence[Output], positions: Sequence[int | None]
) -> tuple[list[int], list[int]]:
    """Places of a call's complex tensors: among module tensors and arguments, and among the computed results.

    Args:
        outputs, positions: as for :func:`assembly`.
    """
    given = [*captured.module_tensors, *captured.given.tensors]
    pairs = zip(outputs, positions, strict=True)
    computed = [place for output, place in pairs if place is not None and output.is_tensor and output.dtype.is_complex]
    return [place for place, each in enumerate(given) if each.dtype.is_complex], computed


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def forward_orders(lowered: LoweredCall) -> dict[str, Any]:
    """The layouts of a forward, as fields of :class:`bridge.compile.CompileOptions`."""
    captured = lowered.captured
    given = _orders(captured, range(len(captured.module_tensors) + len(captured.given.tensors)))
    return {"orders": memory_orders(captured, lowered.imported.output_of), "given_orders": given}


def backward_orders(lowered: LoweredCall, outputs: tuple[int, ...]) -> dict[str, Any]:
    """The layouts of the backward for grad_outs of these outputs, as fields of the same class."""
    captured, gradients = lowered.captured, lowered.gradients_for(outputs)
    made = _orders(captured, [index for index in lowered.wanted if index in gradients])
    return {"orders": made, "given_orders": _orders(captured, lowered.plan.saved_primals)}


def _orders(captured: Captured, primals: Sequence[int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The channels_last tensors among a program's parameters, or a backward's results: place and axes, outermost first.

    Empty with dynamic shapes.

    Args:
        primals: index of each one's primal: the module's tensors, the arguments, then draws.
    """
    if captured.sizes.scope is not None:
        return ()
    tensors = [(each.shape, each.stride, each.dtype) for each in captured.module_tensors]
    tensors += [(each.shape, each.stride(), each.dtype) for each in captured.given.tensors]
    found = []
    for place, index in enumerate(primals):
        shape, stride, dtype = tensors[index] if index < len(tensors) else ((), (), torch.bool)
        if len(shape) in _CHANNELS_LAST and dtype.is_floating_point:
            form = VF.empty_strided(shape, stride, device="meta")
            if form.is_contiguous(memory_format=_CHANNELS_LAST[len(shape)]) and not form.is_contiguous():
                found.append((place, (0, *range(2, len(shape)), 1)))
    return tuple(found)


def host_inputs(captured: Captured) -> list[int]:
    """Places of a GPU call's inputs that may be on the host."""
    first = len(captured.module_tensors)
    places = [first + index for index, each in enumerate(captured.given.tensors) if may_be_on_host(each)]
    return places if captured.device != HOST else []
