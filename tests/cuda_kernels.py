"""Kernels that the compiler's tests need, planned for a GPU: ``python -m tests.cuda_kernels [test files, options]``.

Runs tests on the processor; their functions are planned under the GPU's rules as well. Each GPU plan is then run with
random numbers as OpenCL on PoCL, beside the CPU backend's kernel of that very plan. The last line counts differences.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from autodiff.extents import sample_of
from bridge.compile import CompileOptions
from bridge.compile.backend import Built
from bridge.compile.cpu.backend import CpuBackend, host_backend
from bridge.compile.cuda.limits import LIMITS, ORDER
from bridge.compile.cuda.products import CudaProducts
from bridge.compile.loop_ir.graph import Value
from bridge.compile.pipeline import Compilation
from bridge.compile.runtime import link
from bridge.compile.schedule.plan_rows import Planned
from tests.cuda_plans import CudaKernels, assert_near
from tests.rooms import ROOT

_AT_ONCE = 40
_DEFAULT = (
    "concat",
    "operators",
    "random_functions",
    "fusion",
    "many_axes",
    "symbolic",
    "symbolic_rows",
    "symbolic_columns",
)


class _Plans(CpuBackend):
    """Plans as for a GPU; its programs are not run."""

    def build(self, functions) -> list[Built]:
        return [Built(lambda: None) for _ in functions]

    def products(self, threads: int, deterministic: bool) -> CudaProducts:
        return CudaProducts()


_PLANS = _Plans(target=host_backend().target, order=ORDER, limits=LIMITS.having(together=1))
_HOST = CpuBackend(target=host_backend().target, order=ORDER, limits=LIMITS)


class collected:
    """``with collected() as plans:`` functions compiled inside are also planned for a GPU; a launch of each plan."""

    def __enter__(self) -> dict:
        self.plans: dict = {}
        finish, rows, columns = Compilation.finish, link.plan_rows, link.plan_columns

        def finished(compilation: Compilation):
            options = compilation._options
            if options.backend != _PLANS:
                Compilation(compilation._func, compilation._name, CompileOptions.current(_PLANS)).finish()
            return finish(compilation)

        def kept(make, *arguments) -> Planned:
            made = make(*arguments)
            if arguments[-1] == _PLANS:
                self.plans.setdefault(made.plan, made)
            return made

        self.patches = [
            mock.patch.object(Compilation, "finish", finished),
            mock.patch.object(link, "plan_rows", lambda *arguments: kept(rows, *arguments)),
            mock.patch.object(link, "plan_columns", lambda *arguments: kept(columns, *arguments)),
        ]
        for patch in self.patches:
            patch.start()
        return self.plans

    def __exit__(self, *_) -> None:
        for patch in self.patches:
            patch.stop()


def check(planned: list[Planned]) -> Iterator[tuple[Planned, str]]:
    """Each launch, and its difference; empty if there is none."""
    for some in (planned[begin : begin + _AT_ONCE] for begin in range(0, len(planned), _AT_ONCE)):
        host = _HOST.build([(f"k{index}", _HOST.kernel(each.plan)) for index, each in enumerate(some)])
        ours = CudaKernels([[each] for each in some])
        for each, built in zip(some, host, strict=True):
            yield each, _difference(each, built, ours)


def _difference(each: Planned, built: Built, ours: CudaKernels) -> str:
    torch.manual_seed(0)
    inputs = {value: _drawn(value, each.ops) for value in each.inputs}
    theirs = {value: _filled(value) for value in (*each.outputs, *each.scratch)}
    scalars = torch.tensor(_numbers(each.scalars), dtype=torch.int64)
    pointer = [ctypes.c_void_p(scalars.data_ptr())] if len(scalars) else []
    built.function(*(tensor.clone() for tensor in inputs.values()), *theirs.values(), *pointer)
    memory = dict(inputs)
    try:
        ours.run([each], memory, number=_numbers)
        for value in each.outputs:
            assert_near(memory[value], theirs[value])
    except AssertionError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  # whatever one kernel does, the others are tried
        return repr(error)
    return ""


def _numbers(extents: tuple) -> tuple[int, ...]:
    return tuple(map(sample_of, extents))


def _filled(value: Value) -> torch.Tensor:
    return torch.full(_numbers(value.shape), 3, dtype=getattr(torch, value.dtype))


def _drawn(value: Value, ops: tuple[str, ...]) -> torch.Tensor:
    shape, dtype = _numbers(value.shape), getattr(torch, value.dtype)
    if dtype is torch.bool:
        return torch.rand(shape) > 0.3
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=torch.float64).mul(0.8).to(dtype)
    signed = not any("shift" in op for op in ops) and dtype is not torch.uint8
    numbers = torch.randint(1, 6, shape)  # nothing is divided by zero
    return torch.where(torch.rand(shape) < 0.5, -numbers, numbers).to(dtype) if signed else numbers.to(dtype)


def main(arguments: list[str]) -> int:
    """Collects and checks; the number of kernels that differ."""
    files = [each for each in arguments if not each.startswith("-")]
    options = [each for each in arguments if each.startswith("-")]
    files = files or [str(ROOT / "tests" / "bridge" / "compile" / f"test_{name}.py") for name in _DEFAULT]
    with collected() as plans:
        pytest.main(["-q", "-p", "no:cacheprovider", *options, *files])
    print(f"{len(plans)} plans", flush=True)
    wrong = 0
    for each, difference in check([each for each in plans.values() if all(map(_has_elements, each.outputs))]):
        if difference:
            wrong += 1
            print(f"{each.plan}\n{each.ops} {[_numbers(v.shape) for v in each.inputs]}: {difference}", flush=True)
    print(f"{len(plans)} kernels, {wrong} differ")
    return wrong


def _has_elements(value: Value) -> bool:
    return math.prod(_numbers(value.shape)) > 0


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
