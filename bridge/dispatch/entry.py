"""One compiled call: its guard, its two programs, and the autograd Function that joins them.

What crosses from forward to backward goes through ``save_for_backward``: inputs, outputs and captures alike, so that
``saved_tensors_hooks`` see them and in-place changes are noticed. The node releases them as the backward starts,
unless the graph is retained, and the program drops each one after its last use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import profiler

from autodiff.ir import Function
from bridge.base.errors import CompilationError, Unsupported, UnsupportedModule
from bridge.base.torch_internals import has_storage, pytree
from bridge.capture.observation import Output
from bridge.capture.tracing import one_capture_at_a_time
from bridge.compile import Program, compile_function
from bridge.dispatch.guards import Guard
from bridge.lowering.lowered import LoweredCall
from bridge.lowering.reuse import lower_once
from bridge.rng.draws import Draws
from bridge.state.snapshot import PythonState

__all__ = ["Entry", "compile_entry"]


class Entry:
    """A call of one module that runs in TVM.

    Attributes:
        lowered: every stage of the lowering; shared with entries of equal calls (:mod:`bridge.lowering.reuse`).
        forward: the forward program.
        backward: the backward program for grad_outs of all differentiable outputs, or ``None``.
        plan: what is saved for the backward and why, or ``None``.
        compile_seconds: from capture to the compiled programs.
        hits: calls that this entry ran.
        partition, target: what it was compiled with, as they were given.
    """

    partition: Any = None
    target: Any = None

    def __init__(self, guard: Guard, lowered: LoweredCall, target: Any):
        started = time.perf_counter()
        captured, imported = lowered.captured, lowered.imported
        self.guard = guard
        self.lowered = lowered
        self.hits = 0
        self.last_used = 0
        self._target = target
        self._draws = Draws(
            captured.draws,
            masks=imported.dropout_draws,
            used=imported.input_draws + imported.dropout_draws,
            module_name=captured.module_name,
        )
        self.forward = _compiled(lowered.forward, captured.module_name, "forward", target)
        self._run_forward = _under_name(self.forward, captured.module_name, "forward")
        self._relaid = _result_layouts(lowered, self.forward)
        self._wanted = lowered.wanted
        self._num_outputs = imported.num_outputs
        self._num_results = lowered.num_results
        self._not_differentiable = [i for i in range(imported.num_outputs) if i not in lowered.differentiable]
        self._mutated = [index for index, _ in captured.mutated]
        self._saved_primals = lowered.plan.saved_primals if lowered.plan else ()
        self._saved_outputs = lowered.plan.saved_outputs if lowered.plan else ()
        self._result = _assembly(captured.outputs, imported.output_of, captured.observation.out_spec)
        self._backwards: dict[tuple[int, ...], _Backward] = {}
        if lowered.differentiable:
            self.backward_for(lowered.differentiable)
        self.compile_seconds = time.perf_counter() - started + lowered.seconds

    @property
    def backward(self) -> Program | None:
        return self._backwards[self.lowered.differentiable].program if self._backwards else None

    @property
    def plan(self) -> Any:
        return self.lowered.plan

    def __repr__(self) -> str:
        captured = self.lowered.captured
        shapes = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in captured.arguments)
        kind = "training" if self.backward else "forward only"
        return f"Entry({captured.module_name}({shapes}), {kind}, {self.hits} hits, {self.compile_seconds:.2f} s)"

    def __call__(self, inputs: list[torch.Tensor]) -> Any:
        """Runs the call on the tensors that the guard returned; same result as the module's forward."""
        self.hits += 1
        primals = inputs + self._draws.make()
        if self._backwards:
            computed = _apply(self, primals, *[inputs[index] for index in self._wanted])
        else:
            with torch.no_grad():
                computed = self.run_forward(primals)
                self.write_back(primals, computed)
        return self._result(computed, inputs)

    def run_forward(self, primals: list[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs, new buffer values, captures: each in eager's layout and in memory of its own."""
        values = _outside_autocast(self._run_forward, primals)
        for position, relay in self._relaid:
            values[position] = relay(values[position])
        return values

    def write_back(self, primals: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        """Gives the mutated buffers their new values, as eager did in place."""
        for offset, index in enumerate(self._mutated, self._num_outputs):
            primals[index].detach().copy_(values[offset])

    def saved(self, primals: list[torch.Tensor], values: list[torch.Tensor]) -> list[torch.Tensor]:
        """What the backward reads: primals (a buffer that is about to change as a copy), outputs, captures."""
        kept = [primals[i] for i in self._saved_primals]
        for position, index in enumerate(self._saved_primals):
            if index in self._mutated:
                kept[position] = kept[position].clone()
        return kept + [values[i] for i in self._saved_outputs] + values[self._num_results :]

    def backward_for(self, outputs: tuple[int, ...]) -> _Backward:
        """The backward for a call in which these outputs got a grad_out; compiled when first asked for."""
        found = self._backwards.get(outputs)
        if found is None:
            found = self._backwards[outputs] = _Backward(self.lowered, outputs, self._target)
        return found


def _compiled(function: Function, module_name: str, direction: str, target: Any) -> Program:
    """The program of a function. :class:`UnsupportedModule` names an operator that there is no kernel for."""
    try:
        return compile_function(
            function, name=f"{module_name}_{direction}", target=target, sums_in_place=direction == "backward"
        )
    except NotImplementedError as error:
        words = str(error).replace(":", " ").split()
        op = next((word for word in words if word.startswith(("relax.", "library."))), "a Relax operator")
        raise UnsupportedModule(module_name, [Unsupported(op, f"{module_name}'s {direction}", str(error))]) from error
    except Exception as error:
        raise CompilationError(f"compile {direction}", function.script(), error) from error


def _under_name(program: Program, module_name: str, direction: str) -> Callable[..., list[torch.Tensor]]:
    """The program; if it was compiled for an equal module of another class, a profiler is told the name of this one."""
    name = f"{module_name}_{direction}"
    if program.name == name:
        return program

    def run(inputs: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
        if not profiler._is_profiler_enabled:
            return program(inputs, **options)
        with profiler.record_function(f"tvm: {name}"):
            return program(inputs, **options)

    return run


class _Backward:
    """The backward program of one pattern of grad_outs; called with saved tensors and grad_outs."""

    def __init__(self, lowered: LoweredCall, outputs: tuple[int, ...], target: Any):
        full = outputs == lowered.differentiable
        function = lowered.backward if full else lowered.backward_for(outputs)
        self.program = _compiled(function, lowered.captured.module_name, "backward", target)
        self._run = _under_name(self.program, lowered.captured.module_name, "backward")
        count = len(function.params)
        self._copies = self.program.shared_results(handed_on=range(count - len(outputs), count))
        gradients = lowered.gradients_for(outputs)
        self._absent = [position for position, i in enumerate(lowered.wanted) if i not in gradients]

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """One gradient per wanted input, ``None`` where eager has none. Empties ``inputs``."""
        gradients = self._run(inputs, consume=True)
        for position in self._copies:
            gradients[position] = gradients[position].clone()
        for position in self._absent:  # in ascending order, so that the later positions are still to come
            gradients.insert(position, None)
        return gradients


class _Dispatched(torch.autograd.Function):
    """Forward and backward of an entry. Inputs: the entry, all primals, then the inputs that get a gradient."""

    @staticmethod
    def forward(ctx, entry: Entry, primals: list[torch.Tensor], *wanted: torch.Tensor):
        values = entry.run_forward(primals)
        ctx.save_for_backward(*entry.saved(primals, values))
        entry.write_back(primals, values)
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        if entry._not_differentiable:
            ctx.mark_non_differentiable(*[values[i] for i in entry._not_differentiable])
        return tuple(values[: entry._num_outputs])

    @staticmethod
    def backward(ctx, *grad_outs: torch.Tensor | None):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True through a module dispatched to TVM: its backward is compiled and cannot be "
                "differentiated again. Call remove_tvm_dispatch(module) first (or keep it out of what "
                "torch.compile(backend='tvm_dispatch') compiles), or leave create_graph off."
            )
        if any(grad is not None and not has_storage(grad) for grad in grad_outs):
            raise RuntimeError(
                "batched gradients (is_grads_batched=True, jacobian(vectorize=True), torch.func) through a module "
                "dispatched to TVM: its backward is compiled for one. Call remove_tvm_dispatch(module) first, or "
                "compute them one by one."
            )
        entry = ctx.entry
        present = tuple([i for i in entry.lowered.differentiable if grad_outs[i] is not None])
        if not present:
            return (None, None, *[None] * len(entry._wanted))
        inputs = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()
        inputs += [grad_outs[i] for i in present]
        del grad_outs
        return (None, None, *_outside_autocast(entry.backward_for(present), inputs))


def _outside_autocast(run: Callable[[list], list], inputs: list) -> list:
    """Runs compiled code: the casts that autocast made are in it, those of the backward included."""
    if not torch.is_autocast_enabled("cpu"):
        return run(inputs)
    with torch.autocast("cpu", enabled=False):
        return run(inputs)


# autograd.Function.apply looks for functorch's wrappers, argument by argument; the guard has seen that there are none
_apply = super(torch.autograd.Function, _Dispatched).apply


def _assembly(
    outputs: Sequence[Output], positions: Sequence[int | None], spec: pytree.TreeSpec
) -> Callable[[Sequence[torch.Tensor], list[torch.Tensor]], Any]:
    """What makes the module's result of the computed tensors and the inputs."""
    plain = list(positions) == list(range(len(outputs)))
    if plain and spec.is_leaf():
        return lambda computed, inputs: computed[0]
    if plain and spec.type in (tuple, list) and all(child.is_leaf() for child in spec.children()):
        kind, count = spec.type, len(outputs)
        return lambda computed, inputs: kind(computed[:count])

    def depth(leaf: int) -> int:
        """How many results a result is a view of, one through the other: those come first."""
        alias = outputs[leaf].alias_of
        return 1 + depth(alias[1]) if alias and alias[0] == "output" else 0

    order = sorted(range(len(outputs)), key=depth)

    def assemble(computed: Sequence[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
        leaves: list[Any] = [None] * len(outputs)
        for leaf in order:
            leaves[leaf] = _leaf(outputs[leaf], positions[leaf], computed, inputs, leaves)
        return pytree.tree_unflatten(leaves, spec)

    return assemble


def _leaf(seen: Output, position: int | None, computed: Any, inputs: list[torch.Tensor], leaves: list[Any]) -> Any:
    """One leaf of the result: a constant, a computed tensor, or what eager returns: a view of something else."""
    if not seen.is_tensor:
        return seen.value
    if position is not None:
        return computed[position]
    source, index = seen.alias_of
    base = inputs[index] if source == "input" else leaves[index]
    if seen.is_same_object:
        return base
    if base.requires_grad and not seen.requires_grad:
        base = base.detach()
    return base.as_strided(seen.shape, seen.stride, base.storage_offset() + seen.offset)


def _result_layouts(lowered: LoweredCall, program: Program) -> list[tuple[int, Callable[[torch.Tensor], torch.Tensor]]]:
    """The results of the forward that do not look like eager's yet, each with what gives it strides or memory."""
    strides = {
        position: stride
        for seen, position in zip(lowered.captured.outputs, lowered.imported.output_of, strict=True)
        if position is not None and (stride := _other_order(seen)) is not None
    }
    return [
        (position, partial(_strided_copy, stride=strides[position]) if position in strides else torch.clone)
        for position in sorted({*program.shared_results(), *strides})
    ]


def _strided_copy(value: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)


def _other_order(seen: Output) -> tuple[int, ...] | None:
    """The strides of a dense tensor whose order in memory is that of eager's result; ``None`` if it is row-major.

    The gaps of a slice of something larger are not returned. The order is: draws for a tensor like it follow it.
    """
    eagers = torch.empty_strided(seen.shape, seen.stride, dtype=seen.dtype, device="meta")
    stride, plain = torch.empty_like(eagers).stride(), torch.empty(seen.shape, device="meta").stride()
    same = all(a == b for a, b, extent in zip(stride, plain, seen.shape, strict=True) if extent != 1)
    return None if same or 0 in seen.shape else stride


def compile_entry(module: nn.Module, args: tuple, kwargs: dict[str, Any], *, partition: Any, target: Any) -> Entry:
    """Captures, lowers and compiles ``module(*args, **kwargs)`` in the current mode; the module is not changed.

    Raises:
        UnsupportedModule, CompilationError: as :func:`bridge.lower.lower`.
    """
    gradients = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    # to the code that is compiled, inference mode is the same as no_grad
    with torch.inference_mode(False), torch.set_grad_enabled(gradients), one_capture_at_a_time():
        if not gradients:
            args, kwargs = pytree.tree_map_only(torch.Tensor, _outside_inference, (args, kwargs))
        entry = _compile_entry(module, args, kwargs, partition, target)
    entry.partition, entry.target = partition, target
    return entry


def _outside_inference(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or one of the same layout and numbers that was not made in inference mode."""
    if not tensor.is_inference():
        return tensor
    storage = tensor.untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _compile_entry(module: nn.Module, args: tuple, kwargs: dict[str, Any], partition: Any, target: Any) -> Entry:
    started = time.perf_counter()
    before = PythonState(module)
    try:
        lowered = lower_once(module, args, kwargs, grad=torch.is_grad_enabled(), partition=partition)
        arguments = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        entry = Entry(Guard(module, lowered.captured, arguments), lowered, target)
        entry.compile_seconds = time.perf_counter() - started  # less than ``lowered`` took, where it was reused
        return entry
    except BaseException:
        before.restore()
        raise
