"""Linking: a loop graph → groups, kernels, slots, lifetimes, instructions: a program."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from tvm.tirx import PrimFunc

from autodiff.extents import Dim, Extent, ExtentScope, below, same, same_shape, sample_of
from autodiff.ir import itemsize
from bridge.base.log import Stopwatch
from bridge.base.threads import raise_deferred
from bridge.compile.backend import Backend, Built
from bridge.compile.loop_ir.graph import (
    Graph,
    KernelCall,
    LibraryCall,
    LoopCall,
    Operand,
    Positions,
    Product,
    Reduction,
    Value,
    whole,
)
from bridge.compile.loop_ir.operations import PackPlan
from bridge.compile.loop_ir.views import dense
from bridge.compile.runtime.cut import brought_forward
from bridge.compile.runtime.instructions import CallLibrary, Launch, MakeView, contents
from bridge.compile.runtime.layout import Register, RegisterLayout, lying_below, plan_arena
from bridge.compile.runtime.loop import scratch_bytes
from bridge.compile.runtime.loop_frame import Instruction, RunLoop
from bridge.compile.runtime.program import Program
from bridge.compile.schedule.fuse import Group, fuse
from bridge.compile.schedule.horizontal_fusion import plan_horizontal_fusion, together
from bridge.compile.schedule.plan_rows import Planned, plan_rows
from bridge.compile.schedule.products import plan_columns

__all__ = ["assemble", "guard_indices", "kernel_of", "one"]

Kernel = Planned[PrimFunc]


def guard_indices(reached: Iterable[Dim]) -> None:
    """Guards that tensors of ``reached`` elements fit 32-bit indices; only the largest ones need a guard."""
    guarded: list[Extent] = []
    for count in sorted((count for count in reached if isinstance(count, Extent)), key=sample_of, reverse=True):
        if any(below(count - larger, 1) for larger in guarded):
            continue
        guarded.append(count)
        if count >= 2**31:
            raise AssertionError(f"a tensor of {count} elements is read with a short index")


def one(step: Sequence[Group]) -> Group:
    """The groups of a launch, as one group with all their nodes."""
    if len(step) == 1:
        return step[0]
    made = {value: node for group in step for value, node in group.made.items()}
    return Group(step[0].index, [node for group in step for node in group.nodes], 0, made=made, fusable=False)


def kernel_of(
    step: Sequence[Group], stored: set[Value], backend: Backend, generate: Callable, reached: dict[Dim, None]
) -> Kernel | LibraryCall | None:
    """The kernel of a launch's groups; ``None`` if all of its results are empty.

    ``generate``: plan → kernel, the same for equal plans. ``reached`` collects the numbers of elements of tensors with
    32-bit indices.
    """
    group, node = step[0], step[0].nodes[0]
    if all(same(value.numel, 0) for value in group.made):
        return None
    if isinstance(node, LibraryCall):
        return node
    if isinstance(node, Product):
        values = tuple(operand.value for operand in node.operands)
        return Kernel(generate(node.plan), values, node.outs, (), node.plan.descriptor(), ("matmul",))
    if isinstance(node, KernelCall):
        values = tuple(operand.value for operand in node.operands)
        return Kernel(node.kernel, values, node.outs, (), node.scalars, (node.op,))
    if len(step) > 1:
        planned = plan_horizontal_fusion(step, stored, backend)
    elif isinstance(node, Reduction) and not group.fusable:
        planned = plan_columns(node, backend)
    else:
        planned = plan_rows(group, stored, backend)
    if planned.plan.index_type == "int32":
        reached.update(dict.fromkeys(value.numel for value in (*planned.inputs, *planned.outputs)))
    return replace(planned, plan=generate(planned.plan))


_ALWAYS = 1 << 62
"""The last step of a value that is alive throughout."""


def assemble(
    graph: Graph,
    name: str,
    backend: Backend,
    timings: dict[str, float],
    variables: tuple[str, ...] = (),
    scope: ExtentScope | None = None,
    bodies: Mapping[str, Program] | None = None,
) -> Program:
    """Fuses, generates, builds and plans a graph for a backend. Adds the seconds of each stage to ``timings``.

    ``variables``: names of the Relax function's parameters and bindings; ``scope``: of its symbolic extents;
    ``bodies``: text → program of a loop's body.
    """
    clock = _Clock(timings)
    groups = fuse(graph, backend)
    clock.stop("fuse")
    stored = _stored(graph, groups)
    groups = [group for group in groups if any(value in stored for value in group.made)]
    generate = functools.cache(backend.kernel)
    reached: dict[Dim, None] = {}
    steps = together(groups, backend)
    kernels = [kernel_of(step, stored, backend, generate, reached) for step in steps]
    guard_indices(reached)
    clock.stop("generate")
    linker = _Linker(graph, [one(step) for step in steps], kernels, name, bodies or {}, generate)
    built = backend.build(list(linker.functions.items()))
    program = linker.finish(built, timings, backend, variables, scope)
    clock.stop("plan")
    return program


class _Clock:
    def __init__(self, timings: dict[str, float]) -> None:
        self.timings = timings
        self.watch = Stopwatch()

    def stop(self, stage: str) -> None:
        self.timings[stage] = self.watch.seconds
        raise_deferred()
        self.watch = Stopwatch()


def _stored(graph: Graph, groups: list[Group]) -> set[Value]:
    """Values that are results or that another group reads, ignoring dead groups."""
    stored = {operand.value for operand in graph.results}
    for group in reversed(groups):
        if any(value in stored for value in group.made):
            stored.update(operand.value for _, operand in group.reads())
    return stored


class _Slots:
    """Slots of values and of their views, by first use; ``steps``: the list of the steps so far.

    Attributes:
        numbers: (value, view) → slot; ``label``: slot → its name, for display.
        lifetimes: first and last step of each intermediate.
        results: the values that are results; ``allocated``: values in memory that a library call allocates.
    """

    def __init__(self, graph: Graph, kernels: Iterable[Kernel | LibraryCall | None], steps: list[Instruction]):
        self.numbers: dict[tuple, int] = {}
        self._counts: Counter[str] = Counter()
        self._steps = steps
        self.label: dict[int, str] = {}
        self.lifetimes: dict[Value, tuple[int, int]] = {}
        self.results = dict.fromkeys(op.value for op in graph.results if op.value.source == "node")
        self.allocated = dict.fromkeys(
            out for node in kernels if isinstance(node, LibraryCall) and node.allocates for out in node.outs
        )

    def of(self, value: Value) -> int:
        """The slot of a value, alive until the next step."""
        if value.source == "index":
            raise AssertionError(f"{value.name} lies nowhere, and something that is no generated kernel reads it")
        key = (value, None)
        if key not in self.numbers:
            self.new(key, value.name)
        if value.source == "node" and value not in self.results and value not in self.allocated:
            now = len(self._steps)
            first, _ = self.lifetimes.get(value, (now, now))
            self.lifetimes[value] = (first, now)
        return self.numbers[key]

    def new(self, key: tuple, name: str) -> int:
        slot = self.numbers[key] = len(self.numbers)
        self._counts[name] += 1
        self.label[slot] = name if self._counts[name] == 1 else f"{name}_{self._counts[name]}"
        return slot

    def names(self, slots: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(self.label[slot] for slot in slots)

    def name(self, value: Value) -> str:
        if value.source == "index":
            return value.name
        return self.label[self.numbers[value, None]]


class _Linker:
    """Assigns slots and builds the steps of a program."""

    def __init__(
        self,
        graph: Graph,
        groups: list[Group],
        kernels: list[Kernel | LibraryCall | None],
        name: str,
        bodies: Mapping[str, Program],
        pack: Callable[[PackPlan], PrimFunc],
    ) -> None:
        self.graph = graph
        self.pack = pack
        self.packed: dict[tuple, int] = {}
        self.constants = dict(graph.constants)
        self.bodies = bodies
        self.name = name
        self.steps: list[Instruction] = []
        self.slots = _Slots(graph, kernels, self.steps)
        self.functions: dict[str, PrimFunc] = {}
        self.kernel_names: dict[PrimFunc, str] = {}
        self.static_views: list[MakeView] = []
        for value in graph.params:
            self.slots.of(value)
        for group, kernel in zip(groups, kernels, strict=True):
            if kernel is None:
                for out in group.made:
                    self.slots.of(out)
            elif isinstance(kernel, LoopCall):
                self._loop(kernel, bodies[kernel.scan.body])
            elif isinstance(kernel, LibraryCall):
                self._library(kernel)
            elif isinstance(group.nodes[0], Product):
                self._product(group.nodes[0], kernel)
            else:
                self._kernel(group, kernel)
        count = len(self.steps)
        self.returned = [self.operand(op) for op in graph.results]
        self.steps, places = brought_forward(self.steps, count)
        for value, (begin, end) in self.slots.lifetimes.items():  # packed factors last beyond the steps
            self.slots.lifetimes[value] = places[begin], places.get(end, end)

    def operand(self, operand: Operand) -> int:
        """The slot of a value under a view; a view of a tensor that changes between calls becomes a step."""
        value, view = operand.value, operand.view
        base = self.slots.of(value)
        known = dense(value.shape)
        if same_shape(view.shape, known.shape) and same_shape(view.strides, known.strides) and same(view.offset, 0):
            return base
        key = (value, view)
        if key not in self.slots.numbers:
            slot = self.slots.new(key, value.name + "_view")
            names = (self.slots.label[base],), (self.slots.label[slot],)
            made = MakeView("as_strided", *names, (base,), (slot,), view.shape, view.strides, view.offset)
            constant = value in self.slots.lifetimes or value.source == "constant"
            (self.static_views if constant else self.steps).append(made)
        return self.slots.numbers[key]

    def _library(self, node: LibraryCall) -> None:
        # Views first: they may be steps of their own. Then all slots again, so that all lifetimes reach this step.
        for operand in node.operands:
            self.operand(operand)
        arguments = tuple(self.operand(operand) for operand in node.operands)
        results = tuple(self.slots.of(out) for out in node.outs)
        inside = contents([node], node.outs, self.slots.name)
        names = self.slots.names(arguments), self.slots.names(results)
        self.steps.append(CallLibrary(node.name, *names, arguments, results, node.attrs, node.allocates, inside))

    def _loop(self, node: LoopCall, body: Program) -> None:
        """Adds a loop: renames its body's kernels, and adds the body's constants to the program's."""
        prefix = f"loop{sum(isinstance(step, RunLoop) for step in self.steps)}_"
        self.functions.update({f"{prefix}{name}": function for name, function in body.kernels.items()})
        steps = [_under(prefix, step) for step in body.steps]
        constants = [
            Value(f"{prefix}const", tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), "constant")
            for _, tensor in body.constants
        ]
        self.constants.update(zip(constants, (tensor for _, tensor in body.constants), strict=True))
        scan = node.scan
        memory = Value(f"{prefix}memory", (scratch_bytes(body.layout, scan.carries),), "uint8")
        operands = [*node.operands, *map(whole, constants)]
        for operand in operands:
            self.operand(operand)
        reads = tuple(map(self.operand, operands))
        outs = tuple(map(self.slots.of, node.outs))
        inside = replace(
            contents([node], node.outs, self.slots.name),
            flops=sample_of(scan.length) * sum(step.contents.flops for step in steps if not isinstance(step, MakeView)),
            bytes=sample_of(scan.length) * sum(step.contents.bytes for step in steps if not isinstance(step, MakeView)),
        )
        self.steps.append(
            RunLoop(
                node.name,
                self.slots.names(reads),
                self.slots.names(outs),
                reads,
                (*outs, self.slots.of(memory)),
                tuple(steps),
                body.layout,
                scan.carries,
                scan.xs,
                scan.length,
                scan.reverse,
                tuple(slot for slot, _ in body.constants),
                inside,
            )
        )

    def _product(self, node: Product, kernel: Kernel) -> None:
        arguments = tuple(map(self.slots.of, kernel.inputs))
        result = self.slots.of(node.out)
        name = f"product_{node.plan.element_type}"
        if node.plan.packing is not None:
            name = f"packed_{name}"
            arguments = arguments[0], self._packed(node, arguments[1], kernel.scalars)
        self.functions[name] = kernel.plan
        inside = contents([node], node.outs, self.slots.name)
        size = itemsize(node.plan.element_type)
        a_offset, b_offset = node.plan.offsets
        offsets = (a_offset * size, 0 if node.plan.packing else b_offset * size, 0)
        names = self.slots.names(arguments), self.slots.names((result,))
        self.steps.append(Launch(name, *names, kernel.ops, arguments, (result,), kernel.scalars, offsets, inside))

    def _packed(self, node: Product, b: int, scalars: tuple[Dim, ...]) -> int:
        """The slot of a product's packed operand, shared by products with the same access to it."""
        plan, label = node.plan, self.slots.label[b]
        key = b, plan.geometry.b, plan.geometry.b_offset, plan.geometry.extents[3:]
        if key not in self.packed:
            source = "constant" if plan.packing.bound else "node"
            packed = Value(f"{label}_packed", (plan.packing.elements,), plan.element_type, source)
            self.packed[key] = slot = self.slots.of(packed)
            if source == "node":
                self.slots.lifetimes[packed] = 0, _ALWAYS
            self.functions[name := f"pack_{plan.element_type}"] = self.pack(PackPlan(plan.element_type))
            offsets = plan.geometry.b_offset * itemsize(plan.element_type), 0
            names = (label,), (packed.name,)
            self.steps.append(Launch(name, *names, ("pack",), (b,), (slot,), scalars, offsets, once=True))
        return self.packed[key]

    def _kernel(self, group: Group, kernel: Kernel) -> None:
        operands = group.nodes[0].operands if isinstance(group.nodes[0], KernelCall) else ()
        for operand in operands:
            self.operand(operand)
        arguments = tuple(self.operand(op) for op in operands) or tuple(self.slots.of(v) for v in kernel.inputs)
        results = tuple(self.slots.of(value) for value in (*kernel.outputs, *kernel.scratch))
        name = self.kernel_names.setdefault(kernel.plan, self._kernel_name(kernel))
        self.functions[name] = kernel.plan
        names = self.slots.names(arguments), self.slots.names(results[: len(kernel.outputs)] or results)
        inside = contents(group.nodes, kernel.outputs, self.slots.name)
        self.steps.append(Launch(name, *names, kernel.ops, arguments, results, kernel.scalars, contents=inside))

    def _kernel_name(self, kernel: Kernel) -> str:
        words = list(dict.fromkeys(op.removeprefix("relax.").replace(".", "_") for op in kernel.ops))
        return f"k{len(self.functions)}_" + "_".join(words)[:60]

    def finish(
        self,
        built: list[Built],
        timings: dict[str, float],
        backend: Backend,
        variables: tuple[str, ...],
        scope: ExtentScope | None,
    ) -> Program:
        """The linked program; ``built``: its kernels' machine code."""
        constants = tuple((self.slots.of(value), constant) for value, constant in self.constants.items())
        laid_out = [
            value for value, _ in self.slots.numbers if value.source == "constant" and value not in self.constants
        ]
        arena = plan_arena(self.slots.lifetimes)
        placed, below = list(self.slots.lifetimes), ()
        if scope is not None:
            placed.sort(key=arena.offsets.__getitem__)
            below = lying_below([self.slots.lifetimes[value] for value in placed])
        layout = RegisterLayout(
            size=len(self.slots.numbers),
            params=tuple(map(self._register, self.graph.params)),
            arena=tuple(self._register(value, arena.offsets[value]) for value in placed),
            arena_bytes=arena.size,
            fresh=tuple(self._register(value) for value in self.slots.results if value not in self.slots.allocated),
            views=tuple(self.static_views),
            results=tuple(self.returned),
            memory=tuple(self.slots.of(operand.value) for operand in self.graph.results),
            below=below,
            allocated=tuple(self._register(value) for value in self.slots.allocated),
            laid_out=tuple(map(self._register, laid_out)),
        )
        return Program(
            name=self.name,
            steps=tuple(self.steps),
            layout=layout,
            constants=tuple((slot, constant) for slot, constant in constants if not isinstance(constant, Positions)),
            kernels=self.functions,
            backend=backend,
            results=tuple(self.slots.name(op.value) for op in self.graph.results),
            variables=variables,
            code=dict(zip(self.functions, built, strict=True)),
            stage_seconds=timings,
            positions=tuple((slot, constant) for slot, constant in constants if isinstance(constant, Positions)),
            scope=scope,
        )

    def _register(self, value: Value, offset: int = 0) -> Register:
        return Register(self.slots.numbers[value, None], value.name, value.shape, value.dtype, offset, value.order)


def _under(prefix: str, step: Instruction) -> Instruction:
    if isinstance(step, Launch):
        return replace(step, name=f"{prefix}{step.name}")
    if isinstance(step, RunLoop):
        return replace(step, steps=tuple(_under(prefix, each) for each in step.steps))
    return step
