"""The lowering pipeline: captured call → every stage, the forward and the backward function.

``bridge/lower.py`` lists the stages. Each pass maps the previous stage's function to a new one; every stage's IR stays
in the result (:class:`bridge.lowering.lowered.LoweredCall`), so that it can be printed, compared and run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import autodiff
from autodiff.ir import Function
from autodiff.row_blocks import reduce_in_blocks
from autodiff.scan import hoist
from bridge.aten import Imported, import_graph
from bridge.base.devices import HOST, working_for
from bridge.base.log import Stopwatch, channel
from bridge.capture import Captured, functions_of_torch
from bridge.lowering.lowered import LoweredCall
from bridge.lowering.stage import Stage
from bridge.reference import run_graph
from partition import differentiable_scans
from partition import partition as partition_joint

log = channel("partition")

DEFAULT_PARTITION = "min_cut"


def lower_captured(
    captured: Captured, *, grad: bool, partition: Any = DEFAULT_PARTITION, capture_seconds: float = 0.0
) -> LoweredCall:
    """Lowers a captured call.

    Args:
        grad: whether gradients are wanted (grad mode is on).
        partition: a strategy of :func:`partition.partition`.
        capture_seconds: time that the capture took.

    Raises:
        UnsupportedModule: an operator is not handled exactly.
        CompilationError: a pass failed; a bug of this package.
    """
    with working_for(captured.device), functions_of_torch():
        return _lower(captured, grad, partition, capture_seconds)


def _lower(captured: Captured, grad: bool, partition: Any, capture_seconds: float) -> LoweredCall:
    watch = Stopwatch()
    imported = import_graph(captured)
    requires_grad = [tensor.requires_grad for tensor in (*captured.module_tensors, *captured.given.tensors)]
    differentiable = _differentiable(captured, imported) if grad else ()
    lowered = LoweredCall(captured, imported, (), differentiable)
    seconds = watch.seconds
    runner = partial(run_graph, captured, imported)
    lowered.add(Stage("captured", "bridge.capture", captured.graph, capture_seconds, None, runner))
    size = lowered.stages[0].size
    lowered.add(Stage("imported", "bridge.aten.import_graph", imported.function, seconds, size))
    body = autodiff.Body.of(imported.function)
    lowered.run("masked", "autodiff.mask_dropout", body, autodiff.mask_dropout)
    wanted = [index for index, needs in enumerate(requires_grad) if needs] if differentiable else []
    if not differentiable:
        autodiff.drop_gradients(body)
    given = wanted, partition, captured.device != HOST
    lowered.run("rolled", "hoist, differentiable_scans", body, rolled, *given, if_changed=True)
    lowered.run("spelled", "autodiff.spell_out", body, autodiff.spell_out)
    made_by = "autodiff.sink_channel_permutes, sink_head_permutes, clean, unique_names"
    lowered.run("forward", made_by, body, cleaned_and_named, not differentiable)
    blocks: list[str] = []
    if captured.sizes.scope is None and not captured.observation.overwritten:  # each block reads its own content
        asked = differentiable, wanted, blocks
        lowered.run("in blocks", "reduce_in_blocks", body, reduce_in_blocks, *asked, if_changed=True)
    if captured.device != HOST:
        lowered.run("biased", "autodiff.fuse_bias_epilogues", body, autodiff.fuse_bias_epilogues, if_changed=True)
    if not differentiable:
        return lowered
    lowered.wanted = tuple(wanted)
    lowered.wanted = lowered.gradients_for(differentiable)
    asked = differentiable, lowered.wanted, *lowered.memory
    lowered.run("joint", "autodiff.differentiate", body, autodiff.differentiate, *asked)
    lowered.run("cleaned", "autodiff.clean_joint", body, autodiff.clean_joint)
    size = lowered["cleaned"].size
    watch = Stopwatch()
    lowered.partitioned = partition_joint(body, strategy=partition, **partition_options(lowered, partition))
    log.info("%s %s", captured.module_name, lowered.plan.summary())
    log.debug("%s", lowered.plan)
    joined = autodiff.join_products(lowered.backward)
    plan = dataclasses.replace(lowered.plan, notes=(*lowered.plan.notes, *blocks))
    lowered.partitioned = dataclasses.replace(lowered.partitioned, plan=plan, backward=joined)
    seconds = watch.seconds
    made_by = f"partition ({lowered.plan.strategy})"
    lowered.add(Stage("split forward", made_by, lowered.forward, seconds, size))
    lowered.add(Stage("split backward", made_by, lowered.backward, 0.0, size))
    return lowered


def partition_options(lowered: LoweredCall, strategy: Any) -> dict[str, Any]:
    """Arguments of :func:`partition.partition` for a lowered call's joint function, by call and device."""
    captured, sources = lowered.captured, lowered.origins_in(lowered["cleaned"].function)
    owners, _, statistics = lowered.memory
    on_gpu, by_default = captured.device.type != HOST.type, strategy == DEFAULT_PARTITION
    return {
        "num_primals": lowered.num_primals,
        "num_outputs": lowered.num_results,
        "module_paths": {name: origin.module for name, origin in sources.items()},
        "again": captured.read_again,
        "apart": [place for leaf in captured.apart[0] if (place := lowered.imported.output_of[leaf]) is not None],
        "owners": {name: owner for name, owner in owners.items() if name not in statistics},
        "as_read": on_gpu,
        "cast_once": len(captured.module_tensors) if on_gpu and by_default else 0,
        "save_logits": on_gpu and by_default,
        "bound_recompute": on_gpu and by_default,
        "save_concatenation": not on_gpu and by_default,
    }


def cleaned_and_named(function: Function | autodiff.Body, merge_casts: bool) -> Function | autodiff.Body:
    """The stage ``forward``; equal casts are merged only in functions without gradients."""
    turned = autodiff.sink_head_permutes(autodiff.sink_channel_permutes(function))
    return autodiff.unique_names(autodiff.clean(turned, merge_casts=merge_casts))


def rolled(body: autodiff.Body, required: Sequence[int], partition: Any, sums_later: bool = False) -> None:
    """The stage ``rolled``: scans without values that depend on no carry, with gradients of the required parameters."""
    differentiable_scans(hoist(body), required, partition, sums_later)


def _differentiable(captured: Captured, imported: Imported) -> tuple[int, ...]:
    return tuple(
        position
        for leaf, position in enumerate(imported.output_of)
        if position is not None and captured.outputs[leaf].requires_grad
    )
