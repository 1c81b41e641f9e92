"""A lowered call as data: its stages, the forward and the backward function, and the origin of each variable.

Freezing: the forward of a call lowered for inference → a function that runs once, and one for each call, by stages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

import autodiff
from autodiff import Body, inference
from autodiff.attention import spell_attention
from autodiff.errors import UndifferentiableOp
from autodiff.ir import Expr, Function, bindings, op_name, results
from autodiff.lazy import cached_property
from autodiff.ops import having
from bridge.artifact import key_of
from bridge.aten import Imported
from bridge.base.devices import HOST
from bridge.base.errors import CompilationError, Unsupported, UnsupportedModule
from bridge.base.log import Stopwatch, channel
from bridge.base.threads import raise_deferred
from bridge.base.torch_cuda import products_are_tf32
from bridge.base.torch_internals import implements_composite
from bridge.capture import PART_OF, Captured
from bridge.compile import KeptFunction
from bridge.lowering.stage import Diff, Origin, Stage, Staged, diff, origins, stage_after
from bridge.lowering.text import script
from bridge.reference import needed_nodes
from partition import Partitioned, Plan, rebuild_backward

log = channel("passes")


@dataclass(frozen=True)
class Sample:
    """The call that was lowered.

    Attributes:
        module: the module itself.
        args, kwargs: its arguments.
        partition: the strategy.
        training: submodule path -> whether it was in training mode.
        autocast: the element type of autocast, ``None`` if it was off.
        relower: lowers another call: ``relower(module, args, sample_kwargs=…, partition=…)``, as :func:`bridge.lower`.
    """

    module: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    partition: Any
    training: dict[str, bool]
    autocast: torch.dtype | None
    relower: Callable[..., LoweredCall]


@dataclass(repr=False)
class LoweredCall(Staged):
    """A module's call, lowered: every stage, the forward and, when something requires grad, the backward.

    Attributes:
        captured, imported: the traced and the imported call.
        stages: in order; index by name.
        forward: outputs, new buffer values, saved tensors; parameters as in :class:`bridge.aten.importer.Imported`,
            then the dropout masks.
        partitioned: ``None`` if nothing requires grad.
        wanted: indices of inputs (module tensors, then arguments) that have a gradient for some output.
        differentiable: indices of the forward's outputs that take a grad_out.
        seconds: time of capture and lowering.
        sample: the call, to run stages on; ``None`` for a dispatched module, which keeps no sample.
        content: digest of its functions in the disk cache; empty if they are not there.
    """

    captured: Captured
    imported: Imported
    wanted: tuple[int, ...]
    differentiable: tuple[int, ...]
    stages: list[Stage] = field(default_factory=list)
    partitioned: Partitioned | None = None
    seconds: float = 0.0
    sample: Sample | None = None
    content: str = ""

    @property
    def forward(self) -> Function:
        return self.partitioned.forward if self.partitioned else self.whole_forward

    @property
    def whole_forward(self) -> Function:
        """The forward before partitioning: only outputs and new buffer values as results."""
        last = [stage for stage in self.stages if stage.name in ("forward", "in blocks", "biased")][-1]
        return last.function

    @property
    def backward(self) -> Function | None:
        return self.partitioned.backward if self.partitioned else None

    @property
    def plan(self) -> Plan | None:
        return self.partitioned.plan if self.partitioned else None

    @cached_property
    def num_primals(self) -> int:
        """Number of parameters of the forward: module tensors, arguments, draws, masks."""
        return len(self["forward"].function.params)

    @cached_property
    def num_results(self) -> int:
        """Number of outputs, new buffer values, generator state and broken check's index; without saved tensors."""
        return len(results(self["forward"].function))

    @cached_property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of the forward's parameters."""
        return tuple(str(param.name) for param in self["forward"].function.params)

    @cached_property
    def capture_names(self) -> tuple[str, ...]:
        """Names of the forward's saved tensors."""
        return tuple(str(getattr(each, "name", "a constant")) for each in results(self.forward)[self.num_results :])

    @cached_property
    def gradient_inputs(self) -> tuple[int, ...]:
        """Indices of the primals from which eager computes gradients, and of the primals that get one."""
        captured, imported = self.captured, self.imported
        node_of = {place: node for node, place in zip(captured.results, imported.output_of, strict=True)}
        nodes = needed_nodes(captured, [node_of[output] for output in self.differentiable])
        found = {captured.names.placeholders[node.name] for node in nodes if node.name in captured.names.placeholders}
        drawn = {captured.names.draws[node.name] for node in nodes if node.name in captured.names.draws}
        given = len(captured.module_tensors) + len(captured.given.tensors)
        draws = (*imported.input_draws, *imported.dropout_draws)
        found.update(place for place, index in enumerate(draws, given) if index in drawn)
        return tuple(sorted({*found, *self.wanted}))

    @property
    def forward_source(self) -> Function | KeptFunction:
        """The forward as the compiler's input; a forward of the disk cache is not read before it is needed."""
        return KeptFunction(key_of(self.content, "forward"), lambda: self.forward) if self.content else self.forward

    def backward_source(self, outputs: tuple[int, ...]) -> Function | KeptFunction:
        """:meth:`backward_for` as the compiler's input, like :attr:`forward_source`."""
        if self.content and outputs == self.expected:
            return KeptFunction(key_of(self.content, "backward"), lambda: self.backward_for(outputs))
        return self.backward_for(outputs)

    def __str__(self) -> str:
        head = f"{self.captured.module_name}: {len(self.stages)} stages, {1e3 * self.seconds:.0f} ms"
        rows = [
            f"  {stage.name:<15} {'' if stage.before is None else stage.before:>6} -> {stage.size:<6} nodes "
            f"{1e3 * stage.seconds:8.1f} ms  {stage.made_by}"
            for stage in self.stages
        ]
        return "\n".join([head, *rows])

    __repr__ = __str__

    def run(
        self, name: str, made_by: str, body: Body, transform: Callable[..., Any], *args: Any, if_changed: bool = False
    ) -> None:
        """Applies one pass to ``body``, which holds the latest stage's function, and appends the result as a stage;
        with ``if_changed`` only if the pass edits the body.

        Raises:
            CompilationError: names the stage and holds its input when the pass fails.
            UnsupportedModule: an operator on the path to a wanted gradient has no gradient.
        """
        last = self.stages[-1]
        try:
            stage = stage_after(last, name, made_by, body, transform, *args)
        except UndifferentiableOp as error:
            problems = [self._no_gradient(each) for each in (error, *error.others)]
            raise UnsupportedModule(self.captured.module_name, problems, cause=error) from None
        except Exception as error:
            raise CompilationError(name, script(last.function), error) from error
        if stage.function is not last.function or not if_changed:
            self.add(stage)

    def add(self, stage: Stage) -> None:
        """Appends a stage, and logs it."""
        raise_deferred()
        self.stages.append(stage)
        if log.isEnabledFor(logging.INFO):
            log.info("%s %s", self.captured.module_name, stage.provenance)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s", stage.script())

    def _no_gradient(self, error: UndifferentiableOp) -> Unsupported:
        origin = self.origin(error.binding)
        where = origin.line or f"inside {self.captured.module_name} ({error.binding})"
        return Unsupported(origin.aten or error.op, where, f"{error.op}: {error.why}")

    def origin(self, name: str) -> Origin:
        """The origin of a variable of any stage (:mod:`bridge.lowering.stage`); empty for an unknown name."""
        return self.origins().get(name, Origin())

    def origins(self) -> dict[str, Origin]:
        """The origins of all variables of all stages, by name."""
        functions = [stage.ir for stage in self.stages if isinstance(stage.ir, Function)]
        return origins(self.captured, self.imported, functions)

    def origins_in(self, function: Function) -> dict[str, Origin]:
        """The origins of the variables of a forward or backward of this call, by name."""
        return origins(self.captured, self.imported, [self["forward"].function, function])

    @cached_property
    def owners(self) -> dict[str, str]:
        """Forward variable → the operation that computes it; empty unless the backward reads memory."""
        return self._parts[0]

    @cached_property
    def _parts(self) -> tuple[dict[str, str], frozenset[str]]:
        """The owners, and the names of statistics: values that are no results but that autograd saves."""
        owners, statistics = dict[str, str](), set[str]()
        if not self.captured.observation.overwritten and not self.captured.read_again:
            return owners, frozenset()
        nodes = {node.name: node for node in self.captured.graph.nodes}
        function = self["forward"].function
        of = origins(self.captured, self.imported, [function])
        for var, value in bindings(function):
            node = nodes.get(of[var.name].node) if var.name in of else None
            if node is not None and not implements_composite(node.target):
                owners[var.name] = node.meta.get(PART_OF, node.name)
                if _is_statistic(node, value):
                    statistics.add(var.name)
        return owners, frozenset(statistics)

    @property
    def memory(self) -> tuple[dict[str, str], dict[int, bool], frozenset[str]]:
        """Arguments of :func:`autodiff.differentiate` for memory that eager's backward reads at its own time."""
        owners, statistics = self._parts
        return owners, {place: viewed for place, (viewed, _) in self.captured.read_again.items()}, statistics

    def diff(self, before: str, after: str) -> Diff:
        """The difference of two stages, as operator counts and bindings; ``print`` it."""
        return diff(self[before], self[after])

    def gradients_for(self, outputs: Sequence[int]) -> tuple[int, ...]:
        """The wanted inputs that eager's autograd reaches from these outputs; the others get ``None``."""
        leaf_of = {position: leaf for leaf, position in enumerate(self.imported.output_of) if position is not None}
        reached = set().union(*(self.captured.outputs[leaf_of[output]].reaches for output in outputs))
        return tuple(index for index in self.wanted if index in reached)

    @cached_property
    def expected(self) -> tuple[int, ...]:
        """The outputs that a training loop differentiates: 0-d ones (losses), or all outputs if there are none."""
        leaf_of = {position: leaf for leaf, position in enumerate(self.imported.output_of) if position is not None}
        numbers = [each for each in self.differentiable if self.captured.outputs[leaf_of[each]].shape == ()]
        return tuple(numbers) or self.differentiable

    @cached_property
    def expected_backward(self) -> Function | None:
        """The backward of a call in which the expected outputs got a grad_out; ``None`` if nothing requires grad."""
        return self._backward_of(self.expected)

    def backward_for(self, outputs: tuple[int, ...]) -> Function:
        """The backward for a call in which only these outputs got a grad_out, from the same saved tensors."""
        return self.expected_backward if outputs == self.expected else self._backward_of(outputs)

    def _backward_of(self, outputs: tuple[int, ...]) -> Function | None:
        if outputs == self.differentiable:
            return self.backward
        gradients = self.gradients_for(outputs)
        narrowed = self._narrowed_backward(outputs, gradients)
        return self._rebuilt_backward(outputs, gradients) if narrowed is None else narrowed

    def _narrowed_backward(self, outputs: tuple[int, ...], gradients: tuple[int, ...]) -> Function | None:
        """The backward of all outputs without the other outputs' grad_outs; much faster than a new differentiation."""
        if outputs != tuple(output for output in self.differentiable if output in outputs):
            return None
        grad_outs = len(self.backward.params) - len(self.differentiable)
        absent = [place for place, output in enumerate(self.differentiable, grad_outs) if output not in outputs]
        results = [place for place, index in enumerate(self.wanted) if index in gradients]
        return autodiff.without_grad_outs(self.backward, absent, results)

    def _rebuilt_backward(self, outputs: tuple[int, ...], gradients: tuple[int, ...]) -> Function:
        joint = autodiff.clean_joint(autodiff.differentiate(self.whole_forward, outputs, gradients, *self.memory))
        backward = rebuild_backward(joint, self.plan, num_primals=self.num_primals, num_outputs=self.num_results)
        return autodiff.join_products(backward)


def _is_statistic(node: fx.Node, value: Expr) -> bool:
    """Whether a value is a mean or a sum that an operator returns beside its first result: autograd saves it."""
    is_reduced = op_name(value) in having("reduction") and isinstance(node.meta.get("val"), tuple | list)
    return is_reduced and not str(node.target).startswith(("aten.var_mean", "aten.std_mean"))


_EVAL = "call module.eval() before it is frozen"


@dataclass(frozen=True)
class FrozenCall(Staged):
    """A forward with its module's tensors frozen.

    Attributes:
        stages: in order; index by name. The last two are ``"constants"`` and ``"call"``.
        split: the two functions.
    """

    stages: tuple[Stage, ...]
    split: inference.Frozen

    @property
    def constants(self) -> Function:
        """The module's tensors → the constants of :attr:`call`."""
        return self.split.constants

    @property
    def call(self) -> Function:
        """Numbers, argument tensors, then constants → the results of the forward."""
        return self.split.call

    @property
    def weights(self) -> tuple[int, ...]:
        """Indices of constants that are computed factors of products."""
        return self.split.weights

    def __str__(self) -> str:
        return "\n".join(stage.provenance for stage in self.stages)


def freeze_call(lowered: LoweredCall) -> FrozenCall:
    """Freezes the module's tensors in the forward of a call that was lowered without gradients.

    Raises:
        UnsupportedModule: the call changes a frozen tensor, draws random numbers, or gradients are wanted.
        CompilationError: a pass failed; a bug of this package.
    """
    _refuse(lowered)
    frozen = len(lowered.captured.module_tensors)
    last = lowered["forward"]
    stages: list[Stage] = []
    body = autodiff.Body.of(last.function)
    split = None
    try:
        for apply in _passes(lowered):
            name = apply.__name__
            last = stage_after(last, name.replace("_", " "), f"autodiff.inference.{name}", body, apply, frozen)
            stages.append(last)
            raise_deferred()
        watch = Stopwatch()
        split = inference.split_static(autodiff.clean(last.function), frozen)
    except Exception as error:
        raise CompilationError("freeze", last.function.script(), error) from error
    made_by = "autodiff.inference.split_static"
    stages.append(Stage("constants", made_by, split.constants, watch.seconds, last.size))
    stages.append(Stage("call", made_by, split.call, 0.0, last.size))
    return FrozenCall(tuple(stages), split)


def _passes(lowered: LoweredCall) -> Iterator[Callable[[autodiff.Body, int], None]]:
    """The inference passes for the device of a call, in order."""
    if lowered.captured.device == HOST or not products_are_tf32():
        yield spell_attention
    yield from inference.PASSES


def _refuse(lowered: LoweredCall) -> None:
    captured = lowered.captured
    where = f"{captured.module_name}.forward"
    problems = [
        Unsupported(captured.written_name(index), where, "a call changes it, frozen", _EVAL)
        for index, _ in captured.mutated
    ]
    if captured.draws:
        problems.append(Unsupported("random draws (dropout)", where, "frozen modules are for evaluation", _EVAL))
    if lowered.differentiable:
        problems.append(Unsupported("gradients", where, "frozen modules have none", "freeze it under torch.no_grad()"))
    if problems:
        raise UnsupportedModule(captured.module_name, problems)
