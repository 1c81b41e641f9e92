"""Results of a call: computed tensors and inputs → what eager returns, in its structure, aliases and strides.

Places of complex tensors among a call's inputs and results: programs know their parts alone.

Orders in memory: tensors of a call that lie as channels_last → what a forward and a backward are compiled for.

A program reads such a parameter where it lies; of any other layout than the sample's, it reads a dense copy. A gradient
is made to lie as what it is of, as eager's does: autograd copies what lies otherwise.

Inputs on the host beside a GPU's: integers (lengths, say) → copies on the device, which a program takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from bridge.base.devices import HOST, may_be_on_host
from bridge.base.pytrees import WithWholes, has_objects, unpacked
from bridge.base.tensor_properties import view_in
from bridge.base.torch_internals import pytree
from bridge.capture import Captured, Output
from bridge.lowering import LoweredCall

__all__ = ["assembly", "backward_orders", "complex_places", "forward_orders", "host_inputs", "memory_orders"]
__all__ += ["relaid", "result_layouts"]


def assembly(
    outputs: Sequence[Output], positions: Sequence[int | None], spec: pytree.TreeSpec
) -> Callable[[Any], None]:
    """What makes the module's result of a call's computed tensors and inputs, and sets it.

    Args:
        outputs: the leaves of the result as they were observed.
        positions: for each leaf its place among the computed tensors; ``None`` for a constant or an alias.
        spec: the result's structure.
    """
    plain = list(positions) == list(range(len(outputs)))
    if plain and spec.is_leaf():
        return _only
    if plain and spec.type in (tuple, list) and all(child.is_leaf() for child in spec.children()):
        return partial(_several, spec.type, len(outputs))

    def depth(leaf: int) -> int:
        """How many results a result is a view of, one through the other: those come first."""
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
    """One leaf of the result: a constant, a computed tensor, or what eager returns: a view of something else."""
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
    """Places of the forward's results that it has in another order in memory, eager's, each with its axes in that
    order, where sizes are known.

    Args:
        positions: as for :func:`assembly`.
    """
    found = {}
    if captured.extents is not None:
        return ()
    for observed, position in zip(captured.outputs, positions, strict=True):
        stride = None if position is None or observed.dtype.is_complex else _other_order(observed)
        if stride is not None:
            order = tuple(sorted(range(len(stride)), key=lambda axis: -stride[axis]))
            turned = torch.empty([observed.shape[axis] for axis in order], device="meta")
            if tuple(stride[axis] for axis in order) == turned.stride():
                found[position] = order
    return tuple(sorted(found.items()))


def result_layouts(
    outputs: Sequence[Output],
    positions: Sequence[int | None],
    shared: Iterable[int],
    strides: Mapping[int, tuple[int, ...]],
) -> list[tuple[int, tuple[int, ...] | None]]:
    """The results of the forward that do not look like eager's yet, each with eager's strides.

    ``None``: with the strides that it has, but in memory that others can see.

    Args:
        outputs, positions: as for :func:`assembly`.
        shared: places of the program's results in memory that others can see.
        strides: of those of the program's results that are views.
    """
    others = {
        position: stride
        for observed, position in zip(outputs, positions, strict=True)
        if position is not None and (stride := _other_order(observed)) not in (None, strides.get(position))
    }
    return [(position, others.get(position)) for position in sorted({*shared, *others})]


def relaid(value: torch.Tensor, stride: tuple[int, ...] | None) -> torch.Tensor:
    """A copy of a result in memory of its own, with these strides."""
    if stride is None:
        return torch.clone(value)
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)


def _other_order(observed: Output) -> tuple[int, ...] | None:
    """The strides of a dense tensor whose order in memory is that of eager's result; ``None`` if it is row-major.

    The gaps of a slice of something larger are not returned. The order is: draws for a tensor like it follow it.
    """
    plain = torch.empty(observed.shape, device="meta").stride()
    if plain == tuple(observed.stride):
        return None
    eagers = torch.empty_strided(observed.shape, observed.stride, dtype=observed.dtype, device="meta")
    stride = torch.empty_like(eagers).stride()
    same = all(a == b for a, b, extent in zip(stride, plain, observed.shape, strict=True) if extent != 1)
    if same or 0 in observed.shape:
        return None
    return (*(2 * step for step in stride), 1) if observed.dtype.is_complex else stride


def complex_places(
    captured: Captured, outputs: Sequence[Output], positions: Sequence[int | None]
) -> tuple[list[int], list[int]]:
    """Where a call has complex tensors: among module tensors and arguments, and among the results that are computed.

    Args:
        outputs, positions: as for :func:`assembly`.
    """
    given = [*captured.module_tensors, *captured.arguments]
    pairs = zip(outputs, positions, strict=True)
    computed = [place for output, place in pairs if place is not None and output.is_tensor and output.dtype.is_complex]
    return [place for place, each in enumerate(given) if each.dtype.is_complex], computed


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def forward_orders(lowered: LoweredCall) -> dict[str, Any]:
    """Fields of :class:`bridge.compile.CompileOptions`."""
    captured = lowered.captured
    given = _orders(captured, range(len(captured.module_tensors) + len(captured.arguments)))
    return {"orders": memory_orders(captured, lowered.imported.output_of), "given_orders": given}


def backward_orders(lowered: LoweredCall, outputs: tuple[int, ...]) -> dict[str, Any]:
    """Likewise, of the backward for grad_outs of these outputs."""
    captured, gradients = lowered.captured, lowered.gradients_for(outputs)
    made = _orders(captured, [index for index in lowered.wanted if index in gradients])
    return {"orders": made, "given_orders": _orders(captured, lowered.plan.saved_primals)}


def _orders(captured: Captured, primals: Sequence[int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Of a program's first parameters, or of a backward's results, which are gradients of these, where sizes are known.

    Args:
        primals: which of the call's they are: the module's tensors, the arguments, then others.
    """
    if captured.extents is not None:
        return ()
    tensors = [(each.shape, each.stride, each.dtype) for each in captured.module_tensors]
    tensors += [(each.shape, each.stride(), each.dtype) for each in captured.arguments]
    found = []
    for place, index in enumerate(primals):
        shape, stride, dtype = tensors[index] if index < len(tensors) else ((), (), torch.bool)
        if len(shape) in _CHANNELS_LAST and dtype.is_floating_point:
            form = torch.empty_strided(shape, stride, device="meta")
            if form.is_contiguous(memory_format=_CHANNELS_LAST[len(shape)]) and not form.is_contiguous():
                found.append((place, (0, *range(2, len(shape)), 1)))
    return tuple(found)


def host_inputs(captured: Captured) -> list[int]:
    """The places among a call's inputs whose tensors may lie on the host, beside a GPU's."""
    first = len(captured.module_tensors)
    places = [first + index for index, each in enumerate(captured.arguments) if may_be_on_host(each)]
    return places if captured.device != HOST else []
