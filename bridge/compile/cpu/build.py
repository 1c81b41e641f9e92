"""Machine code for the CPU: PrimFuncs → a library by TVM's LLVM, whose parallel loops run on torch's threads."""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm import tirx
from tvm.ir import IRModule
from tvm.target import Target
from tvm.tirx import PrimFunc

from bridge.compile.codegen.lowering import lower_loops
from bridge.compile.codegen.tir import LOOPS_ATTR
from bridge.compile.cpu.threads import CONNECT, connect_function, launcher

__all__ = ["build_library", "kernel_source"]

#: Form -> what TVM's LLVM modules call it (``None``: not compiled at all).
_FORMS = {"tvmscript": None, "llvm": "ll", "asm": "s"}


tirx.register_tir_pipeline("bridge_loops", lower_loops)


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
