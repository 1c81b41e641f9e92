"""Executable: a compiled function → what runs it: of certain sizes, with constants, in segments, by graphs."""

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
"""A program, what runs it, and the program of all sizes → what runs it by recorded graphs, where that pays."""


class Executable:
    """A function of a call, compiled: ``executable.run(inputs) -> results``.

    Copies of it are of certain sizes, have constants or segments; all are of one compilation. It ends when
    :attr:`program` is first asked for, but for machine code, which :attr:`run` waits for.

    Attributes:
        name: as a profiler is told; ``module_name``: of the module.

    Args:
        source: the function.
        direction: ``"forward"``, say.
        masks: parameters that are dropout masks, by place, and how eager draws each.
        graphed: ``None``: nothing is recorded.

    Raises:
        UnsupportedModule: names an operator that there is no kernel for.
        CompilationError: anything else that goes wrong, at any stage.
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
        """Of a program that was compiled before."""
        found = cls.__new__(cls)
        found.name = found.module_name = program.name
        found._source = found._sizes = found._constants = found._compilation = found._graphed = None
        found.program = program
        return found

    @property
    def function(self) -> Function:
        """What it was compiled from."""
        return self._source.read() if isinstance(self._source, KeptFunction) else self._source

    @cached_property
    def program(self) -> Program:
        """Of all sizes, constants among its parameters; its machine code may still be in the making."""
        with self._errors():
            return self._compilation.finish()

    @property
    def bound(self) -> Program:
        """Of all sizes, with its constants."""
        return self.program if self._constants is None else self._constants[0]

    def at(self, sizes: Sizes) -> Executable:
        """The same for one combination of sizes, where extents are symbolic."""
        return self._with(_sizes=sizes)

    def with_constants(self, tensors: Sequence[torch.Tensor], count: int) -> Executable:
        """The same with constants in the place of its last parameters; it does not look at its first ``count`` inputs,
        which these are made of."""
        return self._with(_constants=(with_constants(self.program, tensors), count))

    def in_segments(self, places: Sequence[int]) -> Executable:
        """The same, cut into segments."""
        return self._with(_segments=cut(self.program, places, self.name))

    def _with(self, **changed: Any) -> Executable:
        found = copy(self)
        for known in ("run", "segments"):
            found.__dict__.pop(known, None)
        vars(found).update(changed)
        return found

    @cached_property
    def run(self) -> Execute:
        """Runs it; waits for its machine code."""
        execute = self._runs(self.bound)
        if self._constants is None:
            return execute
        count = self._constants[1]

        def run(inputs: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
            return execute(inputs[count:], **options)

        return run

    @cached_property
    def segments(self) -> list[BoundSegment]:
        """Of :meth:`in_segments`, with what runs each; waits for machine code."""
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
    """The program; if it was compiled for an equal module of another class, a profiler is told the name of this one."""
    execute = program.executor
    if program.name == name:
        return execute

    def run(inputs: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
        if not profiler._is_profiler_enabled:
            return execute(inputs, **options)
        with profiler.record_function(f"tvm: {name}"):
            return execute(inputs, **options)

    return run
