"""Executable: a function → compiled and callable: for given sizes, with constants, in segments, by CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from types import MappingProxyType
from typing import Any

import torch
from torch.autograd import profiler

from autodiff.ir import Function
from autodiff.lazy import cached_property
from bridge.base.errors import CompilationError, Unsupported, UnsupportedModule
from bridge.compile import Compilation, CompileOptions, DrawnMask, KeptFunction, Program, cut, with_constants
from bridge.dispatch.backward_nodes import BoundSegment
from bridge.dispatch.guards import Sizes
from bridge.lowering import script

__all__ = ["Executable", "Execute", "Graphed"]

Execute = Callable[..., list[torch.Tensor]]
"""``(inputs, *, consume) -> results``."""

Graphed = Callable[[Program, Execute, Program], Execute]
"""A program, its executor, and the program for all sizes → an executor that uses CUDA graphs where that pays."""


class Executable:
    """A function of a call, compiled: ``executable.run(inputs) -> results``.

    Copies for given sizes, with constants or in segments share one compilation, which runs in the background:
    :attr:`program` waits for it without machine code, :attr:`run` with it.

    Attributes:
        name: the name for profilers; ``module_name``: the module's name.

    Args:
        source: the function.
        direction: ``"forward"``, say.
        masks: place → distribution, for parameters that are recomputed dropout masks.
        graphed: wraps the executor in CUDA graphs; ``None``: no graphs.

    Raises:
        UnsupportedModule: names an operator without a kernel.
        CompilationError: any other error, at any stage.
    """

    def __init__(
        self,
        source: Function | KeptFunction,
        module_name: str,
        direction: str,
        options: CompileOptions,
        masks: Mapping[int, DrawnMask] = MappingProxyType({}),
        graphed: Graphed | None = None,
    ):
        self.name = f"{module_name}_{direction}"
        self._source, self.module_name, self._direction, self._graphed = source, module_name, direction, graphed
        self._sizes: Sizes | None = None
        self._constants: tuple[Program, int] | None = None
        with self._errors():
            self._compilation = Compilation(source, self.name, options, masks)

    @classmethod
    def loaded(cls, program: Program) -> Executable:
        """An executable of a program that was compiled before."""
        found = cls.__new__(cls)
        found.name = found.module_name = program.name
        found._source = found._sizes = found._constants = found._compilation = found._graphed = None
        found.program = program
        return found

    @property
    def function(self) -> Function:
        """The source function."""
        return self._source.read() if isinstance(self._source, KeptFunction) else self._source

    @cached_property
    def program(self) -> Program:
        """The program for all sizes, with constants as parameters; its machine code may still be compiling."""
        with self._errors():
            return self._compilation.finish()

    @property
    def bound(self) -> Program:
        """The program for all sizes, with its constants bound."""
        return self.program if self._constants is None else self._constants[0]

    def at(self, sizes: Sizes) -> Executable:
        """A copy for one combination of sizes of the symbolic extents."""
        return self._with(_sizes=sizes)

    def with_constants(self, tensors: Sequence[torch.Tensor], count: int) -> Executable:
        """A copy with constants bound to its last parameters; it ignores its first ``count`` inputs, the constants'
        sources."""
        return self._with(_constants=(with_constants(self.program, tensors), count))

    def in_segments(self, places: Sequence[int]) -> Executable:
        """A copy, cut into segments at these steps."""
        return self._with(_segments=cut(self.program, places, self.name))

    def _with(self, **changed: Any) -> Executable:
        found = copy(self)
        for known in ("run", "segments"):
            found.__dict__.pop(known, None)
        vars(found).update(changed)
        return found

    @cached_property
    def run(self) -> Execute:
        """The executor; waits for machine code."""
        execute = self._runs(self.bound)
        if self._constants is None:
            return execute
        count = self._constants[1]

        def run(inputs: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
            return execute(inputs[count:], **options)

        return run

    @cached_property
    def segments(self) -> list[BoundSegment]:
        """The segments of :meth:`in_segments` with their executors; waits for machine code."""
        return [(each, None if each.program is None else self._runs(each.program)) for each in self._segments]

    def _runs(self, whole: Program) -> Execute:
        with self._errors():
            program = whole if self._sizes is None else whole.at(self._sizes)
            execute = _under_name(program, self.name)
            if self._sizes is None and self._compilation is not None:
                self._compilation.keep()
            return execute if self._graphed is None else self._graphed(program, execute, whole)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except NotImplementedError as error:
            words = str(error).replace(":", " ").split()
            op = next((word for word in words if word.startswith(("relax.", "library."))), "a Relax operator")
            problem = Unsupported(op, f"{self.module_name}'s {self._direction}", str(error))
            raise UnsupportedModule(self.module_name, [problem], cause=error) from None
        except Exception as error:
            if self._source is None:
                raise
            raise CompilationError(f"compile {self._direction}", script(self.function), error) from error


def _under_name(program: Program, name: str) -> Execute:
    """The program's executor; if it was compiled for an equal module of another class, profilers see this name."""
    execute = program.executor.__call__  # a method is entered without the call from C that an object needs
    if program.name == name:
        return execute

    def run(inputs: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
        if not profiler._is_profiler_enabled:
            return execute(inputs, **options)
        with profiler.record_function(f"tvm: {name}"):
            return execute(inputs, **options)

    return run
