"""The compiler: :func:`compile_function` turns a Relax function into a :class:`Program`, a flat list of steps."""

from bridge.compile.cpu.backend import host_target
from bridge.compile.cpu.mt19937 import STATE_WORDS, bernoulli_function
from bridge.compile.pipeline import clear_cache, compile_function
from bridge.compile.runtime.build import Built, build_kernels
from bridge.compile.runtime.contents import Operation
from bridge.compile.runtime.program import KernelStep, LibraryStep, Program, Step, ViewStep

__all__ = [
    "STATE_WORDS",
    "Built",
    "KernelStep",
    "LibraryStep",
    "Operation",
    "Program",
    "Step",
    "ViewStep",
    "bernoulli_function",
    "build_kernels",
    "clear_cache",
    "compile_function",
    "host_target",
]
