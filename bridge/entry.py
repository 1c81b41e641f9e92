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
from torch.utils import _pytree as pytree

from autodiff.ir import Function, TupleGetItem, Var, bindings, op_name, results
from bridge.capture import capture
from bridge.compile import Program, compile_function
from bridge.draws import Draws
from bridge.errors import Unsupported, UnsupportedModule
from bridge.guards import Guard
from bridge.lower import Lowered, lower_captured
from bridge.module_state import Snapshot
from bridge.witness import Output

__all__ = ["Entry", "compile_entry"]

_VIEWS = {
    "relax.reshape",
    "relax.permute_dims",
    "relax.expand_dims",
    "relax.squeeze",
    "relax.broadcast_to",
    "relax.strided_slice",
    "relax.flatten",
    "relax.split",
}


class Entry:
    """A call of one module that runs in TVM.

    Attributes:
        lowered: every stage of the lowering.
        forward: the forward program.
        backward: the backward program for grad_outs of all differentiable outputs, or ``None``.
        plan: what is saved for the backward and why, or ``None``.
        compile_seconds: from capture to the compiled programs.
        hits: calls that this entry ran.
    """

    def __init__(self, guard: Guard, lowered: Lowered, target: Any):
        started = time.perf_counter()
        captured, imported = lowered.captured, lowered.imported
        self.guard = guard
        self.lowered = lowered
        self.hits = 0
        self._target = target
        self._draws = Draws(
            captured.draws,
            masks=imported.dropout_draws,
            used=imported.input_draws + imported.dropout_draws,
            module_name=captured.module_name,
        )
        self.forward = _compiled(lowered.forward, captured.module_name, "forward", target)
        self._layouts = _result_layouts(lowered)
        self._outputs = list(zip(captured.outputs, imported.output_of, strict=True))
        self._out_spec = captured.witness.out_spec
        self._mutated = [index for index, _ in captured.mutated]
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
        if self.lowered.differentiable:
            computed = _Dispatched.apply(self, primals, *[inputs[index] for index in self.lowered.wanted])
        else:
            with torch.no_grad():
                computed = self.run_forward(primals)
                self.write_back(primals, computed)
        leaves: list[Any] = []
        for seen, position in self._outputs:
            leaves.append(_leaf(seen, position, computed, inputs, leaves))
        return pytree.tree_unflatten(leaves, self._out_spec)

    def run_forward(self, primals: list[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs, new buffer values, captures: each in eager's layout and in memory of its own."""
        values = self.forward([primal.detach() for primal in primals])
        return [layout(value) for layout, value in zip(self._layouts, values, strict=True)]

    def write_back(self, primals: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        """Gives the mutated buffers their new values, as eager did in place."""
        first = self.lowered.imported.num_outputs
        for offset, index in enumerate(self._mutated):
            primals[index].detach().copy_(values[first + offset])

    def saved(self, primals: list[torch.Tensor], values: list[torch.Tensor]) -> list[torch.Tensor]:
        """What the backward reads: primals (a buffer that is about to change as a copy), outputs, captures."""
        plan = self.lowered.plan
        kept = [primals[i].clone() if i in self._mutated else primals[i] for i in plan.saved_primals]
        return kept + [values[i] for i in plan.saved_outputs] + values[self.lowered.num_results :]

    def backward_for(self, outputs: tuple[int, ...]) -> _Backward:
        """The backward for a call in which these outputs got a grad_out; compiled when first asked for."""
        found = self._backwards.get(outputs)
        if found is None:
            found = self._backwards[outputs] = _Backward(self.lowered, outputs, self._target)
        return found


def _compiled(function: Function, module_name: str, direction: str, target: Any) -> Program:
    """The program of a function. :class:`UnsupportedModule` names an operator that there is no kernel for."""
    try:
        return compile_function(function, name=f"{module_name}_{direction}", target=target)
    except NotImplementedError as error:
        words = str(error).replace(":", " ").split()
        op = next((word for word in words if word.startswith(("relax.", "library."))), "a Relax operator")
        raise UnsupportedModule(module_name, [Unsupported(op, f"{module_name}'s {direction}", str(error))]) from error


class _Backward:
    """The backward program of one pattern of grad_outs; called with saved tensors and grad_outs."""

    def __init__(self, lowered: Lowered, outputs: tuple[int, ...], target: Any):
        full = outputs == lowered.differentiable
        function = lowered.backward if full else lowered.backward_for(outputs)
        self.program = _compiled(function, lowered.captured.module_name, "backward", target)
        grad_outs = function.params[len(function.params) - len(outputs) :]
        self._copies = _must_copy(function, keep=grad_outs)
        gradients = lowered.gradients_for(outputs)
        self._position = [gradients.index(i) if i in gradients else None for i in lowered.wanted]

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """One gradient per wanted input, ``None`` where eager has none. Empties ``inputs``."""
        made = self.program(inputs, consume=True)
        made = [value.clone() if copy else value for value, copy in zip(made, self._copies, strict=True)]
        return [None if position is None else made[position] for position in self._position]


class _Dispatched(torch.autograd.Function):
    """Forward and backward of an entry. Inputs: the entry, all primals, then the inputs that get a gradient."""

    @staticmethod
    def forward(ctx, entry: Entry, primals: list[torch.Tensor], *wanted: torch.Tensor):
        values = entry.run_forward(primals)
        ctx.save_for_backward(*entry.saved(primals, values))
        entry.write_back(primals, values)
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        lowered = entry.lowered
        outputs = values[: lowered.imported.num_outputs]
        ctx.mark_non_differentiable(*[o for i, o in enumerate(outputs) if i not in lowered.differentiable])
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *grad_outs: torch.Tensor | None):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True through a module dispatched to TVM: its backward is compiled and cannot be "
                "differentiated again. Call remove_tvm_dispatch(module) first, or leave create_graph off."
            )
        lowered = ctx.entry.lowered
        present = tuple(i for i in lowered.differentiable if grad_outs[i] is not None)
        if not present:
            return (None, None, *[None] * len(lowered.wanted))
        inputs = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()
        inputs += [grad_outs[i] for i in present]
        del grad_outs
        with torch.autocast("cpu", enabled=False):  # what was compiled for the forward's types holds for the backward
            return (None, None, *ctx.entry.backward_for(present)(inputs))


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


def _result_layouts(lowered: Lowered) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """For each result of the forward: what makes it look like eager's (its strides, memory of its own)."""
    strides = {
        position: seen.stride
        for seen, position in zip(lowered.captured.outputs, lowered.imported.output_of, strict=True)
        if position is not None and _is_dense_permutation(seen)
    }
    copies = _must_copy(lowered.forward, keep=())
    return [
        partial(_strided_copy, stride=strides[position]) if position in strides else torch.clone if copy else _as_is
        for position, copy in enumerate(copies)
    ]


def _as_is(value: torch.Tensor) -> torch.Tensor:
    return value


def _strided_copy(value: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)


def _is_dense_permutation(seen: Output) -> bool:
    """Whether eager returns a tensor that is dense in memory, but not in row-major order."""
    expected = 1
    order = sorted((d for d, extent in enumerate(seen.shape) if extent != 1), key=lambda d: seen.stride[d])
    if 0 in seen.shape:
        return False
    for dim in order:
        if seen.stride[dim] != expected:
            return False
        expected *= seen.shape[dim]
    return order != sorted(order, reverse=True)


def _must_copy(function: Function, keep: Sequence[Var]) -> list[bool]:
    """Which results share memory with a parameter or an earlier result (views of it included).

    ``keep``: parameters that may be handed on once (a grad_out that is a gradient, as in eager's ``x + y``).
    """
    base: dict[Var, Var] = {}
    for var, value in bindings(function):
        if isinstance(value, Var):
            source = value
        elif isinstance(value, TupleGetItem) or op_name(value) in _VIEWS:
            source = value.tuple_value if isinstance(value, TupleGetItem) else value.args[0]
        else:
            continue
        if isinstance(source, Var):
            base[var] = base.get(source, source)
    taken = set(function.params) - set(keep)
    copies = []
    for result in results(function):
        memory = base.get(result, result)
        copies.append(memory in taken)
        if isinstance(memory, Var):
            taken.add(memory)
    return copies


def compile_entry(module: nn.Module, args: tuple, kwargs: dict[str, Any], *, partition: Any, target: Any) -> Entry:
    """Captures, lowers and compiles ``module(*args, **kwargs)`` in the current mode; the module is not changed.

    Raises:
        UnsupportedModule, CompilationError: as :func:`bridge.lower.lower`.
    """
    started = time.perf_counter()
    before = Snapshot(module)
    try:
        captured = capture(module, args, kwargs)
        lowered = lower_captured(
            captured,
            grad=torch.is_grad_enabled(),
            partition=partition,
            capture_seconds=time.perf_counter() - started,
        )
        lowered.seconds = time.perf_counter() - started
        arguments = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        return Entry(Guard(module, captured, arguments), lowered, target)
    except BaseException:
        before.restore()
        raise
