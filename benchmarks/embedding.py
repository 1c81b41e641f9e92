"""Gradient of an embedding: our dispatched step (forward + backward) beside ``embedding_dense_backward``.

python -m benchmarks.embedding
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from bridge import add_tvm_dispatch, stats

ROWS, WIDTH, INDICES, ROUNDS = 30_000, 768, 4_096, 20


def seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def main() -> None:
    torch.manual_seed(0)
    eager = nn.Embedding(ROWS, WIDTH)
    indices = torch.randint(0, ROWS, (8, INDICES // 8))
    grad = torch.randn(*indices.shape, WIDTH)
    ours = copy.deepcopy(eager)
    add_tvm_dispatch(ours, indices)

    def step(module: nn.Module) -> None:
        module.weight.grad = None
        module(indices).backward(grad)

    peers = {
        "torch.ops.aten.embedding_dense_backward": lambda: torch.ops.aten.embedding_dense_backward(
            grad, indices, ROWS, -1, False
        ),
        "eager forward + backward": lambda: step(eager),
        "ours forward + backward": lambda: step(ours),
    }
    times: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(ROUNDS):
        for name, run in peers.items():
            times[name].append(seconds(run))
    assert not stats(ours).misses
    torch.testing.assert_close(ours.weight.grad, eager.weight.grad, rtol=0, atol=0)
    base = statistics.median(times["torch.ops.aten.embedding_dense_backward"])
    print(f"table {ROWS} x {WIDTH}, {INDICES} indices, float32, medians of {ROUNDS}, interleaved\n")
    print("| | ms | ratio |\n|---|---:|---:|")
    for name, values in times.items():
        median = statistics.median(values)
        print(f"| {name} | {1e3 * median:.2f} | {median / base:.2f} |")


if __name__ == "__main__":
    main()
