"""The lowering pipeline: captured call → every stage, the forward and the backward function.

``bridge/lower.py`` lists the stages. Each pass maps the previous stage's function to a new one; every stage's IR stays
in the result (:class:`bridge.lowering.lowered.LoweredCall`), so that it can be printed, compared and run.

A/B timing of a recurrent layer: oneDNN's kernel and a generated loop over a few steps, compiled and timed → the faster.
The winner depends on the sizes, the processor and the number of threads. Both candidates, one layer in one direction,
are lowered and compiled as any module is, with the backward where gradients are wanted. They run in the calling
thread, unlike the candidates of products: lowering depends on thread-local settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

import autodiff
from autodiff.ir import Function, dtype, shape
from autodiff.row_blocks import reduce_in_blocks
from autodiff.scan import hoist, roll_up
from bridge.aten import Imported, LayerShape, import_graph, layers_chosen_by
from bridge.base.devices import HOST, working_for
from bridge.base.errors import CompilationError, UnsupportedModule
from bridge.base.log import Stopwatch, channel
from bridge.base.torch_internals import unset_fake_temporarily
from bridge.capture import Captured, capture
from bridge.compile import CompileOptions, backend_for, compile_function, settle
from bridge.lowering.lowered import LoweredCall
from bridge.lowering.stage import Stage
from bridge.reference import run_graph
from bridge.state import SampleCall
from bridge.trials import TRIALS, Question, seconds_of
from partition import differentiable_scans
from partition import partition as partition_joint

__all__ = ["DEFAULT_PARTITION", "cleaned_and_named", "loop_is_quicker", "lower_captured", "partition_options"]


_KERNEL, _LOOP = "oneDNN's kernel", "loop"

_WORTH = 0.97
"""The share of the kernel's time that the loop must stay below: the kernel has exactly eager's numbers."""

_SMALL = 2**19
"""Multiplications of a step below which the kernel is used without a trial: launching a loop's step takes as long as
its product, and a trial costs a compilation."""

_FEWEST_STEPS, _MOST_STEPS, _MULTIPLICATIONS = 16, 128, 2**32
"""Steps of a trial, and the multiplications that it may do beyond the fewest steps: up to a tenth of a second. A loop
packs its weights once, and Python starts it: for 64 rows and 512 columns, 16 steps took as long as the kernel, 50 steps
0.91 of its time."""

_NUMBER = 0.01
"""The value of all elements: no candidate's speed depends on the numbers."""

Lower = Callable[[Captured], LoweredCall]

_IMPOSSIBLE = (UnsupportedModule, CompilationError, NotImplementedError, RuntimeError)
"""Errors of building or running the candidates."""


def loop_is_quicker(lower: Lower, grad: bool, layer: LayerShape) -> bool:
    """Whether the loop takes clearly less time than the kernel, for a layer of this shape on this machine.

    False without a trial if torch's deterministic algorithms are on. ``lower``: lowers a captured call, with gradients
    if ``grad``.
    """
    if torch.are_deterministic_algorithms_enabled() or 4 * layer.rows * layer.size**2 < _SMALL:
        return False
    multiplications = 4 * layer.rows * layer.size * (layer.size + layer.inputs)
    steps = max(_FEWEST_STEPS, min(_MOST_STEPS, _MULTIPLICATIONS // multiplications))
    layer = layer._replace(steps=min(layer.steps, steps), into_x=grad and layer.into_x)
    backend, mode = backend_for(None), "training" if grad else "inference"
    machine = backend.key, backend.threads(), *backend.machine()
    question = Question("recurrent layer", f"{mode} {tuple(layer)}", (mode, *layer), (_KERNEL, _LOOP), machine)
    measure = partial(_seconds, lower, grad, layer)
    return TRIALS.choose(question, measure, _WORTH, impossible=_IMPOSSIBLE) == _LOOP


def _seconds(lower: Lower, grad: bool, layer: LayerShape) -> dict[str, float]:
    with unset_fake_temporarily(), HOST, torch.autocast(HOST.type, enabled=False):
        runs = _runs(lower, grad, layer)
        settle()  # a background build would take a processor from the measurement
        with torch.no_grad():
            return seconds_of(runs)


def _runs(lower: Lower, grad: bool, layer: LayerShape) -> dict[str, Callable[[], object]]:
    """Candidate name → one training or inference step."""
    with torch.device("meta"):
        module = nn.LSTM(layer.inputs, layer.size, bias=layer.biases, dtype=torch.float32)
    module = module.to_empty(device=HOST).train(grad)
    extents = (layer.steps, layer.rows, layer.inputs), *[(1, layer.rows, layer.size)] * 2
    arguments = [torch.empty(each, dtype=torch.float32) for each in extents]
    primals = [each.detach().fill_(_NUMBER) for each in (*module.parameters(), *arguments)]
    x, *states = arguments
    with torch.set_grad_enabled(grad):
        captured = capture(SampleCall(module, (x.requires_grad_(layer.into_x), tuple(states))))
        runs = {}
        for name, is_looped in ((_KERNEL, False), (_LOOP, True)):
            with layers_chosen_by(lambda _, is_looped=is_looped: is_looped):
                runs[name] = _run(lower(captured), primals)
    return runs


def _run(lowered: LoweredCall, primals: Sequence[torch.Tensor]) -> Callable[[], object]:
    options = CompileOptions.current(backend_for(None))
    forward = compile_function(lowered.forward, name="trial_forward", options=options)
    if lowered.backward is None:
        return lambda: forward(primals)
    options = replace(options, sums_in_place=True, grad_outs=len(lowered.differentiable))
    backward = compile_function(lowered.backward, name="trial_backward", options=options)
    names = (*lowered.parameter_names, *(None,) * lowered.num_results, *lowered.capture_names)
    params = [(str(each.name), tuple(shape(each)), getattr(torch, dtype(each))) for each in lowered.backward.params]
    given = {name: torch.full(extents, _NUMBER, dtype=kind) for name, extents, kind in params if name not in names}

    def step() -> object:
        made = dict(zip(names, (*primals, *forward(primals)), strict=True))
        return backward([made[name] if name in made else given[name] for name, *_ in params])

    return step


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
    as_here = partial(_lower, grad=grad, partition=partition, capture_seconds=0.0)
    with working_for(captured.device), layers_chosen_by(partial(loop_is_quicker, as_here, grad)):
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
    rolls = captured.sizes.scope is None and not captured.observation.overwritten  # each step reads its own content
    given = wanted, partition, captured.device != HOST, rolls
    lowered.run("rolled", "roll_up, hoist, differentiable_scans", body, rolled, *given, if_changed=True)
    lowered.run("spelled", "autodiff.spell_out", body, autodiff.spell_out)
    made_by = "autodiff.sink_channel_permutes, sink_head_permutes, clean, unique_names"
    lowered.run("forward", made_by, body, cleaned_and_named, not differentiable)
    blocks: list[str] = []
    if rolls:
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


def rolled(
    body: autodiff.Body, required: Sequence[int], partition: Any, sums_later: bool = False, rolls: bool = True
) -> None:
    """The stage ``rolled``: unrolled loops become scans, with gradients of the required parameters.

    ``rolls``: whether to look for equal steps; for dynamic sizes only the traced graph's own loops are scans.
    """
    differentiable_scans(hoist(roll_up(body) if rolls else body), required, partition, sums_later)


def _differentiable(captured: Captured, imported: Imported) -> tuple[int, ...]:
    return tuple(
        position
        for leaf, position in enumerate(imported.output_of)
        if position is not None and captured.outputs[leaf].requires_grad
    )
