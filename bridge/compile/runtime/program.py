"""Programs as data: instructions over registers, constants, kernels; callable: ``program(inputs) -> results``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from tvm.tirx import PrimFunc
from tvm_ffi import structural_equal

from autodiff.extents import Composite, Extent, ExtentScope, ScopeState, SizeGuard, Symbol, sample_of, state_of_scope
from autodiff.lazy import cached_property
from bridge.artifact import to_text, written, written_as
from bridge.base.lru import LeastRecentlyUsed
from bridge.base.torch_internals import VF
from bridge.compile.backend import Backend, Built
from bridge.compile.loop_ir.graph import Positions
from bridge.compile.runtime.instance import Instances
from bridge.compile.runtime.instructions import CallLibrary, Launch, MakeView, Operation, StepContents
from bridge.compile.runtime.layout import Register, RegisterLayout
from bridge.compile.runtime.loop_frame import Instruction, RunLoop, inner_steps
from bridge.library import NEVER_RAISE, TensorAt, TensorsAt

__all__ = ["Program"]

_MOST_BOUND, _MOST_BOUND_BYTES = 256, 128 * 2**20
"""Maximum number of sizes that a program stays bound to, and their maximum bytes."""

_BYTES_OF_STEP, _BYTES_OF_SLOT = 2048, 1024
"""Estimated bytes of a bound instruction, and of a register in each block that the program runs in."""


@dataclass(eq=False)
class SharedBinding:
    """The part of a program's binding to machine code that is the same for all sizes.

    Attributes:
        steps: the instructions for all sizes.
        functions: the kernels by name.
        last_uses: after each instruction, the slots that it is the last to use; empty before the first binding.
        actions: ``id`` of an instruction without extents → its action.
    """

    steps: tuple[Instruction, ...]
    functions: Mapping[str, Callable] = field(default_factory=dict)
    last_uses: Sequence[tuple[int, ...]] = ()
    actions: dict[int, Callable[[list], None]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Program:
    """``program(inputs) -> results`` for one Relax function. Equal functions share it; thread-safe.

    Two programs are equal if their data are: all except ``stage_seconds``, ``ways`` and machine code.

    Attributes:
        steps: the instructions, in order.
        layout: of the registers.
        constants: tensors by slot.
        kernels: generated kernels by name; ``code``, their machine code for ``backend``, lives as long as this.
        results: the names of the results in ``steps``.
        variables: names of the function's parameters, then of its bindings.
        stage_seconds: seconds of the compilation's Python stages.
        positions: constants of dynamic size, by slot.
        scope: of the symbolic extents in all of the above; ``None`` for a static program. A program with a scope does
            not run itself: :meth:`bind` returns the runnable instance.
        bodies: sources of loops' bodies, kept alive as long as the program.
        ways: algorithms of its matrix products that another process may choose otherwise, as plain data.
    """

    name: str
    steps: tuple[Instruction, ...]
    layout: RegisterLayout = field(repr=False)
    constants: tuple[tuple[int, torch.Tensor], ...] = field(repr=False)
    kernels: Mapping[str, PrimFunc] = field(repr=False)
    backend: Backend = field(repr=False)
    results: tuple[str, ...] = field(repr=False)
    variables: tuple[str, ...] = field(repr=False)
    code: Mapping[str, Built] = field(repr=False)
    stage_seconds: Mapping[str, float] = field(default_factory=dict, repr=False)
    positions: tuple[tuple[int, Positions], ...] = field(default=(), repr=False)
    scope: ExtentScope | None = field(default=None, repr=False)
    bodies: tuple[object, ...] = field(default=(), repr=False)
    ways: tuple[tuple, ...] = field(default=(), repr=False)

    @property
    def timings(self) -> dict[str, float]:
        """Seconds of compilation by stage; ``build``: in the background, for this program's libraries."""
        builds = {id(built.build): built.build for built in self.code.values() if built.build is not None}
        return {**self.stage_seconds, "build": sum(build.seconds for build in builds.values())}

    @cached_property
    def executor(self) -> Callable[..., list[torch.Tensor]]:
        """The program bound to its machine code; calling it equals calling the program."""
        if self.scope is not None:
            raise ValueError(f"{self.name} is compiled for any {', '.join(self._symbols)}: bind it to sizes first")
        return self.backend.executor(self)

    def bind(self, sizes: Mapping[str, int]) -> Callable[..., list[torch.Tensor]]:
        """The executor for given sizes of the symbols, by name; :attr:`executor` without symbols.

        Keeps the most recently used executors, bounded in number and bytes. ``ValueError`` names a missing size, or the
        guard that an invalid one breaks.
        """
        return self.at(sizes).executor

    def at(self, sizes: Mapping[str, int]) -> Program:
        """The program at given sizes, see :meth:`bind`: numbers instead of all extents, the same kernels."""
        if self.scope is None:
            return self
        try:
            key = tuple([sizes[name] for name in self._symbols])
        except KeyError as error:
            raise ValueError(f"{self.name}: wanted sizes of {', '.join(self._symbols)}, got {dict(sizes)}") from error
        return self._bound.get(key) or self._bound.put(key, self._instance(sizes), self._instance_bytes)

    def _instance(self, sizes: Mapping[str, int]) -> Program:
        guards = len(self.scope.guards)  # the backward's guards are added when it is compiled
        if guards not in self._conditions:
            self._conditions[guards] = self.scope.broken()
        broken = self._conditions[guards](sizes)
        if broken is not None:
            raise ValueError(f"{self.name} is compiled for sizes with {broken}, got {dict(sizes)}")
        steps, layout, constants = self._instances(sizes)
        constants = (*self.constants, *constants)
        made = replace(self, steps=steps, layout=layout, constants=constants, positions=(), scope=None)
        made.share(self.shared)
        return made

    @cached_property
    def shared(self) -> SharedBinding:
        """The part of its binding to machine code that is the same for all sizes."""
        return SharedBinding(self.steps)

    def share(self, shared: SharedBinding) -> None:
        """Sets :attr:`shared`."""
        vars(self)["shared"] = shared

    @cached_property
    def _instances(self) -> Instances:
        return Instances(self.scope, self.steps, self.layout, self.positions)

    @cached_property
    def _conditions(self) -> dict[int, Callable[[Mapping[str, int]], SizeGuard | None]]:
        """Number of guards → function that finds a broken guard."""
        return {}

    @cached_property
    def _bound(self) -> LeastRecentlyUsed[tuple[int, ...], Program]:
        return LeastRecentlyUsed(_MOST_BOUND, _MOST_BOUND_BYTES)

    @property
    def _symbols(self) -> list[str]:
        return [symbol.name for symbol in self.scope.samples]

    @property
    def _instance_bytes(self) -> int:
        """Estimated bytes of Python objects for one size."""
        return _BYTES_OF_STEP * len(self.steps) + _BYTES_OF_SLOT * self.layout.size

    def __call__(self, inputs: Sequence[torch.Tensor], *, consume: bool = False) -> list[torch.Tensor]:
        """Runs on inputs in parameter order, of any strides.

        With ``consume``, ``inputs`` is a list that is emptied; each input is released after its last reading step.

        Results are new dense tensors (views of one another only if one is a reshape of another), in the memory order of
        the options, or the input object itself if a result is a parameter. Autograd records nothing. ``ValueError`` if
        the inputs' number, a shape, an element type or a device differs from the compiled program's.
        """
        return self.executor(inputs, consume=consume)

    @property
    def can_fail(self) -> bool:
        """Whether a step may raise because of its inputs' values, such as an index out of range."""
        return any(isinstance(step, CallLibrary) and step.name not in NEVER_RAISE for step in inner_steps(self.steps))

    @property
    def arena_bytes(self) -> int:
        """Bytes of intermediates that a run needs."""
        return self.layout.arena_bytes

    def shared_results(self, handed_on: Iterable[int] = ()) -> list[int]:
        """Results in memory that is visible elsewhere: a parameter's, a constant's, an earlier result's.

        ``handed_on``: parameters whose memory one result may take over (a grad_out that is a gradient, as in eager's
        ``x + y``).
        """
        taken = {slot for slot, _ in self.constants} | set(range(len(self.layout.params))) - set(handed_on)
        shared = []
        for result, slot in enumerate(self.layout.memory):
            if slot in taken:
                shared.append(result)
            taken.add(slot)
        return shared

    @property
    def result_strides(self) -> dict[int, tuple[int, ...]]:
        """Place → strides of each result that is a view of a computed tensor; empty for dynamic sizes."""
        if self.scope is not None:
            return {}
        views = {step.writes[0]: step for step in (*self.layout.views, *self.steps) if isinstance(step, MakeView)}
        return {place: views[slot].strides for place, slot in enumerate(self.layout.results) if slot in views}

    def launches(self, step: Launch) -> tuple[str, ...]:
        """Describes a launch of ``steps`` in words (threads, blocks), at the sample's sizes; may be empty."""
        return self.backend.launches(self.kernels[step.name], [sample_of(number) for number in step.scalars])

    def source(self, kernel: str, form: str = "tvmscript") -> str:
        """A kernel named in ``steps`` as text: ``"tvmscript"``, or a form of the backend's: ``"llvm"`` or ``"asm"``;
        ``"cuda"``, ``"ptx"`` or ``"sass"``.

        ``KeyError`` for an unknown name, ``ValueError`` for another form.
        """
        if kernel not in self.kernels:
            raise KeyError(f"no kernel {kernel!r} in {self.name}; there are {', '.join(self.kernels)}")
        return self.backend.source(self.kernels[kernel], kernel, form)

    def _line(self, step: Instruction) -> str:
        shapes = self.launches(step) if isinstance(step, Launch) else ()
        return f"  {step}; {', '.join(shapes)}; {step.contents.bytes} bytes" if shapes else f"  {step}"

    @property
    def headline(self) -> str:
        """The first line of the program's text."""
        seconds = ", ".join(f"{stage} {spent:.3f}" for stage, spent in self.timings.items())
        return f"program {self.name}: {len(self.steps)} steps, arena {self.arena_bytes} bytes, seconds: {seconds}"

    def __str__(self) -> str:
        return "\n".join([self.headline, *map(self._line, self.steps)])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Program):
            return NotImplemented
        return (
            self._plain == other._plain
            and all(_same(mine, its) for (_, mine), (_, its) in zip(self.constants, other.constants, strict=True))
            and all(structural_equal(func, other.kernels[name]) for name, func in self.kernels.items())
        )

    def __hash__(self) -> int:
        return hash((self.name, len(self.steps)))

    @property
    def _plain(self) -> tuple:
        """The parts that are compared by value."""
        slots = tuple(slot for slot, _ in self.constants)
        kernels = tuple(self.kernels)
        parts: tuple = (self.steps, self.layout)
        if self.scope is not None:  # as text: comparing extents would add guards
            parts = (to_text((*parts, self.positions, state_of_scope(self.scope))),)
        return self.name, parts, slots, kernels, self.backend.key, self.results, self.variables


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the bits are equal, NaN included."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return VF.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


written(CallLibrary, Launch, MakeView, Operation, Positions, Register, RegisterLayout, RunLoop, StepContents)
written(TensorAt, TensorsAt, Composite, ScopeState, SizeGuard, Symbol)
written_as(Extent, "Extent", ("terms",), lambda extent: (extent.terms,))  # without its scope, which the reader supplies
