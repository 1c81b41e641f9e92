"""Executor: a program bound to callables: ``executor(inputs) -> results``.

A run works on *registers*: a list with a slot for every tensor of the instructions. A run takes a block of the
process's arena pool (:mod:`bridge.compile.runtime.layout`) and finds, or makes once, its registers there: slots of
intermediates hold tensors in that block, slots of constants the constants. Slots of inputs, results and their views are
filled during a call and emptied after it. The registers belong to the block, so concurrent and re-entrant calls never
share them. Results are never in the block.

Binding: an instruction → a function of the registers, with all lookups done in advance.
Constants: a program and tensors for its last parameters → the program of the other parameters.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import add

import torch
from torch import is_grad_enabled
from torch.autograd import profiler

from autodiff.lazy import cached_property
from bridge.base.pytrees import picker
from bridge.base.torch_internals import VF, empty_strided, tensor_at
from bridge.compile.loop_ir.views import dense_strides
from bridge.compile.runtime.instructions import Allocate, CallLibrary, Launch, MakeView
from bridge.compile.runtime.layout import ARENAS, ArenaPool, InputForms, PoolBlock, PoolUser
from bridge.compile.runtime.loop import loop_action
from bridge.compile.runtime.loop_frame import Drive, Instruction, LoopFrames, RunLoop, is_framed
from bridge.compile.runtime.program import Program
from bridge.library import FUNCTIONS, OUT_FUNCTIONS, OUT_KERNELS, dense, invoke

__all__ = ["Action", "Actions", "Arrays", "Executor", "bind", "bind_all", "last_uses", "with_constants"]

Action = Callable[[list], None]
"""An instruction as a function of the registers."""

_ADDRESS = torch.Tensor.data_ptr

Arrays = dict[tuple[int, ...], tuple[array, ctypes.c_void_p]]
"""Integers → an int64 array with them, and their address."""


def bind(
    instruction: Instruction,
    functions: Mapping[str, Callable],
    arrays: Arrays,
    drive: Drive | None = None,
    empty: Callable[..., torch.Tensor] = empty_strided,
) -> Action:
    """The action of an instruction.

    ``functions``: the program's kernels by name; ``arrays``: integers of launches, shared by equal launches; ``drive``:
    runs the steps of loops; ``empty``: shape, strides, element type → memory. ``KeyError`` for a kernel that is in
    neither ``functions`` nor :mod:`bridge.library`.
    """
    match instruction:
        case MakeView():
            return _view(instruction)
        case Allocate(writes=(slot,), shape=shape, dtype=dtype):
            return partial(_fill, slot, empty, shape, dense_strides(shape), dtype)
        case CallLibrary():
            return _library(instruction)
        case RunLoop():
            actions = [bind(step, functions, arrays, drive) for step in instruction.steps]
            views = [bind(view, {}, {}) for view in instruction.layout.views]
            return loop_action(instruction, actions, views, _frames(instruction, functions, arrays, drive))
        case Launch(offsets=None):
            return _launch(instruction, functions[instruction.name], arrays)
        case Launch():
            return _launch_at_addresses(instruction, functions[instruction.name], arrays)


def _frames(loop: RunLoop, functions: Mapping[str, Callable], arrays: Arrays, drive: Drive | None) -> LoopFrames | None:
    """The frames by which a driver runs a loop; ``None`` without a driver, or if its steps are not launches alone."""
    launches = [step for step in loop.steps if isinstance(step, Launch) and not step.once]
    found = [(launch, functions[launch.name]) for launch in launches]
    if drive is None or not is_framed(found) or any(not isinstance(step, (Launch, MakeView)) for step in loop.steps):
        return None
    integers = [_array(launch.scalars, arrays)[1].value if launch.scalars else None for launch in launches]
    return LoopFrames([(*each, number) for each, number in zip(found, integers, strict=True)], drive)


def last_uses(instructions: Sequence[Instruction], kept: Collection[int]) -> list[tuple[int, ...]]:
    """After each instruction, the slots that it is the last to use, except ``kept`` ones."""
    needed = set(kept)
    uses = []
    for instruction in reversed(instructions):
        last = {*instruction.reads, *instruction.writes} - needed
        needed |= last
        uses.append(tuple(sorted(last)))
    return uses[::-1]


# Actions bind their data as arguments: a closure would add a garbage-collected object for each captured variable, times
# sizes times steps.


def _view(view: MakeView) -> Action:
    (base,), (slot,) = view.reads, view.writes
    return partial(_make_view, base, slot, view.shape, view.strides, view.offset)


def _make_view(
    base: int, slot: int, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, registers: list
) -> None:
    registers[slot] = tensor_at(registers[base], shape, strides, offset)


def _fill(
    slot: int,
    empty: Callable[..., torch.Tensor],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    registers: list,
) -> None:
    registers[slot] = empty(shape, strides, dtype)


def _library(call: CallLibrary) -> Action:
    reads, writes, attrs = call.reads, call.writes, call.attrs
    if call.name in OUT_FUNCTIONS:
        return partial(_write_into, OUT_FUNCTIONS[call.name], picker(reads), writes[0])
    if not call.allocates:
        return partial(_write, OUT_KERNELS[call.name], picker(writes), picker(reads), attrs)
    values = [list(value) if isinstance(value, tuple) else value for value in attrs]  # torch's lists of integers
    return partial(_allocate, FUNCTIONS[call.name], values, reads, writes)


def _write_into(function: Callable, args: Callable, out: int, registers: list) -> None:
    function(*args(registers), out=registers[out])


def _write(write: Callable, outs: Callable, args: Callable, attrs: tuple, registers: list) -> None:
    write(outs(registers), args(registers), *attrs)


def _allocate(
    function: Callable, values: list, reads: tuple[int, ...], writes: tuple[int, ...], registers: list
) -> None:
    made = invoke(function, values, [registers[slot] for slot in reads])
    for slot, tensor in zip(writes, made, strict=True):
        registers[slot] = tensor


def _launch(launch: Launch, kernel: Callable, arrays: Arrays) -> Action:
    slots = (*launch.reads, *launch.writes)
    if launch.scalars:
        return partial(_run_with_scalars, kernel, picker(slots), *_array(launch.scalars, arrays))
    return partial(_run, kernel, picker(slots))


def _run(kernel: Callable, pick: Callable[[list], Sequence], registers: list) -> None:
    kernel(*pick(registers))


def _run_with_scalars(
    kernel: Callable, pick: Callable[[list], Sequence], _alive: array, where: ctypes.c_void_p, registers: list
) -> None:
    kernel(*pick(registers), where)


def _launch_at_addresses(launch: Launch, kernel: Callable, arrays: Arrays) -> Action:
    """Binds a launch by addresses: its scalars contain the geometry of views, so a call makes no view."""
    pick = picker((*launch.reads, *launch.writes))
    return partial(_run_at_addresses, kernel, pick, launch.offsets, *_array(launch.scalars, arrays))


def _run_at_addresses(
    kernel: Callable,
    pick: Callable[[list], Sequence],
    behind: tuple[int, ...],
    _alive: array,
    where: ctypes.c_void_p,
    registers: list,
) -> None:
    kernel(*map(ctypes.c_void_p, map(add, map(_ADDRESS, pick(registers)), behind)), where)


def _array(scalars: tuple[int, ...], arrays: Arrays) -> tuple[array, ctypes.c_void_p]:
    if scalars not in arrays:
        arrays.update(_arrays([scalars]))
    return arrays[scalars]


def _arrays(integers: Iterable[tuple[int, ...]]) -> Arrays:
    """All integers in one array."""
    flat = array("q")
    begins = {}
    for each in integers:
        if each not in begins:
            begins[each] = len(flat)
            flat.extend(each)
    first = flat.buffer_info()[0]
    return {each: (flat, ctypes.c_void_p(first + flat.itemsize * begin)) for each, begin in begins.items()}


Actions = Sequence[tuple[Action, tuple[int, ...]]]
"""Actions of instructions, each with the slots that it is the last to use."""


def bind_all(
    program: Program, drive: Drive | None = None, empty: Callable[..., torch.Tensor] = empty_strided
) -> Actions:
    """Binds the instructions of a program, for any of its executors; ``drive`` and ``empty`` as in :func:`bind`.

    Programs of other sizes share the actions of the instructions that are the same for all sizes.
    """
    shared, steps = program.shared, program.steps
    if not shared.last_uses:
        kept = {*program.layout.filled, *(slot for slot, _ in program.constants), *program.layout.results}
        shared.functions = {kernel: built.function for kernel, built in program.code.items()}
        shared.last_uses = last_uses(steps, kept)
    known, functions = shared.actions, shared.functions
    arrays = _arrays([step.scalars for step in steps if isinstance(step, Launch) and id(step) not in known])
    bound = []
    lasting = set(map(id, shared.steps))
    for step in steps:
        action = known.get(id(step)) or bind(step, functions, arrays, drive, empty)
        if id(step) in lasting:
            known[id(step)] = action
        bound.append(action)
    return tuple(zip(bound, shared.last_uses, strict=True))


class Executor:
    """Runs one program; thread-safe.

    Attributes:
        name: of the program; ``steps``: its instructions.

    Args:
        device: of the inputs, except states of generators.
        prepare: called before each run, in the thread that runs.
        empty: shape, strides, element type → memory of a result.
        pool: of blocks on the device; by default, the host's.
        actions: bound instructions, as with a driver of loops; by default, the first run binds them.
    """

    def __init__(
        self,
        program: Program,
        device: torch.device,
        *,
        prepare: Callable[[], object],
        empty: Callable[..., torch.Tensor] = empty_strided,
        pool: ArenaPool | None = None,
        actions: Actions | None = None,
    ):
        self.name, self.steps = program.name, program.steps
        self._constants = tuple([(slot, tensor.to(device)) for slot, tensor in program.constants])
        self._prepare, self._empty, self._pool = prepare, empty, pool
        self._layout = layout = program.layout
        if actions is not None:
            self.actions = actions
        else:
            self._program = replace(program)  # not the program itself, which holds its executor
            self._program.share(program.shared)
        self._static_views = [bind(view, {}, {}) for view in layout.views]
        self._forms = InputForms(program.name, layout.params, device)
        self._fresh = [(made.slot, made.shape, dense_strides(made.shape), made.torch_dtype) for made in layout.fresh]
        self._results = picker(layout.results)
        self._passed_on = [(i, slot) for i, slot in enumerate(layout.results) if slot < len(layout.params)]

    @cached_property
    def actions(self) -> Actions:
        """The bound instructions; waits for machine code."""
        return bind_all(self._program, empty=self._empty)

    @cached_property
    def _user(self) -> PoolUser:
        return (ARENAS if self._pool is None else self._pool).enroll(self._layout.arena_bytes)

    def __call__(
        self,
        inputs: Sequence[torch.Tensor],
        *,
        consume: bool = False,
        fresh: Sequence[torch.Tensor] | None = None,
        user: PoolUser | None = None,
    ) -> list[torch.Tensor]:
        """See :meth:`bridge.compile.runtime.program.Program.__call__`.

        ``fresh``: dense memory for the results in ``layout.fresh``, in order; ``None``: new memory. ``user``: the pool
        user whose blocks the run works in; ``None``: the executor's own.
        """
        if is_grad_enabled():
            with torch.no_grad():
                return Executor.__call__(self, inputs, consume=consume, fresh=fresh, user=user)
        user = self._user if user is None else user
        block = user.take()
        try:
            registers, between_calls = block.bound.get(user.key) or self._bound_to(block, user.key)
            try:
                self._prepare()
                self._load(registers, inputs)
                passed_on = [(i, inputs[slot]) for i, slot in self._passed_on] if self._passed_on else ()
                if consume:
                    inputs.clear()
                if fresh is None:
                    for slot, shape, strides, dtype in self._fresh:
                        registers[slot] = self._empty(shape, strides, dtype)
                else:
                    for (slot, *_), memory in zip(self._fresh, fresh, strict=True):
                        registers[slot] = memory
                self._act(registers)
                results = [*self._results(registers)]
                for i, tensor in passed_on:
                    results[i] = tensor
                return results
            finally:
                registers[:] = between_calls
        finally:
            user.give(block)

    def _act(self, registers: list) -> None:
        """Runs the actions in order; empties slots after their last use."""
        if profiler._is_profiler_enabled:
            self._act_recorded(registers)
            return
        for action, last_used in self.actions:
            action(registers)
            for slot in last_used:
                registers[slot] = None

    def _act_recorded(self, registers: list) -> None:
        """Runs the actions under a profiler, with a range for the program and one for each instruction."""
        with profiler.record_function(f"tvm: {self.name}"):
            for (action, last_used), step in zip(self.actions, self.steps, strict=True):
                with profiler.record_function(f"tvm: {self.name}/{step.name}"):
                    action(registers)
                for slot in last_used:
                    registers[slot] = None

    def _load(self, registers: list, inputs: Sequence[torch.Tensor]) -> None:
        """Puts the inputs into their slots, dense. Some may require grad: autograd is off."""
        registers[: len(inputs)] = self._forms.dense(inputs)

    @torch.inference_mode(False)  # its tensors serve calls of any mode
    def _bound_to(self, block: PoolBlock, key: int) -> tuple[list, list]:
        """The registers of runs in a block, and their contents between runs."""
        registers: list = [None] * self._layout.size
        self._layout.fill(registers, block.memory)
        for slot, tensor in self._constants:
            registers[slot] = tensor
        for make_view in self._static_views:
            make_view(registers)
        block.bound[key] = bound = registers, registers.copy()
        return bound


def with_constants(program: Program, tensors: Sequence[torch.Tensor]) -> Program:
    """The program with ``tensors`` as constants in place of its last parameters, with the same kernels.

    Views of them are made once. Copies only tensors that are not dense (or, on a GPU, not aligned): a later change of
    any other tensor changes the program's results.

    A factor that generated products read in panels is packed for them, and is no constant any more unless it has other
    consumers.

    Raises:
        ValueError: a tensor has another shape or element type than its parameter.
    """
    layout = program.layout
    first = len(layout.params) - len(tensors)
    constants = []
    for register, tensor in zip(layout.params[first:], tensors, strict=True):
        if tuple(tensor.shape) != register.shape or tensor.dtype != register.torch_dtype:
            wanted = f"{register.torch_dtype} {register.shape}"
            raise ValueError(f"{register.name}: wanted {wanted}, got {tensor.dtype} {tuple(tensor.shape)}")
        constants.append((register.slot, dense(tensor.detach())))
    known = {slot for slot, _ in (*program.constants, *constants)} | {view.writes[0] for view in layout.views}
    steps: list[Instruction] = []
    views = list(layout.views)
    for step in program.steps:
        if isinstance(step, MakeView) and step.reads[0] in known:
            views.append(step)
            known.add(step.writes[0])
        else:
            steps.append(step)
    found = dict((*program.constants, *constants))
    steps = _in_panels(program, steps, views, found)
    return replace(
        program,
        steps=tuple(steps),
        layout=replace(
            layout,
            params=layout.params[:first],
            views=tuple(views),
            laid_out=(),
        ),
        constants=tuple(found.items()),
    )


def _in_panels(
    program: Program, steps: Sequence[Instruction], views: Sequence[MakeView], constants: dict[int, torch.Tensor]
) -> list[Instruction]:
    """Runs the launches that pack constants now, and returns the others; panels become constants, and replace constants
    that only these launches read."""
    wanted = {register.slot: register for register in program.layout.laid_out}
    packs = [step for step in steps if isinstance(step, Launch) and step.writes[0] in wanted]
    if not packs:
        return list(steps)
    program.backend.threads()  # torch's thread setting reaches a new thread's OpenMP at torch's first use there
    functions, sources = {step.name: program.code[step.name].function for step in packs}, set()
    for step in packs:
        register = wanted[step.writes[0]]
        constants[register.slot] = VF.zeros(register.shape, dtype=register.torch_dtype)
        bind(step, functions, {})(constants)
        sources.update(step.reads)
    left = [step for step in steps if step not in packs]
    read = {slot for step in (*left, *views) for slot in step.reads} | {*program.layout.memory}
    for slot in sources - read:
        del constants[slot]
    return left
