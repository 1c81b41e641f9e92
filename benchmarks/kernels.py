"""Fused kernels against eager torch (and ``torch.compile`` with ``--inductor``): medians of interleaved runs.

    python -m benchmarks.kernels [--inductor] [--runs 30]

Prints one Markdown table. GB/s counts every input and every result once. ``of copy`` compares with a ``copy_`` of as
many bytes between two existing tensors, in the same turn: below it, memory is the limit. ``in cache`` shows whether
arithmetic is: the time of the kernel's instructions alone, extrapolated from two calls on tensors that stay in the
second-level cache, on one thread. The remainder for tensors of size zero is the price of a call.

The process keeps freed memory (``mallopt``), so that no peer pays for page faults by chance.
"""

from __future__ import annotations

import argparse
import ctypes
import math
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
COMPUTE_BOUND = 0.7
"""A kernel that spends this share of its time on instructions is bound by them and not by memory."""

Shapes = tuple[tuple[tuple[int, ...], str], ...]


@dataclass(frozen=True)
class Case:
    """``body`` builds the Relax function, ``eager`` computes the same with torch.

    ``shapes(a, b)`` are the inputs for ``a * b`` batches of rows; ``full`` is measured, ``small`` and twice that
    fit into a core's cache.
    """

    name: str
    shapes: Callable[[int, int], Shapes]
    body: Callable
    eager: Callable
    full: tuple[int, int] = (128, 8)
    small: tuple[int, int] = (1, 8)

    @property
    def inputs(self) -> Shapes:
        return self.shapes(*self.full)


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


def softmax_dropout_backward(emit: Callable, g: relax.Var, keep: relax.Var, y: relax.Var) -> list[relax.Var]:
    kept = emit(R.multiply(emit(R.astype(keep, FLOAT)), const(1 / 0.9)))
    (inner,) = softmax_backward(emit, emit(R.multiply(g, kept)), y)
    return [emit(R.multiply(inner, const(0.125)))]


def softmax_dropout_backward_eager(g, keep, y):
    return torch.ops.aten._softmax_backward_data(g * (keep * (1 / 0.9)), y, -1, torch.float32) * 0.125


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


def rms_norm(emit, x, weight) -> list[relax.Var]:
    return [emit(R.nn.rms_norm(x, weight, axes=[-1], epsilon=1e-6))]


def swiglu(emit, gate, up) -> list[relax.Var]:
    return [emit(R.multiply(emit(R.nn.silu(gate)), up))]


def lstm_gates(emit, i, f, g, o, c) -> list[relax.Var]:
    kept = emit(R.multiply(emit(R.sigmoid(f)), c))
    new = emit(R.add(kept, emit(R.multiply(emit(R.sigmoid(i)), emit(R.tanh(g))))))
    return [emit(R.multiply(emit(R.sigmoid(o)), emit(R.tanh(new)))), new]


def lstm_gates_eager(i, f, g, o, c):
    new = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * new.tanh(), new


def cases() -> list[Case]:
    def tensors(width: int, *kinds: str) -> Callable[[int, int], Shapes]:
        """Matrices of ``width`` columns, row statistics ("row") and vectors of a row's length ("weight")."""

        def shapes(a: int, b: int) -> Shapes:
            rows = a * b
            known = {"row": ((rows, 1), FLOAT), "weight": ((width,), FLOAT)}
            return tuple(known.get(kind, ((rows, width), kind)) for kind in kinds)

        return shapes

    def scores(*kinds: str) -> Callable[[int, int], Shapes]:
        """Attention scores of ``a`` sequences and ``b`` heads, and an additive mask over the keys ("mask")."""

        def shapes(a: int, b: int) -> Shapes:
            return tuple(((a, 1, 1, 128), FLOAT) if kind == "mask" else ((a, b, 128, 128), kind) for kind in kinds)

        return shapes

    attention = {"full": (8, 12), "small": (1, 1)}
    return [
        Case(
            "bias + GELU [1024, 3072]",
            tensors(3072, FLOAT, "weight"),
            lambda emit, x, b: [emit(R.nn.gelu(emit(R.add(x, b))))],
            lambda x, b: functional.gelu(x + b),
        ),
        Case(
            "GELU backward + column sum [1024, 3072]",
            tensors(3072, FLOAT, FLOAT),
            lambda emit, g, x: (lambda dx: [dx, emit(R.sum(dx, [0]))])(emit(R.multiply(g, gelu_derivative(emit, x)))),
            lambda g, x: (lambda dx: (dx, dx.sum(0)))(torch.ops.aten.gelu_backward(g, x)),
        ),
        Case(
            "softmax [8, 12, 128, 128]",
            scores(FLOAT),
            lambda emit, x: [emit(R.nn.softmax(x, -1))],
            lambda x: torch.softmax(x, -1),
            **attention,
        ),
        Case(
            "scale + mask + softmax + dropout [8, 12, 128, 128]",
            scores(FLOAT, "mask", "bool"),
            softmax_dropout,
            lambda x, m, k: (lambda y: (y * (k * (1 / 0.9)), y))(torch.softmax(x * 0.125 + m, -1)),
            **attention,
        ),
        Case(
            "softmax backward [8, 12, 128, 128]",
            scores(FLOAT, FLOAT),
            softmax_backward,
            lambda g, y: torch.ops.aten._softmax_backward_data(g, y, -1, torch.float32),
            **attention,
        ),
        Case(
            "dropout + softmax backward + scale [8, 12, 128, 128]",
            scores(FLOAT, "bool", FLOAT),
            softmax_dropout_backward,
            softmax_dropout_backward_eager,
            **attention,
        ),
        Case(
            "log-softmax [8, 12, 128, 128]",
            scores(FLOAT),
            lambda emit, x: [emit(R.nn.log_softmax(x, -1))],
            lambda x: torch.log_softmax(x, -1),
            **attention,
        ),
        Case(
            "LayerNorm [1024, 768]",
            tensors(768, FLOAT, "weight", "weight"),
            lambda emit, x, w, b: [emit(R.nn.layer_norm(x, w, b, axes=[-1], epsilon=1e-12))],
            lambda x, w, b: functional.layer_norm(x, (768,), w, b, 1e-12),
        ),
        Case(
            "bias + dropout + residual + LayerNorm [1024, 768]",
            tensors(768, FLOAT, "weight", "bool", FLOAT, "weight", "weight"),
            residual_layer_norm,
            residual_layer_norm_eager,
        ),
        Case(
            "LayerNorm backward + column sums [1024, 768]",
            tensors(768, FLOAT, FLOAT, "row", "row", "weight"),
            layer_norm_backward,
            lambda g, x, m, r, w: torch.ops.aten.native_layer_norm_backward(
                g, x, (768,), m, r, w, w, (True, True, True)
            ),
        ),
        Case(
            "RMSNorm [1024, 768]",
            tensors(768, FLOAT, "weight"),
            rms_norm,
            lambda x, w: functional.rms_norm(x, (768,), w, 1e-6),
        ),
        Case(
            "SwiGLU [1024, 2048]",
            tensors(2048, FLOAT, FLOAT),
            swiglu,
            lambda gate, up: functional.silu(gate) * up,
        ),
        Case(
            "LSTM gates [1024, 512]",
            tensors(512, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT),
            lstm_gates,
            lstm_gates_eager,
        ),
        Case(
            "column sum [1024, 3072]",
            tensors(3072, FLOAT),
            lambda emit, x: [emit(R.sum(x, [0]))],
            lambda x: x.sum(0),
        ),
        Case(
            "bias + GELU [14, 3072]",
            tensors(3072, FLOAT, "weight"),
            lambda emit, x, b: [emit(R.nn.gelu(emit(R.add(x, b))))],
            lambda x, b: functional.gelu(x + b),
            full=(14, 1),
        ),
        Case(
            "bias + dropout + residual + LayerNorm [14, 768]",
            tensors(768, FLOAT, "weight", "bool", FLOAT, "weight", "weight"),
            residual_layer_norm,
            residual_layer_norm_eager,
            full=(14, 1),
        ),
    ]


def compiled(case: Case, inputs: Shapes) -> Program:
    builder = relax.BlockBuilder()
    params = [relax.Var(f"p{i}", relax.TensorType(list(shape), dtype)) for i, (shape, dtype) in enumerate(inputs)]
    with builder.function("main", params):
        with builder.dataflow():
            results = [builder.emit_output(result) for result in case.body(builder.emit, *params)]
        builder.emit_func_output(relax.Tuple(results))
    return compile_function(builder.get()["main"], name=case.name)


def samples(inputs: Shapes) -> list[torch.Tensor]:
    return [torch.rand(s) > 0.1 if dtype == "bool" else torch.randn(s) for s, dtype in inputs]


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


def in_cache_seconds(case: Case, runs: int) -> tuple[float, float]:
    """Seconds of the full case's instructions on all threads, and of a call without them: from two calls whose tensors
    stay in the cache."""
    threads = torch.get_num_threads()
    a, b = case.small
    calls = []
    for shapes in (case.shapes(a, b), case.shapes(a, 2 * b)):
        program, inputs = compiled(case, shapes), samples(shapes)
        calls.append(lambda p=program, i=inputs: p(i))
    torch.set_num_threads(1)
    try:
        one, two = medians(calls, 10 * runs)
    finally:
        torch.set_num_threads(threads)
    return (two - one) * math.prod(case.full) / math.prod(case.small) / threads, max(0.0, 2 * one - two)


def copy_of(nbytes: int) -> Callable[[], object]:
    """A copy that moves ``nbytes``: half of them read, half written."""
    source, target = torch.ones(max(nbytes // 8, 1)), torch.ones(max(nbytes // 8, 1))
    return lambda: target.copy_(source)


def keep_freed_memory() -> None:
    """Makes glibc serve all memory from its heap and keep it; does nothing elsewhere."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        trim_threshold, mmap_threshold = -1, -3
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, 2**31 - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    keep_freed_memory()
    print(
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__},"
    )
    print(f"apache-tvm {tvm.__version__}\n")
    heads = ["kernel", "ours ms", "eager ms", "ours/eager", "inductor ms", "ours/inductor", "copy ms", "in cache ms"]
    heads += ["GB/s", "of copy", "bound by", "compile s", "steps"]
    print("| " + " | ".join(heads) + " |")
    print("|---" * len(heads) + "|")
    for case in cases():
        if options.only in case.name:
            print(measured(case, options.inductor, options.runs))


def measured(case: Case, inductor: bool, runs: int) -> str:
    """One line of the table."""
    torch.manual_seed(0)
    inputs = samples(case.inputs)
    program = compiled(case, case.inputs)
    moved = sum(tensor.nbytes for tensor in [*inputs, *program(inputs)])
    functions = [lambda: program(inputs), lambda: case.eager(*inputs), copy_of(moved)]
    if inductor:
        fast = torch.compile(case.eager)
        fast(*inputs)
        functions.append(lambda: fast(*inputs))
    with torch.no_grad():
        ours, eager, copy, *others = medians(functions, runs)
    arithmetic, call = in_cache_seconds(case, runs)
    bound = "arithmetic" if arithmetic >= COMPUTE_BOUND * ours else "the call" if call >= ours / 3 else "memory"
    cells = [case.name, f"{ours * 1e3:.3f}", f"{eager * 1e3:.3f}", f"{ours / eager:.2f}"]
    cells += [f"{others[0] * 1e3:.3f}", f"{ours / others[0]:.2f}"] if others else ["", ""]
    cells += [f"{copy * 1e3:.3f}", f"{arithmetic * 1e3:.3f}", f"{moved / ours / 1e9:.1f}", f"{copy / ours:.0%}", bound]
    cells += [f"{sum(program.timings.values()):.2f}", str(len(program.steps))]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
