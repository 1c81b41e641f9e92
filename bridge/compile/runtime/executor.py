"""Executor: a program bound to callables: ``executor(inputs) -> results``.

A run works on *registers*: a list with a slot for every tensor that the instructions touch. A run takes a block of the
process's arena pool (:mod:`bridge.compile.runtime.layout`) and finds, or makes once, its registers there: slots of
intermediates are filled with tensors in that block, those of constants with the constants. Slots of inputs, results and
views of those are filled during a call and emptied after it. Who has the block has the registers that are bound to it,
so concurrent and re-entrant calls never share them. Results are never in the block.

Input forms: tensors given to a program → the same ones, dense; or a ``ValueError`` naming the one that differs.

Binding: an instruction → a function of the registers, with everything else that it needs looked up once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import add, attrgetter

import torch
from torch.autograd import profiler

from bridge.base.devices import HOST
from bridge.base.pytrees import picker
from bridge.base.tensor_properties import TensorChecks, is_nested, tensor_checks
from bridge.base.torch_internals import empty_strided
from bridge.compile.backend import Built
from bridge.compile.loop_ir.views import dense_strides, inverse
from bridge.compile.runtime.instructions import CallLibrary, Launch, MakeView
from bridge.compile.runtime.layout import ARENAS, ArenaPool, PoolBlock, Register, RegisterLayout
from bridge.compile.runtime.loop import loop_action
from bridge.compile.runtime.loop_frame import Drive, Instruction, LoopFrames, RunLoop, is_framed
from bridge.library import FUNCTIONS, OUT_KERNELS, invoke

__all__ = ["Action", "Actions", "Arrays", "Executor", "InputForms", "Strided", "bind", "bind_all", "last_uses"]

_KIND, _DEVICE = attrgetter("shape", "dtype"), attrgetter("device")
#: Ways that fitting inputs may look: some require grad, or are parameters, or belong to inference mode, or are strided.
_MAX_LOOKS = 4

Strided = tuple[tuple[int, tuple[int, ...]], ...]
"""Places and strides of inputs that are not dense in the order of their slots."""


class InputForms:
    """Shapes, element types and the device of a program's inputs.

    Args:
        name: of the program.
        params: its parameters.
        device: where those are that do not lie on the host.
    """

    def __init__(self, name: str, params: Sequence[Register], device: torch.device):
        self._name, self._params = name, params
        self._kinds = [param.given_kind for param in params]
        self._devices = [HOST if param.lies_on_host else device for param in params]
        self._turned = [(place, param.order) for place, param in enumerate(params) if param.order is not None]
        self._looks: list[tuple[TensorChecks, Strided]] = []  # inputs that look like these fit

    def dense(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The inputs in the orders of their slots, those that lie otherwise as dense copies. Some may require grad:
        nothing is to record it.

        Raises:
            ValueError: their number, a shape, an element type or a device is another one.
        """
        found = None
        if not any(map(is_nested, inputs)):
            for alike, strided in self._looks:
                if alike.exact(*inputs) or alike.again(inputs):
                    found = strided
                    break
        if found is None:
            found = self._look(inputs)
        in_order = self._in_order(inputs) if self._turned else inputs
        return in_order if found == () else [tensor.contiguous() for tensor in in_order]

    def _in_order(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if not self._turned:
            return inputs
        turned = list(inputs)
        for place, order in self._turned:
            turned[place] = turned[place].permute(order)
        return turned

    def as_they_lie(self, inputs: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Strided]:
        """The inputs, with the strides of those that lie otherwise than their slots have them; of too many kinds of
        strides, copies that lie so. Raises what :meth:`dense` does."""
        known = () if any(map(is_nested, inputs)) else self._looks
        strided = next((strided for alike, strided in known if alike(inputs)), None)
        strided = self._look(inputs) if strided is None else strided
        if strided is not None:
            return inputs, strided
        copies = [tensor.contiguous() for tensor in self._in_order(inputs)]
        for place, order in self._turned:
            copies[place] = copies[place].permute(inverse(order))
        return copies, ()

    def _look(self, inputs: Sequence[torch.Tensor]) -> Strided | None:
        """Which of inputs of a new look are strided; ``None``: some may be, in one of too many ways."""
        if list(map(_KIND, inputs)) != self._kinds or list(map(_DEVICE, inputs)) != self._devices:
            self._reject(inputs)
        in_order = self._in_order(inputs)
        strided = tuple(
            (place, inputs[place].stride()) for place, each in enumerate(in_order) if not each.is_contiguous()
        )
        if len(self._looks) < _MAX_LOOKS:
            self._looks.append((tensor_checks(inputs, given_twice=False), strided))
            return strided
        return None if strided else ()

    def _reject(self, inputs: Sequence[torch.Tensor]) -> None:
        if len(inputs) != len(self._kinds):
            raise ValueError(f"{self._name}: wanted {len(self._kinds)} inputs, got {len(inputs)}")
        for slot, (tensor, kind, device) in enumerate(zip(inputs, self._kinds, self._devices, strict=True)):
            if (_KIND(tensor), tensor.device) != (kind, device):
                raise ValueError(
                    f"{self._name}: input {slot} ({self._params[slot].name}) has shape {tuple(tensor.shape)} and"
                    f" {tensor.dtype} on {tensor.device}, wanted {tuple(kind[0])} and {kind[1]} on {device}"
                )


Action = Callable[[list], None]
"""An instruction as a function of the registers."""


_ADDRESS = torch.Tensor.data_ptr

Arrays = dict[tuple[int, ...], tuple[torch.Tensor, ctypes.c_void_p]]
"""Integers as int64 in memory, and where that is."""


def bind(
    instruction: Instruction, functions: Mapping[str, Callable], arrays: Arrays, drive: Drive | None = None
) -> Action:
    """The action of an instruction; ``functions`` are the program's kernels by name, ``arrays`` what its launches pass,
    one for all that pass the same; ``drive`` runs the steps of loops.

    ``KeyError`` for a kernel that is in neither ``functions`` nor :mod:`bridge.library`.
    """
    match instruction:
        case MakeView():
            return _view(instruction)
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
    """What runs a loop's launches by a driver; ``None`` if there is none, or they are not all."""
    launches = [step for step in loop.steps if isinstance(step, Launch) and not step.once]
    found = [(launch, functions[launch.name]) for launch in launches]
    if drive is None or not is_framed(found) or any(not isinstance(step, (Launch, MakeView)) for step in loop.steps):
        return None
    integers = [_array(launch.scalars, arrays)[1].value if launch.scalars else None for launch in launches]
    return LoopFrames([(*each, number) for each, number in zip(found, integers, strict=True)], drive)


def last_uses(instructions: Sequence[Instruction], kept: Collection[int]) -> list[tuple[int, ...]]:
    """After each instruction, the slots that it and no later one uses, but for those that are ``kept``."""
    needed = set(kept)
    uses = []
    for instruction in reversed(instructions):
        last = {*instruction.reads, *instruction.writes} - needed
        needed |= last
        uses.append(tuple(sorted(last)))
    return uses[::-1]


# What an action needs is bound as arguments: a closure has an object for each thing in it, all of which the garbage
# collector walks through, and there are as many as sizes times steps.


def _view(view: MakeView) -> Action:
    (base,), (slot,) = view.reads, view.writes
    return partial(_make_view, base, slot, view.shape, view.strides, view.offset)


def _make_view(
    base: int, slot: int, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, registers: list
) -> None:
    tensor = registers[base]
    registers[slot] = tensor.as_strided(shape, strides, tensor.storage_offset() + offset)


def _library(call: CallLibrary) -> Action:
    reads, writes, attrs = call.reads, call.writes, call.attrs
    if not call.allocates:
        return partial(_write, OUT_KERNELS[call.name], picker(writes), picker(reads), attrs)
    values = [list(value) if isinstance(value, tuple) else value for value in attrs]  # torch's lists of integers
    return partial(_allocate, FUNCTIONS[call.name], values, reads, writes)


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
    kernel: Callable, pick: Callable[[list], Sequence], _alive: torch.Tensor, where: ctypes.c_void_p, registers: list
) -> None:
    kernel(*pick(registers), where)


def _launch_at_addresses(launch: Launch, kernel: Callable, arrays: Arrays) -> Action:
    """The geometry of views is in the scalars, so none of them is made at a call."""
    pick = picker((*launch.reads, *launch.writes))
    return partial(_run_at_addresses, kernel, pick, launch.offsets, *_array(launch.scalars, arrays))


def _run_at_addresses(
    kernel: Callable,
    pick: Callable[[list], Sequence],
    behind: tuple[int, ...],
    _alive: torch.Tensor,
    where: ctypes.c_void_p,
    registers: list,
) -> None:
    kernel(*map(ctypes.c_void_p, map(add, map(_ADDRESS, pick(registers)), behind)), where)


def _array(scalars: tuple[int, ...], arrays: Arrays) -> tuple[torch.Tensor, ctypes.c_void_p]:
    if scalars not in arrays:
        tensor = torch.tensor(scalars, dtype=torch.int64, device=HOST)
        arrays[scalars] = tensor, ctypes.c_void_p(tensor.data_ptr())
    return arrays[scalars]


Actions = Sequence[tuple[Action, tuple[int, ...]]]
"""Instructions as functions of the registers, each with the slots that it is the last to use."""


def bind_all(
    steps: Sequence[Instruction],
    layout: RegisterLayout,
    constants: Sequence[tuple[int, torch.Tensor]],
    code: Mapping[str, Built],
    drive: Drive | None = None,
) -> Actions:
    """The instructions of a program, bound, for any of its executors; arguments as of :class:`Executor`."""
    functions = {kernel: built.function for kernel, built in code.items()}
    kept = {*layout.filled, *(slot for slot, _ in constants), *layout.results}
    arrays: Arrays = {}
    return tuple(zip([bind(step, functions, arrays, drive) for step in steps], last_uses(steps, kept), strict=True))


class Executor:
    """Runs one program; safe to call from any thread.

    Attributes:
        steps: the instructions.
        actions: they, bound.

    Args:
        device: of the inputs, but for states of generators.
        prepare: called before each run, in the thread that runs.
        empty: shape, strides, element type → memory of a result.
        pool: of blocks on the device; the host's unless given.
        drive: runs the steps of loops.
        actions: of another executor of the same program, whose are shared.
    """

    def __init__(
        self,
        name: str,
        steps: Sequence[Instruction],
        layout: RegisterLayout,
        constants: Sequence[tuple[int, torch.Tensor]],
        code: Mapping[str, Built],
        *,
        device: torch.device,
        prepare: Callable[[], object],
        empty: Callable[..., torch.Tensor] = empty_strided,
        pool: ArenaPool | None = None,
        drive: Drive | None = None,
        actions: Actions | None = None,
    ):
        self.name = name
        self._prepare = prepare
        self.steps = steps
        self._layout = layout
        self._constants = constants
        self._code = code  # alive as long as this
        self.actions = bind_all(steps, layout, constants, code, drive) if actions is None else actions
        self._static_views = [bind(view, {}, {}) for view in layout.views]
        self._forms = InputForms(name, layout.params, device)
        self._empty = empty
        self._fresh = [(made.slot, made.shape, dense_strides(made.shape), made.torch_dtype) for made in layout.fresh]
        views = {step.writes[0] for step in (*layout.views, *steps) if isinstance(step, MakeView)}
        self._results = picker(layout.results)
        self._viewed = [i for i, slot in enumerate(layout.results) if slot in views]
        self._passed_on = [(i, slot) for i, slot in enumerate(layout.results) if slot < len(layout.params)]
        self._arena_bytes = layout.arena_bytes
        pool = ARENAS if pool is None else pool
        self._key = pool.enroll(self, self._arena_bytes)
        self._take, self._give = pool.take, pool.give

    def __call__(
        self,
        inputs: Sequence[torch.Tensor],
        *,
        consume: bool = False,
        fresh: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """See :meth:`bridge.compile.runtime.program.Program.__call__`.

        ``fresh``: memory for the results in ``layout.fresh``, in their order, dense; new memory if ``None``.
        """
        block = self._take(self._arena_bytes)
        try:
            registers, between_calls = block.bound.get(self._key) or self._bound_to(block)
            try:
                if not torch.is_grad_enabled():
                    return self._run(registers, inputs, consume, fresh)
                with torch.no_grad():
                    return self._run(registers, inputs, consume, fresh)
            finally:
                registers[:] = between_calls
        finally:
            self._give(block)

    def _run(
        self,
        registers: list,
        inputs: Sequence[torch.Tensor],
        consume: bool,
        fresh: Sequence[torch.Tensor] | None,
    ) -> list[torch.Tensor]:
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
        for i in self._viewed:  # autograd lets nobody write into an output that it knows as a view
            results[i] = results[i].data
        for i, tensor in passed_on:
            results[i] = tensor
        return results

    def _act(self, registers: list) -> None:
        """The actions, in order; slots are emptied after their last use."""
        if profiler._is_profiler_enabled:
            self._act_recorded(registers)
            return
        for action, last_used in self.actions:
            action(registers)
            for slot in last_used:
                registers[slot] = None

    def _act_recorded(self, registers: list) -> None:
        """The actions under a profiler: a range for the program, one for each instruction in it."""
        with profiler.record_function(f"tvm: {self.name}"):
            for (action, last_used), step in zip(self.actions, self.steps, strict=True):
                with profiler.record_function(f"tvm: {self.name}/{step.name}"):
                    action(registers)
                for slot in last_used:
                    registers[slot] = None

    def _load(self, registers: list, inputs: Sequence[torch.Tensor]) -> None:
        """Puts the inputs into their slots, dense. Some may require grad: nothing records it."""
        registers[: len(inputs)] = self._forms.dense(inputs)

    @torch.inference_mode(False)  # its tensors serve calls of any mode
    def _bound_to(self, block: PoolBlock) -> tuple[list, list]:
        """The registers of runs in a block, and what is in them between runs."""
        registers: list = [None] * self._layout.size
        self._layout.fill(registers, block.memory)
        for slot, tensor in self._constants:
            registers[slot] = tensor
        for make_view in self._static_views:
            make_view(registers)
        block.bound[self._key] = bound = registers, registers.copy()
        return bound
