"""Trial of a recurrent layer: oneDNN's kernel and our loop over a few steps, compiled and timed → which one is taken.

Which is quicker depends on the sizes, on the processor and on the number of threads. Both forms of one layer in one
direction are lowered and compiled as any module is, the backward too where gradients are wanted.

They run in the calling thread, not in one of their own as products do: lowering has settings of the thread's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from autodiff.ir import dtype, shape
from bridge.aten import LayerShape, layers_chosen_by
from bridge.base.devices import HOST
from bridge.base.errors import CompilationError, UnsupportedModule
from bridge.base.torch_internals import unset_fake_temporarily
from bridge.capture import Captured, capture
from bridge.compile import CompileOptions, backend_for, compile_function, settle
from bridge.lowering.lowered import LoweredCall
from bridge.state import SampleCall
from bridge.trials import TRIALS, Question, seconds_of

__all__ = ["loop_is_quicker"]

_KERNEL, _LOOP = "oneDNN's kernel", "loop"

_WORTH = 0.97
"""The part of the kernel's time that the loop has to stay below to be taken: the kernel has eager's very numbers."""

_SMALL = 2**19
"""Multiplications of a step below which the kernel is taken: a step of a loop, launched, takes as long as its product,
and a trial costs a compilation."""

_FEWEST_STEPS, _MOST_STEPS, _MULTIPLICATIONS = 16, 128, 2**32
"""Steps of a trial, and what they multiply if they are more than the fewest: up to a tenth of a second. A loop packs
its weights once, and Python starts it: of 16 steps of 64 rows and 512 columns it took as long as the kernel, of 50
0.91 of its time."""

_NUMBER = 0.01
"""Of all elements: no form's speed depends on the numbers."""

Lower = Callable[[Captured], LoweredCall]

_IMPOSSIBLE = (UnsupportedModule, CompilationError, NotImplementedError, RuntimeError)
"""What making or running the forms may come to."""


def loop_is_quicker(lower: Lower, grad: bool, layer: LayerShape) -> bool:
    """Whether the loop takes clearly less time than the kernel, for a layer of this shape on this machine.

    False without a trial where torch's deterministic algorithms are asked for: then nothing is measured.

    Args:
        lower: of a captured call, with or without gradients as ``grad`` says.
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
        settle()  # what is built meanwhile takes a processor from what is measured
        with torch.no_grad():
            return seconds_of(runs)


def _runs(lower: Lower, grad: bool, layer: LayerShape) -> dict[str, Callable[[], object]]:
    """A step of a training, or of inference, by each form."""
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
