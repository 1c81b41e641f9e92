"""Building small Relax functions in flat form and comparing their programs with torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tvm import relax

from autodiff.ir import Function
from bridge.compile import CompileOptions, Program, backend_for, compile_function


def function(params: Sequence[tuple[Sequence[int], str]], body: Callable) -> Function:
    """``body(emit, *params) -> results``; ``emit`` binds an expression to a variable."""
    builder = relax.BlockBuilder()
    variables = [relax.Var(f"p{i}", relax.TensorType(list(shape), dtype)) for i, (shape, dtype) in enumerate(params)]
    with builder.function("main", variables):
        with builder.dataflow():
            results = [
                result if not isinstance(result, relax.Var) or result in variables else builder.emit_output(result)
                for result in body(builder.emit, *variables)
            ]
        builder.emit_func_output(relax.Tuple(results))
    return builder.get()["main"]


def current_options() -> CompileOptions:
    """The current options for this machine's processor."""
    return CompileOptions.current(backend_for(None))


def program(params: Sequence[tuple[Sequence[int], str]], body: Callable) -> Program:
    return compile_function(function(params, body), name="test")


def run(inputs: Sequence[torch.Tensor], body: Callable) -> list[torch.Tensor]:
    """Compile ``body`` for these inputs and run it."""
    params = [(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in inputs]
    return program(params, body)(inputs)


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, rtol: float | None = None, atol: float | None = None) -> None:
    """Equal shape and dtype, values close, nan where nan."""
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, equal_nan=True)
    assert ours.is_contiguous()
