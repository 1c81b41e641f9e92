"""Machine code for the CPU: PrimFuncs → a library by TVM's LLVM, whose parallel loops run on torch's threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.ir import IRModule
from tvm.target import Target
from tvm.tirx import PrimFunc

from bridge.base.log import channel
from bridge.compile.codegen.lowering import lower_loops
from bridge.compile.codegen.tir import LOOPS_ATTR
from bridge.compile.cpu.host import features, llvm_version
from bridge.compile.cpu.threads import CONNECT, connect_function, launcher
from bridge.compile.runtime.library_file import REFUSALS, library_bytes, loaded

__all__ = ["CpuLibraries", "kernel_source"]

_LOG = channel("cache")

#: Form -> what TVM's LLVM modules call it (``None``: not compiled at all).
_FORMS = {"tvmscript": None, "llvm": "ll", "asm": "s"}


tirx.register_tir_pipeline("bridge_loops", lower_loops)


def _compiled(funcs: Mapping[str, PrimFunc], target: Target, loops: bool) -> tvm.runtime.Module:
    module = IRModule({name: func.with_attr("global_symbol", name) for name, func in funcs.items()})
    return tvm.tirx.build(module, target, pipeline="bridge_loops" if loops else "default")


@dataclass(frozen=True)
class CpuLibraries:
    """Libraries of functions for a target, a :class:`~bridge.compile.runtime.kernel_store.Libraries`.

    Their parallel loops run on torch's threads where :mod:`bridge.compile.cpu.threads` can arrange that.
    """

    target: Target

    @property
    def key(self) -> tuple[str, ...]:
        """The target, what LLVM sees of this processor, its version, and how loops are launched."""
        return str(self.target), features(), llvm_version(), "tvm" if launcher() is None else "torch"

    def build(self, functions: Mapping[str, PrimFunc], loops: bool) -> tvm.runtime.Module:
        return _connected(self._unconnected(functions, loops))

    def build_bytes(self, functions: Mapping[str, PrimFunc], loops: bool) -> tuple[tvm.runtime.Module, bytes | None]:
        """LLVM's object code, linked, and loaded as another process will load it; the same machine code."""
        library = self._unconnected(functions, loops)
        try:
            content = library_bytes(library)
            return self.load(content), content
        except REFUSALS as error:
            _LOG.info("kernels are not kept: %s", error)
            return _connected(library), None

    def load(self, content: bytes) -> tvm.runtime.Module:
        return _connected(loaded(content))

    def _unconnected(self, functions: Mapping[str, PrimFunc], loops: bool) -> tvm.runtime.Module:
        more = {} if launcher() is None else {CONNECT: connect_function()}
        return _compiled({**functions, **more}, self.target, loops)


def _connected(library: tvm.runtime.Module) -> tvm.runtime.Module:
    address = launcher()
    if address is not None:
        library[CONNECT](address)
    return library


def kernel_source(func: PrimFunc, name: str, target: Target, form: str) -> str:
    """A kernel as text; compiled forms are compiled anew, as :class:`CpuLibraries` does.

    Raises:
        ValueError: ``form`` is not one of ``"tvmscript"``, ``"llvm"``, ``"asm"``.
    """
    if form not in _FORMS:
        raise ValueError(f"form: wanted one of {', '.join(map(repr, _FORMS))}, got {form!r}")
    if _FORMS[form] is None:
        return func.with_attr("global_symbol", name).script()
    library = _compiled({name: func}, target, bool(func.attrs.get(LOOPS_ATTR, False)))
    return library.inspect_source(_FORMS[form])
