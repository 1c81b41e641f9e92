"""Native form: a forward → a library that TVM's runtime runs by itself, in C++ or any language that it has.

The forward's Relax function with the parameters bound, library calls spelled out in Relax's own operators
(:mod:`bridge.export.relax_only`), compiled by TVM's default pipeline: portable rather than quick, and eager's numbers
to rounding. It runs on the device that the module was compiled for. ``main`` takes the argument tensors in order and
returns the array of the forward's results; ``inputs`` makes such argument tensors, to be filled
(``examples/run_compiled.cc``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import tvm
from torch import nn
from tvm import relax

from autodiff.ir import Function, IRModule, Var, build_function, dtype, shape
from autodiff.typed import normalizer
from bridge.base.devices import HOST
from bridge.base.errors import Unsupported, UnsupportedModule
from bridge.compile import Backend
from bridge.dispatch import Entry
from bridge.export.relax_only import NoRelaxForm, without_library_calls
from bridge.lowering import LoweredCall

__all__ = ["native_module", "save_native"]


_EVALUATION = "add an entry under module.eval()"
_NO_NUMBERS = (
    "let forward read no numbers (transformers looks at attention masks of two dimensions, not at those of four)"
)


def save_native(module: nn.Module, entries: Sequence[Entry], path: Path) -> dict[str, Any]:
    """Writes the library of the newest entry that has a native form; which one it is, its inputs and results.

    Raises:
        UnsupportedModule: no entry has one, each with its reason; or there is no C++ compiler.
    """
    problems = []
    for number in reversed(range(len(entries))):
        entry = entries[number]
        captured = entry.lowered.captured
        where = f"{captured.module_name}.forward"
        if not isinstance(entry.lowered, LoweredCall):
            problems.append(Unsupported("a loaded call", where, "has no native form", "save it from its source"))
            continue
        imported = entry.lowered.imported
        if captured.draws or captured.mutated or imported.checks or captured.recomputed:
            what, hint = "checks", _NO_NUMBERS
            if captured.draws or captured.mutated:
                what, hint = "random draws" if captured.draws else "new values of buffers", _EVALUATION
            problems.append(Unsupported(what, where, "has no native form", hint))
            continue
        try:
            function = without_library_calls(entry.lowered["forward"].function)
        except NoRelaxForm as error:
            problems.append(Unsupported(str(error), where, "is torch's kernel: no native form"))
            continue
        _build(function, entry.guard.tensors(module), path, captured.module_name, entry.backend)
        inputs = function.params[len(captured.module_tensors) :]
        return {"entry": number, "inputs": [[str(each.name), list(shape(each)), dtype(each)] for each in inputs]}
    raise UnsupportedModule(type(module).__name__, problems, what="saved in a native form")


def _build(function: Function, owned: Sequence[torch.Tensor], path: Path, name: str, backend: Backend) -> None:
    try:
        backend.executable(native_module(function, owned)).export_library(str(path))
    except (RuntimeError, FileNotFoundError) as error:
        problem = Unsupported("a native form", name, f"it could not be linked: {error}", "install a C++ compiler")
        raise UnsupportedModule(name, [problem], what="saved in a native form") from error


def native_module(function: Function, owned: Sequence[torch.Tensor]) -> IRModule:
    """A forward, without library calls, and the module's tensors → ``main`` and ``inputs``."""
    numbers = {
        param.name: tvm.runtime.from_dlpack(tensor.detach().to(HOST).contiguous())
        for param, tensor in zip(function.params, owned, strict=False)
    }
    functions = {"main": function, "inputs": _new(function.params[len(owned) :])}
    functions = {name: each.with_attr("global_symbol", name) for name, each in functions.items()}
    return relax.transform.BindParams("main", numbers)(IRModule(functions))


def _new(params: Sequence[Var]) -> Function:
    """A function that allocates tensors such as these parameters take.

    No constants: TVM would fold what fills them, and give two inputs of one form, and every call, the same memory.
    """
    allocate = relax.op.builtin.alloc_tensor
    made = [normalizer()(allocate(relax.ShapeExpr(shape(each)), dtype(each), 0)) for each in params]
    tensors = [Var(f"{param.name}_input", param.ty) for param in params]
    return build_function([], zip(tensors, made, strict=True), tensors)
