"""The whole story, from a module to the two functions that are compiled, as a flat list of stages.

    captured    the module's sample call as a functional ATen graph          bridge.capture
    imported    aten -> Relax, training semantics                            bridge.aten
    masked      dropout becomes a product with a mask input                  autodiff.mask_dropout
    spelled     LayerNorm & co. become what TVM can differentiate            autodiff.spell_out
    forward     cleaned, variables named uniquely                            autodiff.clean
    joint       grad_outs in, gradients out: relax.transform.Gradient        autodiff.differentiate
    cleaned     ZappLike, ZeroZapp, OneZapp, CSE, DCE, to a fixed point      autodiff.clean
    split       a forward with captures and a backward, and the Plan         partition

Every stage's IR is kept; ``print(lowered)`` shows the line, ``lowered["joint"]`` one stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

import autodiff
from autodiff.errors import UndifferentiableOp
from autodiff.ir import Function, bindings
from bridge.aten import import_graph
from bridge.aten.importer import Imported
from bridge.capture import Captured, capture, normalize_sample
from bridge.errors import CompilationError, Unsupported, UnsupportedModule
from bridge.grad_regions import where_is
from bridge.module_state import Snapshot
from partition import Partitioned, Plan, rebuild_backward
from partition import partition as partition_joint

__all__ = ["Lowered", "Stage", "lower", "lower_captured"]

DEFAULT_PARTITION = "min_cut"


@dataclass(frozen=True)
class Stage:
    """One step of the lowering: its name, the IR after it, and the seconds it took."""

    name: str
    function: Function
    seconds: float

    @property
    def size(self) -> int:
        """Number of bindings."""
        return sum(1 for _ in bindings(self.function))

    def __str__(self) -> str:
        return f"{self.name:<10} {self.size:>6} bindings  {1e3 * self.seconds:8.1f} ms"


@dataclass
class Lowered:
    """A module's call, lowered: every stage, the forward and, when something requires grad, the backward.

    Attributes:
        captured, imported: where it came from.
        stages: in order; index by name.
        forward: outputs, new buffer values, captures; parameters as in :class:`bridge.aten.importer.Imported`,
            then the dropout masks.
        partitioned: ``None`` when nothing requires grad.
        wanted: the inputs (module tensors, then arguments) whose gradient exists for some output.
        differentiable: indices of the forward's outputs that take a grad_out.
        seconds: capture and lowering.
    """

    captured: Captured
    imported: Imported
    wanted: tuple[int, ...]
    differentiable: tuple[int, ...]
    stages: list[Stage] = field(default_factory=list)
    partitioned: Partitioned | None = None
    seconds: float = 0.0

    @property
    def forward(self) -> Function:
        return self.partitioned.forward if self.partitioned else self["forward"]

    @property
    def backward(self) -> Function | None:
        return self.partitioned.backward if self.partitioned else None

    @property
    def plan(self) -> Plan | None:
        return self.partitioned.plan if self.partitioned else None

    @cached_property
    def num_primals(self) -> int:
        """Parameters of the forward: module tensors, arguments, draws, masks."""
        return len(self["forward"].params)

    @cached_property
    def num_results(self) -> int:
        """Outputs and new buffer values, without captures."""
        return len(autodiff.ir.results(self["forward"]))

    def __getitem__(self, name: str) -> Function:
        for stage in self.stages:
            if stage.name == name:
                return stage.function
        raise KeyError(f"no stage {name!r}; there are {', '.join(stage.name for stage in self.stages)}")

    def __str__(self) -> str:
        return "\n".join(map(str, self.stages))

    def run(self, name: str, transform: Callable[..., Function], function: Function, *args: Any) -> Function:
        """Applies one pass and keeps its result as a stage.

        Raises:
            CompilationError: names the stage and holds its input when the pass fails.
        """
        started = time.perf_counter()
        try:
            result = transform(function, *args)
        except UndifferentiableOp as error:
            raise UnsupportedModule(
                self.captured.module_name, [self._no_gradient(e) for e in (error, *error.others)]
            ) from error
        except Exception as error:
            raise CompilationError(name, function.script(), error) from error
        self.stages.append(Stage(name, result, time.perf_counter() - started))
        return result

    def _no_gradient(self, error: UndifferentiableOp) -> Unsupported:
        """The user's line of an operator without a gradient: variables are named after the nodes they came from."""
        origin = error.binding.split("__")[0]
        nodes = [node for node in self.captured.graph.nodes if node.name == origin]
        where = (where_is(nodes[0]) if nodes else None) or f"inside {self.captured.module_name} ({error.binding})"
        return Unsupported(str(nodes[0].target) if nodes else error.op, where, f"{error.op}: {error.why}")

    def gradients_for(self, outputs: Sequence[int]) -> tuple[int, ...]:
        """The wanted inputs that eager's autograd reaches from these outputs; the others get ``None``."""
        leaf_of = {position: leaf for leaf, position in enumerate(self.imported.output_of) if position is not None}
        reached = set().union(*(self.captured.outputs[leaf_of[output]].reaches for output in outputs))
        return tuple(index for index in self.wanted if index in reached)

    def backward_for(self, outputs: Sequence[int]) -> Function:
        """The backward for a call in which only these outputs got a grad_out, from the same saved tensors."""
        gradients = self.gradients_for(outputs)
        joint = autodiff.clean(autodiff.differentiate(self["forward"], outputs, gradients))
        return rebuild_backward(joint, self.plan, num_primals=self.num_primals, num_outputs=self.num_results)


def lower_captured(captured: Captured, *, grad: bool, partition: Any = DEFAULT_PARTITION) -> Lowered:
    """Lowers a captured call.

    Args:
        grad: whether gradients are wanted (grad mode is on).
        partition: a strategy of :func:`partition.partition`.

    Raises:
        UnsupportedModule: an operator is not handled exactly.
        CompilationError: a pass failed; a bug of this package.
    """
    started = time.perf_counter()
    imported = import_graph(captured)
    requires_grad = [tensor.requires_grad for tensor in (*captured.module_tensors, *captured.arguments)]
    differentiable = _differentiable(captured, imported) if grad else ()
    lowered = Lowered(captured, imported, (), differentiable)
    lowered.stages.append(Stage("imported", imported.function, time.perf_counter() - started))
    function = lowered.run("masked", autodiff.mask_dropout, imported.function)
    function = lowered.run("spelled", autodiff.spell_out, function)
    function = lowered.run("forward", lambda f: autodiff.unique_names(autodiff.clean(f)), function)
    if not differentiable:
        return lowered
    lowered.wanted = tuple(index for index, needs in enumerate(requires_grad) if needs)
    lowered.wanted = lowered.gradients_for(differentiable)
    function = lowered.run("joint", autodiff.differentiate, function, differentiable, lowered.wanted)
    joint = lowered.run("cleaned", autodiff.clean, function)
    started = time.perf_counter()
    lowered.partitioned = partition_joint(
        joint, num_primals=lowered.num_primals, num_outputs=lowered.num_results, strategy=partition
    )
    seconds = time.perf_counter() - started
    lowered.stages += [Stage("split forward", lowered.forward, seconds), Stage("split backward", lowered.backward, 0.0)]
    return lowered


def _differentiable(captured: Captured, imported: Imported) -> tuple[int, ...]:
    return tuple(
        position
        for leaf, position in enumerate(imported.output_of)
        if position is not None and captured.outputs[leaf].requires_grad
    )


def lower(
    module: nn.Module,
    sample_input: Any,
    *,
    sample_kwargs: dict[str, Any] | None = None,
    partition: Any = DEFAULT_PARTITION,
) -> Lowered:
    """Lowers ``module(sample)`` without compiling or changing anything; see the module's docstring for the stages.

    Args:
        module: in the mode (train, eval) that is meant.
        sample_input: a tensor (one positional argument), a tuple (positional) or a dict (keyword arguments).
        sample_kwargs: further keyword arguments.
        partition: ``"min_cut"``, ``"save_all"``, ``"recompute_all"`` or a strategy object.

    Raises:
        TypeError: the sample does not fit the module.
        UnsupportedModule: something in the module is not handled exactly.
    """
    args, kwargs = normalize_sample(sample_input, sample_kwargs)
    before = Snapshot(module)
    try:
        return lower_captured(capture(module, args, kwargs), grad=torch.is_grad_enabled(), partition=partition)
    finally:
        before.restore()
