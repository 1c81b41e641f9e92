"""Fused kernels against eager torch (and ``torch.compile`` with ``--inductor``): medians of interleaved runs.

    python -m benchmarks.kernels [--inductor] [--runs 30]

Prints one Markdown table. GB/s counts every input and every result once.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import tvm
from torch.nn import functional
from tvm import relax
from tvm.relax import op as R

from bridge.compile import Program, compile_function

FLOAT = "float32"


@dataclass(frozen=True)
class Case:
    """``body`` builds the Relax function, ``eager`` computes the same with torch."""

    name: str
    inputs: tuple[tuple[tuple[int, ...], str], ...]
    body: Callable
    eager: Callable


def const(value: float) -> relax.Expr:
    return relax.const(value, FLOAT)


def gelu_derivative(emit: Callable, x: relax.Var) -> relax.Var:
    cdf = emit(R.multiply(emit(R.add(emit(R.erf(emit(R.multiply(x, const(0.5**0.5))))), const(1.0))), const(0.5)))
    square = emit(R.multiply(emit(R.multiply(x, x)), const(-0.5)))
    density = emit(R.multiply(emit(R.exp(square)), const(0.3989422804014327)))
    return emit(R.add(cdf, emit(R.multiply(x, density))))


def softmax_dropout(emit: Callable, x: relax.Var, mask: relax.Var, keep: relax.Var) -> list[relax.Var]:
    scaled = emit(R.add(emit(R.multiply(x, const(0.125))), mask))
    y = emit(R.nn.softmax(scaled, -1))
    kept = emit(R.multiply(emit(R.astype(keep, FLOAT)), const(1 / 0.9)))
    return [emit(R.multiply(y, kept)), y]


def softmax_backward(emit: Callable, g: relax.Var, y: relax.Var) -> list[relax.Var]:
    product = emit(R.multiply(g, y))
    return [emit(R.subtract(product, emit(R.multiply(y, emit(R.sum(product, [-1], keepdims=True))))))]


def residual_layer_norm(emit, x, bias, keep, residual, weight, shift) -> list[relax.Var]:
    kept = emit(R.multiply(emit(R.astype(keep, FLOAT)), const(1 / 0.9)))
    total = emit(R.add(emit(R.multiply(emit(R.add(x, bias)), kept)), residual))
    return [emit(R.nn.layer_norm(total, weight, shift, axes=[-1], epsilon=1e-12)), total]


def residual_layer_norm_eager(x, bias, keep, residual, weight, shift):
    total = (x + bias) * (keep * (1 / 0.9)) + residual
    return functional.layer_norm(total, (x.shape[-1],), weight, shift, 1e-12), total


def layer_norm_backward(emit, g, x, mean, rstd, weight) -> list[relax.Var]:
    normal = emit(R.multiply(emit(R.subtract(x, mean)), rstd))
    gw = emit(R.multiply(g, weight))
    first = emit(R.mean(gw, [-1], keepdims=True))
    second = emit(R.mean(emit(R.multiply(gw, normal)), [-1], keepdims=True))
    inner = emit(R.subtract(emit(R.subtract(gw, first)), emit(R.multiply(normal, second))))
    return [
        emit(R.multiply(inner, rstd)),
        emit(R.sum(emit(R.multiply(g, normal)), [0])),
        emit(R.sum(g, [0])),
    ]


def cases() -> list[Case]:
    wide, narrow, scores = ((1024, 3072), FLOAT), ((1024, 768), FLOAT), ((8, 12, 128, 128), FLOAT)
    keep, mask = ((8, 12, 128, 128), "bool"), ((8, 1, 1, 128), FLOAT)
    row, weight = ((1024, 1), FLOAT), ((768,), FLOAT)
    return [
        Case(
            "bias + GELU [1024, 3072]",
            (wide, ((3072,), FLOAT)),
            lambda emit, x, b: [emit(R.nn.gelu(emit(R.add(x, b))))],
            lambda x, b: functional.gelu(x + b),
        ),
        Case(
            "GELU backward + column sum [1024, 3072]",
            (wide, wide),
            lambda emit, g, x: (lambda dx: [dx, emit(R.sum(dx, [0]))])(emit(R.multiply(g, gelu_derivative(emit, x)))),
            lambda g, x: (lambda dx: (dx, dx.sum(0)))(torch.ops.aten.gelu_backward(g, x)),
        ),
        Case(
            "softmax [8, 12, 128, 128]",
            (scores,),
            lambda emit, x: [emit(R.nn.softmax(x, -1))],
            lambda x: torch.softmax(x, -1),
        ),
        Case(
            "scale + mask + softmax + dropout [8, 12, 128, 128]",
            (scores, mask, keep),
            softmax_dropout,
            lambda x, m, k: (lambda y: (y * (k * (1 / 0.9)), y))(torch.softmax(x * 0.125 + m, -1)),
        ),
        Case(
            "softmax backward [8, 12, 128, 128]",
            (scores, scores),
            softmax_backward,
            lambda g, y: torch.ops.aten._softmax_backward_data(g, y, -1, torch.float32),
        ),
        Case(
            "LayerNorm [1024, 768]",
            (narrow, weight, weight),
            lambda emit, x, w, b: [emit(R.nn.layer_norm(x, w, b, axes=[-1], epsilon=1e-12))],
            lambda x, w, b: functional.layer_norm(x, (768,), w, b, 1e-12),
        ),
        Case(
            "bias + dropout + residual + LayerNorm [1024, 768]",
            (narrow, weight, ((1024, 768), "bool"), narrow, weight, weight),
            residual_layer_norm,
            residual_layer_norm_eager,
        ),
        Case(
            "LayerNorm backward [1024, 768]",
            (narrow, narrow, row, row, weight),
            layer_norm_backward,
            lambda g, x, m, r, w: torch.ops.aten.native_layer_norm_backward(
                g, x, (768,), m, r, w, w, (True, True, True)
            ),
        ),
        Case(
            "column sum [1024, 3072]",
            (wide,),
            lambda emit, x: [emit(R.sum(x, [0]))],
            lambda x: x.sum(0),
        ),
        Case(
            "copy [1024, 3072]",
            (wide,),
            lambda emit, x: [emit(R.add(x, const(1.0)))],
            lambda x: x + 1.0,
        ),
    ]


def compiled(case: Case) -> Program:
    builder = relax.BlockBuilder()
    params = [relax.Var(f"p{i}", relax.TensorType(list(shape), dtype)) for i, (shape, dtype) in enumerate(case.inputs)]
    with builder.function("main", params):
        with builder.dataflow():
            results = [builder.emit_output(result) for result in case.body(builder.emit, *params)]
        builder.emit_func_output(relax.Tuple(results))
    return compile_function(builder.get()["main"], name=case.name)


def samples(case: Case) -> list[torch.Tensor]:
    return [torch.rand(s) > 0.1 if dtype == "bool" else torch.randn(s) for s, dtype in case.inputs]


def medians(functions: Sequence[Callable], runs: int) -> list[float]:
    """Seconds per call; the functions take turns."""
    spent: list[list[float]] = [[] for _ in functions]
    for turn in range(runs + 3):
        for seconds, function in zip(spent, functions, strict=True):
            started = time.perf_counter()
            function()
            if turn >= 3:
                seconds.append(time.perf_counter() - started)
    return [statistics.median(seconds) for seconds in spent]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--runs", type=int, default=30)
    options = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__},"
    )
    print(f"apache-tvm {tvm.__version__}\n")
    print("| kernel | ours ms | eager ms | ours/eager | inductor ms | ours/inductor | GB/s | compile s | steps |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case in cases():
        torch.manual_seed(0)
        inputs = samples(case)
        program = compiled(case)
        functions = [lambda p=program, i=inputs: p(i), lambda c=case, i=inputs: c.eager(*i)]
        if options.inductor:
            fast = torch.compile(case.eager)
            fast(*inputs)
            functions.append(lambda f=fast, i=inputs: f(*i))
        with torch.no_grad():
            ours, eager, *inductor = medians(functions, options.runs)
        moved = sum(tensor.nbytes for tensor in [*inputs, *program(inputs)]) / ours / 1e9
        theirs = f"{inductor[0] * 1e3:.3f} | {ours / inductor[0]:.2f}" if inductor else "| "
        print(
            f"| {case.name} | {ours * 1e3:.3f} | {eager * 1e3:.3f} | {ours / eager:.2f} | {theirs} | {moved:.1f} |"
            f" {sum(program.timings.values()):.2f} | {len(program.steps)} |"
        )


if __name__ == "__main__":
    main()
