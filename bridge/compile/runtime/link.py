"""Linking: a loop graph → groups, kernels, slots, lifetimes, bound steps: a program."""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from collections.abc import Callable
from operator import itemgetter

import torch
from tvm.tirx import PrimFunc

from autodiff.ir import itemsize
from bridge.base.interrupts import raise_deferred
from bridge.compile.backend import Backend
from bridge.compile.codegen.kernel import Kernel
from bridge.compile.loop_ir.graph import Fallback, Graph, LibraryCall, Operand, Product, Reduction, Value
from bridge.compile.loop_ir.views import dense
from bridge.compile.runtime.arena import plan_arena
from bridge.compile.runtime.contents import contents
from bridge.compile.runtime.program import Action, KernelStep, Layout, LibraryStep, Program, Step, ViewStep
from bridge.compile.schedule.fuse import Group, fuse
from bridge.compile.schedule.row_plan import plan_rows
from bridge.library import FUNCTIONS, OUT_KERNELS, invoke

__all__ = ["assemble"]


def assemble(graph: Graph, name: str, backend: Backend, timings: dict[str, float]) -> Program:
    """Group, generate, build and plan for a backend. ``timings`` is extended by the seconds of each stage."""
    clock = _Clock(timings)
    groups = fuse(graph)
    clock.stop("fuse")
    stored = _stored(graph, groups)
    groups = [group for group in groups if any(value in stored for value in group.made)]
    kernels = [_kernel(group, stored, backend) for group in groups]
    clock.stop("generate")
    linker = _Linker(graph, groups, kernels, name)
    built = backend.build(list(linker.functions.items()))
    clock.stop("build")
    program = linker.finish([kernel.function for kernel in built], timings, backend)
    program.code = tuple(built)
    clock.stop("plan")
    return program


class _Clock:
    def __init__(self, timings: dict[str, float]) -> None:
        self.timings = timings
        self.started = time.perf_counter()

    def stop(self, stage: str) -> None:
        now = time.perf_counter()
        self.timings[stage] = now - self.started
        raise_deferred()
        self.started = now


def _stored(graph: Graph, groups: list[Group]) -> set[Value]:
    """Values that are results or cross from one step to another; dead groups count for nothing."""
    stored = {operand.value for operand in graph.results}
    for group in reversed(groups):
        if any(value in stored for value in group.made):
            stored.update(operand.value for _, operand in group.reads())
    return stored


def _kernel(group: Group, stored: set[Value], backend: Backend) -> Kernel | LibraryCall | Product | None:
    """How a group is computed; ``None`` if all it makes are tensors without elements."""
    node = group.nodes[0]
    if all(value.numel == 0 for value in group.made):
        return None
    if isinstance(node, LibraryCall | Product):
        return node
    if isinstance(node, Fallback):
        return Kernel(node.kernel, tuple(op.value for op in node.operands), node.outs, (), (node.op,))
    if isinstance(node, Reduction) and not group.fusable:
        return backend.kernel(node)
    return backend.kernel(plan_rows(group, stored))


class _Linker:
    """Slots and steps under construction."""

    def __init__(
        self, graph: Graph, groups: list[Group], kernels: list[Kernel | LibraryCall | None], name: str
    ) -> None:
        self.graph = graph
        self.name = name
        self.slots: dict[tuple, int] = {}
        self.names: Counter[str] = Counter()
        self.label: dict[int, str] = {}
        self.lifetimes: dict[Value, tuple[int, int]] = {}
        self.steps: list[Step] = []
        self.calls: list[tuple] = []  # ((kernel name, scalars) or node, slots of arguments, slots of results)
        self.functions: dict[str, PrimFunc] = {}
        self.static_views: list[tuple] = []
        # What a product is added onto lives where the sum will: in the slot of the last sum of the chain.
        self.merged: dict[Value, Value] = {}
        for node in reversed(graph.nodes):
            if isinstance(node, Product) and node.onto is not None:
                self.merged[node.onto] = self.merged.get(node.out, node.out)
        self.results = {op.value for op in graph.results if op.value.source == "node"}
        self.allocated = {
            out for node in kernels if isinstance(node, LibraryCall) and node.allocates for out in node.outs
        }
        for value in graph.params:
            self.slot(value)
        for group, kernel in zip(groups, kernels, strict=True):
            if kernel is None:
                for out in group.made:
                    self.slot(out)
            elif isinstance(kernel, LibraryCall):
                self._library(kernel)
            elif isinstance(kernel, Product):
                self._product(kernel)
            else:
                self._kernel(group, kernel)
        self.returned = [self.operand(op) for op in graph.results]

    def slot(self, value: Value) -> int:
        value = self.merged.get(value, value)
        key = (value, None)
        if key not in self.slots:
            self._new_slot(key, value.name)
        if value.source == "node" and value not in self.results and value not in self.allocated:
            now = len(self.calls)
            first, _ = self.lifetimes.get(value, (now, now))
            self.lifetimes[value] = (first, now)
        return self.slots[key]

    def _new_slot(self, key: tuple, name: str) -> int:
        slot = self.slots[key] = len(self.slots)
        self.names[name] += 1
        self.label[slot] = name if self.names[name] == 1 else f"{name}_{self.names[name]}"
        return slot

    def operand(self, operand: Operand) -> int:
        """The slot of a value under a view; views of what changes from call to call become steps."""
        value, view = operand.value, operand.view
        base = self.slot(value)
        if view == dense(value.shape):
            return base
        key = (value, view)
        if key not in self.slots:
            slot = self._new_slot(key, value.name + "_view")
            geometry = (view.shape, view.strides, view.offset)
            if value in self.lifetimes or value.source == "constant":
                self.static_views.append((slot, base, *geometry))
            else:
                step = ViewStep("as_strided", (self.label[base],), (self.label[slot],), *geometry)
                self._step(step, step, (base,), (slot,))
        return self.slots[key]

    def _step(self, step: Step, what: object, arguments: tuple[int, ...], results: tuple[int, ...]) -> None:
        self.steps.append(step)
        self.calls.append((what, arguments, results))

    def _names(self, slots: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(self.label[slot] for slot in slots)

    def _name(self, value: Value) -> str:
        return self.label[self.slots[self.merged.get(value, value), None]]

    def _library(self, node: LibraryCall) -> None:
        # Views first: they may be steps of their own. Then all slots again, so that everything is alive now.
        for operand in node.operands:
            self.operand(operand)
        arguments = tuple(self.operand(operand) for operand in node.operands)
        results = tuple(self.slot(out) for out in node.outs)
        inside = contents([node], node.outs, self._name)
        self._step(
            LibraryStep(node.name, self._names(arguments), self._names(results), inside), node, arguments, results
        )

    def _product(self, node: Product) -> None:
        arguments = tuple(self.slot(operand.value) for operand in node.operands[:2])
        result = self.slot(node.out)
        name = f"product_{node.out.dtype}"
        self.functions[name] = node.kernel
        ops = ("matmul",) if node.onto is None else ("matmul", "add")
        inside = contents([node], node.outs, self._name)
        step = KernelStep(name, self._names(arguments), self._names((result,)), ops, inside)
        self._step(step, node, arguments, (result,))

    def _kernel(self, group: Group, kernel: Kernel) -> None:
        fallback = isinstance(group.nodes[0], Fallback)
        operands = group.nodes[0].operands if fallback else ()
        for operand in operands:
            self.operand(operand)
        arguments = tuple(self.operand(op) for op in operands) or tuple(self.slot(v) for v in kernel.inputs)
        results = tuple(self.slot(value) for value in (*kernel.outputs, *kernel.scratch))
        name = self._kernel_name(kernel)
        self.functions[name] = kernel.func
        outputs = self._names(results[: len(kernel.outputs)])
        inside = contents(group.nodes, kernel.outputs, self._name)
        step = KernelStep(name, self._names(arguments), outputs, kernel.ops, inside)
        self._step(step, (name, kernel.scalars), arguments, results)

    def _kernel_name(self, kernel: Kernel) -> str:
        words = list(dict.fromkeys(op.removeprefix("relax.").replace(".", "_") for op in kernel.ops))
        return f"k{len(self.functions)}_" + "_".join(words)[:60]

    def _last_uses(self, persistent: set[int]) -> list[tuple[int, ...]]:
        """After each step, the slots that no later step reads and that are not persistent, filled for every call."""
        needed = persistent | set(self.returned)
        last_uses = []
        for _, arguments, results in reversed(self.calls):
            last = {*arguments, *results} - needed
            needed |= last
            last_uses.append(tuple(sorted(last)))
        return last_uses[::-1]

    def finish(self, functions: list, timings: dict[str, float], backend: Backend) -> Program:
        by_name = dict(zip(self.functions, functions, strict=True))
        constants = tuple((self.slot(value), tensor) for value, tensor in self.graph.constants.items())
        arena = plan_arena(self.lifetimes)
        arena_slots = tuple((self.slots[value, None], value) for value in self.lifetimes)
        fresh = tuple(
            (self.slots[value, None], value.shape, getattr(torch, value.dtype))
            for value in self.results
            if value not in self.allocated
        )
        persistent = {slot for slot, *_ in (*constants, *arena_slots, *self.static_views)}
        layout = Layout(
            len(self.slots),
            tuple(self.graph.params),
            constants,
            arena,
            arena_slots,
            tuple(self.static_views),
            fresh,
            tuple(self.returned),
            tuple(self.slot(operand.value) for operand in self.graph.results),
        )
        actions = tuple(zip((_action(by_name, *call) for call in self.calls), self._last_uses(persistent), strict=True))
        results = tuple(self._name(op.value) for op in self.graph.results)
        return Program(self.name, tuple(self.steps), timings, actions, layout, self.functions, backend, results)


def _action(functions: dict, what: object, arguments: tuple[int, ...], results: tuple[int, ...]) -> Action:
    """A step as a function of the registers, everything else bound."""
    if isinstance(what, ViewStep):
        (base,), (slot,) = arguments, results
        shape, strides, offset = what.shape, what.strides, what.offset

        def make_view(registers: list) -> None:
            tensor = registers[base]
            registers[slot] = tensor.as_strided(shape, strides, tensor.storage_offset() + offset)

        return make_view
    if isinstance(what, LibraryCall):
        return _library_action(what, arguments, results)
    if isinstance(what, Product):
        return _product_action(functions[f"product_{what.out.dtype}"], what, (*arguments, *results))
    name, scalars = what
    kernel = functions[name]
    pick = itemgetter(*arguments, *results)
    if scalars:
        return _launch(kernel, scalars, (*arguments, *results))
    if len(arguments) + len(results) == 1:
        return lambda registers: kernel(pick(registers))
    return lambda registers: kernel(*pick(registers))


def _launch(kernel: Callable, scalars: tuple[int, ...], slots: tuple[int, ...]) -> Action:
    """A kernel that reads ``scalars`` from a descriptor."""
    descriptor = torch.tensor(scalars, dtype=torch.int64)
    where = ctypes.c_void_p(descriptor.data_ptr())

    def run(registers: list, _alive: torch.Tensor = descriptor) -> None:
        kernel(*[registers[slot] for slot in slots], where)

    return run


def _library_action(node: LibraryCall, arguments: tuple[int, ...], results: tuple[int, ...]) -> Action:
    attrs = node.attrs
    if not node.allocates:
        write = OUT_KERNELS[node.name]
        return lambda registers: write(
            [registers[slot] for slot in results], [registers[slot] for slot in arguments], *attrs
        )
    function = FUNCTIONS[node.name]
    values = [list(value) if isinstance(value, tuple) else value for value in attrs]  # torch's lists of integers

    def allocate(registers: list) -> None:
        made = invoke(function, values, [registers[slot] for slot in arguments])
        for slot, tensor in zip(results, made, strict=True):
            registers[slot] = tensor

    return allocate


def _product_action(multiply: Callable, node: Product, slots: tuple[int, ...]) -> Action:
    """The kernel takes addresses: the geometry of views is in the descriptor, so none of them is made at a call."""
    descriptor = torch.tensor(node.descriptor, dtype=torch.int64)
    where = ctypes.c_void_p(descriptor.data_ptr())
    a, b, c = slots
    a_bytes, b_bytes = (offset * itemsize(node.out.dtype) for offset in node.offsets)
    address = ctypes.c_void_p

    def run(registers: list, _alive: torch.Tensor = descriptor) -> None:
        multiply(
            address(registers[a].data_ptr() + a_bytes),
            address(registers[b].data_ptr() + b_bytes),
            address(registers[c].data_ptr()),
            where,
        )

    return run
