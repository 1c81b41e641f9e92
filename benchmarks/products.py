"""Algorithms of matrix products beside torch's own, with the compiler's choice by measuring their classes.

The three products of a linear layer (result, gradients of input and weight) and the products of an attention, at their
real sizes. Algorithms take turns; medians, as ratios to torch's. On request, the gain of merging three products that
share an operand.

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
from bridge.base.session import SESSION
from bridge.compile import Program, compile_function, host_backend
from bridge.compile.cpu.products import CpuProducts, ProductTrial
from bridge.compile.schedule.products import LayoutClass, ProductShape, is_generated

LINEARS = [(14, 768, 768), (14, 768, 3072), (128, 768, 768), (128, 3072, 768), (1024, 768, 3072), (1024, 3072, 768)]
ATTENTIONS = [(1, 14), (1, 128), (8, 128)]
MERGED = [(14, 768, 768), (128, 768, 768), (1024, 768, 768)]
WARM_UP = 3


def product(a: torch.Tensor, b: torch.Tensor) -> Callable[[], object]:
    """Our ``a @ b`` of two dense or transposed matrices, as in a program."""
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


def linear_shapes(m: int, k: int, n: int, element_type: str) -> dict[str, ProductShape]:
    """The three products of a linear layer, operands laid out as in training."""
    row, column = LayoutClass("row"), LayoutClass("column")
    return {
        "result": ProductShape(element_type, 1, m, n, k, row, column),
        "input's gradient": ProductShape(element_type, 1, m, k, n, row, row),
        "weight's gradient": ProductShape(element_type, 1, n, k, m, column, row),
    }


def attention_shapes(batch: int, length: int, element_type: str) -> dict[str, ProductShape]:
    """Scores and mixed values of twelve heads of 64, in the memory layout of the linear layers' results."""
    heads = LayoutClass("row", copied=True)
    keys = LayoutClass("column", copied=True)
    return {
        "scores": ProductShape(element_type, 12 * batch, length, length, 64, heads, keys),
        "mixed": ProductShape(element_type, 12 * batch, length, 64, length, LayoutClass("row"), heads),
    }


def way_row(policy: CpuProducts, name: str, shape: ProductShape, rounds: int) -> str:
    """The time of each algorithm as a ratio to torch's own, and the policy's choice; generated code with its plan."""
    ways, trial = policy.ways(shape), ProductTrial.of(shape)
    found = medians(policy.runs(shape, trial, ways), rounds)
    usual, chosen = ways[0], policy.choose(shape)
    ratios = ", ".join(f"{way} {ms / found[usual]:.2f}" for way, ms in found.items() if way != usual)
    best = min(found, key=found.__getitem__)
    lost = found.get(chosen, found[usual]) / found[best]
    rate = 2e-6 * shape.multiplications / found[usual]
    told = trial.plan(chosen, policy.block(chosen, shape)) if is_generated(chosen) else chosen
    return f"| {name} | {shape} | {found[usual]:.3f} | {rate:.0f} | {ratios} | {told} | {lost:.2f} |"


def merged_row(m: int, k: int, n: int, rounds: int) -> str:
    x, weights = torch.randn(m, k), [torch.randn(n, k) for _ in range(3)]
    three = [product(x, w.t()) for w in weights]
    found = medians({"three": lambda: [run() for run in three], "one": product(x, torch.cat(weights).t())}, rounds)
    return f"| {m} x {k} to 3 x {n} | {found['three']:.3f} | {found['one']:.3f} | {found['one'] / found['three']:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--merged", action="store_true", help="also three products that share an operand beside one")
    options = parser.parse_args()
    SESSION.reset("choices")
    threads = torch.get_num_threads()
    policy = host_backend().products(threads, False)
    print(f"torch {torch.__version__}, TVM {tvm.__version__}, {threads} threads\n")
    print("| product | shape | torch ms | GFLOP/s | ratios to torch's | chosen | chosen / best |")
    print("|---|---|---:|---:|---|---|---:|")
    for element_type in ("float32", "bfloat16"):
        shapes = [item for size in LINEARS for item in linear_shapes(*size, element_type).items()]
        shapes += [item for size in ATTENTIONS for item in attention_shapes(*size, element_type).items()]
        for name, shape in shapes:
            print(way_row(policy, name, shape, options.rounds), flush=True)
    if options.merged:
        print("\n| query, key, value | three products ms | one merged ms | one / three |\n|---|---:|---:|---:|")
        for size in MERGED:
            print(merged_row(*size, options.rounds), flush=True)


if __name__ == "__main__":
    main()
