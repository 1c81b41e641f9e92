"""The partition on many graphs: validity, determinism, and its time.

    python -m benchmarks.partition_graphs

A thousand random joint functions of 60 to 160 forward bindings (larger ones than in the property tests): each is cut
twice. Plans and halves must be the same text, and the halves must compute the joint function from the saved tensors.
Then a joint function as large as BERT-base's: 12 layers.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from autodiff.ir import bindings
from partition import partition
from tests.partition.backprop import bert
from tests.partition.evaluate import evaluate, random_args, run_both_halves
from tests.partition.random_joints import random_joint


def check(seed: int) -> tuple[int, float]:
    """Bindings and seconds of one random graph. ``AssertionError`` if the cut is not valid or not deterministic."""
    nodes = 60 + seed % 101
    joint, num_primals, num_outputs = random_joint(seed, nodes)
    started = time.perf_counter()
    parts = partition(joint, num_primals=num_primals, num_outputs=num_outputs)
    seconds = time.perf_counter() - started
    again = partition(random_joint(seed, nodes)[0], num_primals=num_primals, num_outputs=num_outputs)
    assert parts.plan == again.plan, f"seed {seed}: two plans"
    assert str(parts.forward) == str(again.forward) and str(parts.backward) == str(again.backward), f"seed {seed}"
    args = random_args(joint.params, seed)
    with np.errstate(all="ignore"):  # deep random graphs overflow, on both sides alike
        expected = evaluate(joint, args)
        outputs, gradients = run_both_halves(parts, num_primals, num_outputs, args)
    for found, wanted in zip([*outputs, *gradients], expected, strict=True):
        np.testing.assert_array_equal(found, wanted, err_msg=f"seed {seed}")
    return sum(1 for _ in bindings(joint)), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=int, default=1000)
    options = parser.parse_args()
    checked = [check(seed) for seed in range(options.graphs)]
    sizes, seconds = zip(*checked, strict=True)
    print("| graphs | bindings | valid and deterministic | median s | slowest s |\n|---|---:|---|---:|---:|")
    size = f"{min(sizes)} to {max(sizes)}"
    print(f"| {len(checked)} random | {size} | all | {np.median(seconds):.3f} | {max(seconds):.3f} |", flush=True)
    joint, num_primals, num_outputs = bert(12, 8, 128, 768, 12)
    started = time.perf_counter()
    parts = partition(joint, num_primals=num_primals, num_outputs=num_outputs)
    spent = time.perf_counter() - started
    assert parts.plan.bytes < parts.plan.save_all_bytes
    print(f"| BERT-base, 12 layers | {sum(1 for _ in bindings(joint))} | | {spent:.3f} | {spent:.3f} |")


if __name__ == "__main__":
    main()
