"""Kernel source: a PrimFunc → its text as TVMScript, LLVM IR or assembly."""

from __future__ import annotations

import tvm
from tvm.ir import IRModule
from tvm.target import Target
from tvm.tirx import PrimFunc

from bridge.compile.codegen.tir import LOOPS_ATTR

__all__ = ["FORMS", "kernel_source"]

#: Form -> what TVM's LLVM modules call it (``None``: not compiled at all).
FORMS = {"tvmscript": None, "llvm": "ll", "asm": "s"}


def kernel_source(func: PrimFunc, name: str, target: Target, form: str) -> str:
    """A kernel as text; compiled forms are compiled anew, as :func:`bridge.compile.runtime.build.build_kernels` does.

    Raises:
        ValueError: ``form`` is not one of ``"tvmscript"``, ``"llvm"``, ``"asm"``.
    """
    if form not in FORMS:
        raise ValueError(f"form: wanted one of {', '.join(map(repr, FORMS))}, got {form!r}")
    named = func.with_attr("global_symbol", name)
    if FORMS[form] is None:
        return named.script()
    pipeline = "bridge_loops" if func.attrs.get(LOOPS_ATTR, False) else "default"
    module = tvm.tirx.build(IRModule({name: named}), target, pipeline=pipeline)
    return module.inspect_source(FORMS[form])
