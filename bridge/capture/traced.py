"""Trace: torch.export and a fake run of a call → what was captured; with the numbers that forward reads, if it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from bridge.base.devices import current_device
from bridge.base.errors import Unsupported, UnsupportedModule
from bridge.base.interrupts import raise_deferred
from bridge.base.modes import ambient_autocast, autocast_to
from bridge.base.torch_internals import pytree
from bridge.capture.captured import Captured
from bridge.capture.checkpoints import written_and_read
from bridge.capture.dynamic_shapes import DynamicDim
from bridge.capture.exported import (
    argument_values,
    constants,
    export,
    placeholders,
    requiring_grad,
    results_and_mutations,
)
from bridge.capture.first_look import Observed, observed
from bridge.capture.free_tensors import free_tensors
from bridge.capture.number_reader import given
from bridge.capture.own_functions import OwnFunctions
from bridge.capture.passes.autocast import without_casts
from bridge.capture.passes.copies import spell_out_copies
from bridge.capture.passes.decompose import decompose
from bridge.capture.passes.regions import link_functions_in_regions, prepare_regions, spell_out_casts_in_regions
from bridge.capture.random_nodes import eager_draws, match_draws
from bridge.capture.readings import Reading
from bridge.capture.recomputed import recomputed, uncounted
from bridge.capture.symbolic_capture import with_extents
from bridge.capture.symbolic_sizes import SymbolicSizes
from bridge.capture.unrolled import unrolled
from bridge.state import ModuleTensor, module_tensors

__all__ = ["Traced", "exported_call", "trace", "trace_of"]


class Traced(NamedTuple):
    """A captured call, the tensors that its ``module_tensors`` describe, the fake ones that entered its graph, the
    sizes that vary, and the user's own Functions."""

    captured: Captured
    real_tensors: list[torch.Tensor]
    fakes: list[Any]
    sizes: SymbolicSizes | None
    functions: OwnFunctions


def trace(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    dims: Sequence[DynamicDim],
    readings: Sequence[Reading],
) -> Traced:
    """Exports the call, observes it on fake tensors and brings the two together.

    ``readings``: what forward reads. Where it reads nothing, or tracing needs nothing of it, none.
    """
    exported = exported_call(module, args, kwargs, dims, readings)
    return trace_of(*exported, module, args, kwargs, dims, readings)


def exported_call(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    dims: Sequence[DynamicDim],
    readings: Sequence[Reading],
) -> tuple[ExportedProgram, OwnFunctions]:
    """The exported call and the user's own Functions in it."""
    functions = OwnFunctions(type(module).__name__)
    with given(module, readings, returned=True):
        return export(module, args, kwargs, dims, functions), functions


def trace_of(
    exported: ExportedProgram,
    functions: OwnFunctions,
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    dims: Sequence[DynamicDim],
    readings: Sequence[Reading],
    earlier: Observed | None = None,
) -> Traced:
    """The exported call, observed on fake tensors; ``earlier``: what was seen of it before, with no sizes that vary."""
    forward = f"{type(module).__name__}.forward"
    if long := unrolled(exported, forward):
        raise UnsupportedModule(type(module).__name__, long)
    sizes = SymbolicSizes(dims, argument_values(exported)) if dims else None
    raise_deferred()
    tensors, real_tensors = module_tensors(module, constants(exported))
    unsupported = _elsewhere(tensors, real_tensors)
    unsupported += free_tensors(exported, {name for tensor in tensors for name in tensor.names})
    needing_grad = requiring_grad(exported, tensors, pytree.tree_leaves((args, kwargs)))

    def needs_grad(node: fx.Node) -> bool:
        return node.name in needing_grad

    unsupported += functions.problems
    if functions.uses:
        unsupported += link_functions_in_regions(exported.graph_module, functions.uses, without_casts)
    spell_out_copies(exported.graph_module.graph)
    unsupported += spell_out_casts_in_regions(exported.graph_module, ambient_autocast(), needs_grad)
    unsupported += prepare_regions(exported.graph_module, needs_grad)
    if dims or readings or functions.uses or earlier is None or not earlier.is_of(tensors, real_tensors):
        with given(module, readings):
            earlier = observed(module, tensors, real_tensors, args, kwargs, sizes, functions)
    run = earlier.run
    unsupported += earlier.problems
    raise_deferred()
    with autocast_to(None):  # its casts are in the graph by now
        by_origin = eager_draws(exported, run, forward, unsupported)
        functional = decompose(exported)
    raise_deferred()
    draw_of, unmatched = match_draws(functional.graph, by_origin, forward)
    observation = run.observation
    observation.unsupported += unsupported
    if not observation.unsupported:  # a draw that is refused already has no match either
        observation.unsupported += unmatched
    bound, literals = placeholders(functional, tensors, run.argument_is_tensor)
    results, mutated = results_and_mutations(functional, tensors, bound, forward, observation.unsupported)
    names = [tensor.names[0] for tensor in tensors]
    observation.unsupported += written_and_read(observation.checkpointed, [index for index, _ in mutated], names)
    results, read = results[: len(results) - len(readings)], results[len(results) - len(readings) :]
    conditions, read = recomputed(functional.graph, read, readings, tensors, bound, literals)
    observation.unsupported += uncounted(read, readings, bool(dims))
    if len(results) != len(observation.outputs):
        reason = f"the exported graph returns {len(results)} values, eager {len(observation.outputs)}"
        raise UnsupportedModule(type(module).__name__, [Unsupported("torch.export", forward, reason)])
    for index, (node, output) in enumerate(zip(results, observation.outputs, strict=True)):
        if (node is not None) != output.is_tensor:
            reason = "is a tensor in eager and none in the exported graph, or the reverse"
            observation.unsupported.append(Unsupported(f"result {index}", forward, reason))
        elif node is not None and node.meta["val"].device != current_device():
            reason = f"is on device {node.meta['val'].device}, the module on {current_device()}"
            observation.unsupported.append(
                Unsupported(f"result {index}", forward, reason, "move it outside of forward")
            )
    captured = Captured(
        module_name=type(module).__name__,
        graph=functional.graph,
        placeholders=bound,
        module_tensors=tuple(tensors),
        arguments=run.arguments,
        argument_leaves=run.argument_leaves,
        argument_is_tensor=run.argument_is_tensor,
        in_spec=run.in_spec,
        results=tuple(results),
        mutated=tuple(mutated),
        observation=observation,
        fake_observation=observation,
        draw_of=draw_of,
        literals=literals,
        readings=tuple(readings),
        read=read,
        recomputed=conditions,
        device=current_device(),
    )
    fakes = [node.meta["val"] for node in captured.graph.nodes if node.op == "placeholder"]
    if sizes is not None:
        captured = with_extents(captured, sizes, args, kwargs)
    return Traced(captured, real_tensors, [*fakes, *run.arguments], sizes, functions)


def _elsewhere(tensors: Sequence[ModuleTensor], real_tensors: Sequence[torch.Tensor]) -> list[Unsupported]:
    """What the module owns on another device than that of the call: attributes, which are no parameters."""
    return [
        Unsupported(f"a tensor on {real.device}", tensor.names[0], f"the module is on {current_device()}", "move it")
        for tensor, real in zip(tensors, real_tensors, strict=True)
        if real.device != current_device()
    ]
