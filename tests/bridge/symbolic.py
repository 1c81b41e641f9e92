"""A lowering with extents, held against eager at several sizes: its stages, instantiated, run by the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import autodiff
from autodiff.extents import Extent
from bridge import lower
from bridge.aten import import_graph
from bridge.base.devices import working_for
from bridge.capture import Captured, capture, dynamic_dims, normalize_sample
from bridge.lowering import LoweredCall, Sample
from bridge.lowering.pipeline import cleaned_and_named
from bridge.lowering.stage import Stage
from bridge.reference import interpret, run_graph
from bridge.state import SampleCall
from bridge.verify.inputs import eager_reference
from tests.autodiff.instantiate import instantiate
from tests.device import DEVICE

AT = torch.empty(0, device=DEVICE).device
"""The tested device as tensors name it, with its index."""


@working_for(AT)
def imported(module: nn.Module, sample: Any, dynamic_shapes: Any) -> LoweredCall:
    """The call captured and imported, without gradients."""
    given = SampleCall(module, *normalize_sample(module, sample, None))
    captured = capture(replace(given, dims=dynamic_dims(given, dynamic_shapes)))
    function = import_graph(captured)
    call = LoweredCall(captured, function, (), ())
    call.stages = [Stage("captured", "capture", captured.graph, 0.0), Stage("imported", "aten", function.function, 0.0)]
    training = {path: child.training for path, child in module.named_modules()}
    call.sample = Sample(module, given.args, given.kwargs, "min_cut", training, None, relower=lower)
    return call


@working_for(AT)
def differentiated(module: nn.Module, sample: Any, dynamic_shapes: Any) -> LoweredCall:
    """The call lowered up to the stage ``cleaned``."""
    call = imported(module, sample, dynamic_shapes)
    captured = call.captured
    position_of = zip(captured.outputs, call.imported.output_of, strict=True)
    call.differentiable = tuple(at for output, at in position_of if at is not None and output.requires_grad)
    body = autodiff.Body.of(call.imported.function)
    call.run("masked", "autodiff.mask_dropout", body, autodiff.mask_dropout)
    call.run("spelled", "autodiff.spell_out", body, autodiff.spell_out)
    call.run("forward", "autodiff.clean, unique_names", body, cleaned_and_named, not call.differentiable)
    if call.differentiable:
        tensors = enumerate((*captured.module_tensors, *captured.given.tensors))
        call.wanted = tuple(index for index, tensor in tensors if tensor.requires_grad)
        call.wanted = call.gradients_for(call.differentiable)
        call.run("joint", "autodiff.differentiate", body, autodiff.differentiate, call.differentiable, call.wanted)
        call.run("cleaned", "autodiff.clean", body, autodiff.clean)
    return call


def sizes_of(captured: Captured, args: tuple, kwargs: dict[str, Any]) -> dict[str, int]:
    """The values of the scope's symbols in a call."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    found: dict[str, int] = {}
    for shape, tensor in zip(captured.sizes.shapes, tensors, strict=True):
        for extent, size in zip(shape, tensor.shape, strict=True):
            if isinstance(extent, Extent) and extent.linear is not None:
                symbol, factor, offset = extent.linear
                found[symbol.name] = (size - offset) // factor
    return found


def at_sizes(lowered: LoweredCall, args: tuple, kwargs: dict[str, Any]) -> LoweredCall:
    """The lowered call for the sizes of another call: static, as if it had been lowered for these sizes."""
    captured = lowered.captured
    scope, sizes = captured.sizes.scope, sizes_of(captured, args, kwargs)
    assert scope.broken()(sizes) is None, (scope.broken()(sizes), sizes)

    def number(value: Any) -> Any:
        if isinstance(value, Extent):
            return scope.value(value, sizes)
        if is_dataclass(value):
            return replace(value, **{each.name: number(getattr(value, each.name)) for each in fields(value)})
        return type(value)(map(number, value)) if type(value) in (tuple, list) else value

    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    for tensor, shape, stride in zip(tensors, captured.sizes.shapes, captured.sizes.strides, strict=True):
        assert (tuple(tensor.shape), tensor.stride()) == (number(shape), number(stride))
    kinds = {kind: [number(each) for each in getattr(captured.observation, kind)] for kind in ("draws", "outputs")}
    static = replace(
        captured,
        observation=replace(captured.observation, **kinds),
        given=captured.given._replace(tensors=tuple(tensors)),
    )
    made = replace(lowered, captured=static, stages=[], sample=replace(lowered.sample, args=args, kwargs=kwargs))
    for stage in lowered.stages:
        if stage.name == "captured":
            made.stages.append(replace(stage, runner=lambda inputs: run_graph(static, lowered.imported, inputs)))
        else:
            made.stages.append(replace(stage, ir=instantiate(stage.function, sizes)))
    return made


@working_for(AT)
def assert_as_eager(
    lowered: LoweredCall, sample: Callable[..., Any], sizes: Sequence[Mapping[str, int] | tuple[int, ...]]
) -> None:
    """Every stage's results, and the form of the module's, are eager's for ``sample(*sizes)``; draws included."""
    for each in sizes:
        args, kwargs = normalize_sample(lowered.sample.module, sample(*each), None)
        static = at_sizes(lowered, args, kwargs)
        reference = eager_reference(static, seed=3)
        for stage in static.stages:
            inputs = reference.primals + (reference.grad_outs if stage.name in ("joint", "cleaned") else [])
            results = interpret(stage.function, inputs).results if stage.runner is None else stage.run(inputs)
            gradients = reference.gradients if stage.name in ("joint", "cleaned") else []
            _assert_close(results[: len(reference.results)], reference.results, f"results of {stage.name} at {each}")
            _assert_close(results[len(results) - len(gradients) :], gradients, f"gradients of {stage.name} at {each}")
        _assert_form(static, args, kwargs)


def _assert_close(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], words: str) -> None:
    narrow = any(each.dtype == torch.float32 for each in expected)  # transformers computes losses in float32
    for index, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        tolerance = (1e-6 if narrow else 1e-10) if wanted.dtype in (torch.float32, torch.float64) else 0.0
        scale = max(wanted.abs().max().item(), 1e-3) if tolerance else 1.0
        bounds = {"rtol": tolerance, "atol": tolerance * scale}
        torch.testing.assert_close(result.detach(), wanted, **bounds, msg=lambda m, i=index: f"{words}, {i}: {m}")


def _assert_form(static: LoweredCall, args: tuple, kwargs: dict[str, Any]) -> None:
    """Asserts that shapes, strides and element types of the results equal the capture's for this size."""
    with torch.random.fork_rng(devices=[]):
        leaves = pytree.tree_leaves(static.sample.module(*args, **kwargs))
    for leaf, output in zip(leaves, static.captured.outputs, strict=True):
        if output.is_tensor:
            assert (tuple(leaf.shape), leaf.stride(), leaf.dtype) == (output.shape, output.stride, output.dtype)
