"""Machine code for the CPU: PrimFuncs → a library by TVM's LLVM, whose parallel loops run on torch's threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tvm
from tvm import tirx
from tvm.ir import IRModule
from tvm.target import Target
from tvm.tirx import PrimFunc

from bridge.compile.codegen.tir import LOOPS_ATTR
from bridge.compile.cpu.threads import CONNECT, connect_function, launcher

__all__ = ["build_library", "kernel_source"]

#: Form -> what TVM's LLVM modules call it (``None``: not compiled at all).
_FORMS = {"tvmscript": None, "llvm": "ll", "asm": "s"}


def _loop_pipeline() -> tuple[tvm.transform.Pass, Callable, Callable]:
    """Lowering for kernels that are loops already: the passes that the packed calling convention needs, no others.

    TVM's default pipeline simplifies under an analyzer that substitutes every bound variable by its value, which is
    exponential in the length of a chain of bindings (a polynomial is one). Nothing here does that.

    The calling convention's checks of every argument (number of dimensions, each extent, dtype, device, strides) are
    more code than most kernels and take more than half of LLVM's time. A kernel is called only by the Program that it
    was built for, which checks its inputs once per call and makes everything else itself; so they are left out.
    """
    passes = tvm.transform.Sequential(
        [
            tirx.transform.BF16ComputeLegalize(),
            tirx.transform.VerifyMemory(),
            tirx.transform.AnnotateEntryFunc(),
            tirx.transform.SplitHostDevice(),
            tirx.transform.MakePackedAPI(),
            tirx.transform.SkipAssert(),
            tirx.transform.BF16StorageLegalize(),
        ]
    )
    return passes, lambda: tirx.transform.LowerTVMBuiltin(), lambda: tvm.transform.Sequential([])


tirx.register_tir_pipeline("bridge_loops", _loop_pipeline)


def _compiled(funcs: Mapping[str, PrimFunc], target: Target, loops: bool) -> tvm.runtime.Module:
    module = IRModule({name: func.with_attr("global_symbol", name) for name, func in funcs.items()})
    return tvm.tirx.build(module, target, pipeline="bridge_loops" if loops else "default")


def build_library(funcs: Mapping[str, PrimFunc], target: Target, loops: bool) -> tvm.runtime.Module:
    """One library of functions; ``loops``: they are loops already (see :data:`~bridge.compile.codegen.tir.LOOPS_ATTR`).

    Their parallel loops run on torch's threads where :mod:`bridge.compile.cpu.threads` can arrange that.
    """
    address = launcher()
    if address is None:
        return _compiled(funcs, target, loops)
    library = _compiled({**funcs, CONNECT: connect_function()}, target, loops)
    library[CONNECT](address)
    return library


def kernel_source(func: PrimFunc, name: str, target: Target, form: str) -> str:
    """A kernel as text; compiled forms are compiled anew, as :func:`build_library` does.

    Raises:
        ValueError: ``form`` is not one of ``"tvmscript"``, ``"llvm"``, ``"asm"``.
    """
    if form not in _FORMS:
        raise ValueError(f"form: wanted one of {', '.join(map(repr, _FORMS))}, got {form!r}")
    if _FORMS[form] is None:
        return func.with_attr("global_symbol", name).script()
    library = _compiled({name: func}, target, bool(func.attrs.get(LOOPS_ATTR, False)))
    return library.inspect_source(_FORMS[form])
