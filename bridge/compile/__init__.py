"""The compiler: :func:`compile_function` turns a Relax function into a :class:`Program`, a flat list of steps."""

from bridge.compile.pipeline import clear_cache, compile_function
from bridge.compile.runtime.program import KernelStep, LibraryStep, Program, Step, ViewStep

__all__ = ["KernelStep", "LibraryStep", "Program", "Step", "ViewStep", "clear_cache", "compile_function"]
