"""Running a Relax function on torch tensors, and building small ones to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import tvm
from tvm import relax

from autodiff.body import Scope
from autodiff.ir import Constant, Expr, Function, IRModule, Var, build_function, dtype, shape


def tensor_type(tensor: torch.Tensor) -> relax.TensorType:
    """The Relax type of a torch tensor."""
    return relax.TensorType(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def function(build: Callable, *args: torch.Tensor, names: Sequence[str] = ()) -> Function:
    """The function in flat form that ``build(scope, *params)`` describes; ``build`` returns one expression or a list.

    Parameters have the types of ``args`` and names ``p0``, ``p1``, ... or the given ones; results ``y0``, ``y1``, ...
    """
    names = list(names) or [f"p{index}" for index in range(len(args))]
    params = [relax.Var(name, tensor_type(arg)) for name, arg in zip(names, args, strict=True)]
    scope = Scope(names)
    outputs = build(scope, *params)
    outputs = outputs if isinstance(outputs, list) else [outputs]
    return build_function(params, scope.body, [_bound(out, f"y{i}", scope) for i, out in enumerate(outputs)])


def _bound(output: Expr, name: str, scope: Scope) -> Expr:
    return output if isinstance(output, Var | Constant) else scope.emit(output, name)


def evaluate(func: Function, *args: torch.Tensor) -> list[torch.Tensor]:
    """The results of a function in flat form, compiled for LLVM by TVM's default pipeline."""
    for param, arg in zip(func.params, args, strict=True):
        assert tensor_type(arg) == param.ty or (shape(param), dtype(param)) == (
            tuple(arg.shape),
            str(arg.dtype).removeprefix("torch."),
        ), f"{param.name}: wanted {param.ty}, got {tensor_type(arg)}"
    module = IRModule({"main": func.with_attr("global_symbol", "main")})
    machine = relax.VirtualMachine(tvm.compile(module, "llvm"), tvm.cpu())
    return list(machine["main"](*[arg.detach().contiguous() for arg in args]))
