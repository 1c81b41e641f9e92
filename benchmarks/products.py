"""Matrix products in generated code beside torch's, and what merging three products that share an operand would gain.

The three products of a linear layer (rows x inputs times inputs x outputs): the result, the gradient of its input, the
gradient of its weight. Peers take turns; medians, ratios, and the arithmetic rate of each.

    python -m benchmarks.products
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import tvm
from tvm.relax import BlockBuilder, TensorType, Var
from tvm.relax import op as R

from autodiff.ir import build_function
from bridge.compile import Program, clear_choices, compile_function

LINEARS = [(14, 768, 768), (14, 768, 3072), (128, 768, 768), (128, 3072, 768), (1024, 768, 3072), (1024, 3072, 768)]
MERGED = [(14, 768, 768), (128, 768, 768), (1024, 768, 768)]
WARM_UP = 3


def product(a: torch.Tensor, b: torch.Tensor) -> Callable[[], object]:
    """Our ``a @ b`` of two matrices that are dense or transposed, as a program would run it."""
    params, operands, inputs, body = [], [], [], []
    normalize = BlockBuilder().normalize
    for name, matrix in (("a", a), ("b", b)):
        stored = matrix if matrix.is_contiguous() else matrix.t()
        param = operand = Var(name, TensorType(tuple(stored.shape), "float32"))
        if stored is not matrix:
            call = normalize(R.permute_dims(param))
            operand = Var(f"{name}_t", call.ty)
            body.append((operand, call))
        params.append(param)
        operands.append(operand)
        inputs.append(stored)
    call = normalize(R.matmul(*operands))
    result = Var("c", call.ty)
    program: Program = compile_function(build_function(params, [*body, (result, call)], [result]), name="product")
    return lambda: program(inputs)


def medians(peers: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds of each peer, by turns."""
    times: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(rounds + WARM_UP):
        for name, run in peers.items():
            started = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - started))
    return {name: statistics.median(values[WARM_UP:]) for name, values in times.items()}


def linear_rows(m: int, k: int, n: int, rounds: int) -> list[str]:
    x, w, g = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)
    rows = []
    for name, a, b in (("result", x, w.t()), ("input's gradient", g, w), ("weight's gradient", g.t(), x)):
        out = torch.empty(a.shape[0], b.shape[1])
        found = medians({"torch": lambda a=a, b=b, out=out: torch.mm(a, b, out=out), "ours": product(a, b)}, rounds)
        rate = {peer: f"{2e-6 * m * k * n / ms:.0f}" for peer, ms in found.items()}
        rows.append(
            f"| {m} x {k} to {n} | {name} | {found['torch']:.3f} | {found['ours']:.3f} |"
            f" {found['ours'] / found['torch']:.2f} | {rate['torch']} | {rate['ours']} |"
        )
    return rows


def merged_row(m: int, k: int, n: int, rounds: int) -> str:
    x, weights = torch.randn(m, k), [torch.randn(n, k) for _ in range(3)]
    three = [product(x, w.t()) for w in weights]
    found = medians({"three": lambda: [run() for run in three], "one": product(x, torch.cat(weights).t())}, rounds)
    return f"| {m} x {k} to 3 x {n} | {found['three']:.3f} | {found['one']:.3f} | {found['one'] / found['three']:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    clear_choices()
    print(f"float32, torch {torch.__version__}, TVM {tvm.__version__}, {torch.get_num_threads()} threads\n")
    print("| linear layer | product | torch ms | ours ms | ours / torch | torch GFLOP/s | ours GFLOP/s |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for size in LINEARS:
        print("\n".join(linear_rows(*size, options.rounds)), flush=True)
    print("\n| query, key, value | three products ms | one merged ms | one / three |\n|---|---:|---:|---:|")
    for size in MERGED:
        print(merged_row(*size, options.rounds), flush=True)


if __name__ == "__main__":
    main()
