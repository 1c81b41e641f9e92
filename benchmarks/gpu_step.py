"""GPU time of a block's forward and backward: peers by turns; steps of our programs with their bandwidth.

    python -m benchmarks gpu_step                                   # BertLayer, the shapes and precisions of the table
    python -m benchmarks gpu_step --shape 8,128 --precision amp tf32 --peers eager default graph
    python -m benchmarks gpu_step --block "GPT-2" --steps 30

All peers are in one process, each on a copy of one module, and take turns; medians over the rounds. ``gpu``: between
two CUDA events, with the host far enough ahead that the GPU waits for no launch. ``wall``: the host's clock from an
idle GPU to an idle GPU, after another peer's step; ``loop``: the same of twenty steps in a row, divided by twenty.
Peers: :mod:`benchmarks.gpu_peers`.

``--steps``: the time of each step of our programs, launched one by one, by CUDA events around it. For generated kernels
it compares the bandwidth (inputs and results once each) with a ``copy_`` (``of copy``).
``--kernels``: each peer's GPU kernels, by torch's profiler.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_clock import AHEAD_CYCLES, Step, by_turns, copy_bandwidth, in_a_row, show_kernels
from benchmarks.gpu_peers import PEERS, PRECISIONS, Batch, peer, settle
from benchmarks.train_blocks import BLOCKS, bert_layer
from bridge import stats
from bridge.compile import CallLibrary, Instruction, MakeView
from bridge.compile.runtime import executor

SHAPES = ("32,328", "8,128")
LOOP = 20
"""Steps in a row for the clock ``loop``."""


class StepClock:
    """The GPU time of each step of our programs, by CUDA events around it.

    Times the programs that are bound after the clock is installed.
    """

    def __init__(self) -> None:
        self.running = False
        self.found: list[tuple[Instruction, torch.cuda.Event, torch.cuda.Event]] = []

    def install(self) -> None:
        """Makes executors bind timed steps from now on."""
        bind = executor.bind

        def bind_timed(step: Instruction, *rest: Any) -> Callable[[list], None]:
            action = bind(step, *rest)
            return action if isinstance(step, MakeView) else partial(self._act, step, action)

        executor.bind = bind_timed

    def _act(self, step: Instruction, action: Callable[[list], None], registers: list) -> None:
        if not self.running:
            action(registers)
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        action(registers)
        last.record()
        self.found.append((step, first, last))

    def read(self, run: Step, repeats: int = 7) -> list[tuple[Instruction, float, int]]:
        """Each step, its microseconds and the number of steps of its name, the longest first; medians."""
        spent: defaultdict[str, list[float]] = defaultdict(list)
        for _ in range(repeats):
            self.found.clear()
            torch.cuda.synchronize()
            torch.cuda._sleep(AHEAD_CYCLES)
            self.running = True
            try:
                run()
            finally:
                self.running = False
            torch.cuda.synchronize()
            once: Counter[str] = Counter()
            for step, first, last in self.found:
                once[_kind(step)] += first.elapsed_time(last) * 1e3
            for kind, microseconds in once.items():
                spent[kind].append(microseconds)
        steps = {_kind(step): step for step, *_ in self.found}
        calls = Counter(_kind(step) for step, *_ in self.found)
        times = {kind: statistics.median(each) for kind, each in spent.items()}
        return [(steps[kind], times[kind], calls[kind]) for kind in sorted(times, key=times.__getitem__, reverse=True)]


CLOCK = StepClock()


def _kind(step: Instruction) -> str:
    """The group of a step in the report: launches of one kernel, products of one size."""
    return f"{step.name} {step.contents.flops}" if isinstance(step, CallLibrary) else step.name


def show_steps(run: Step, most: int, bandwidth: float) -> None:
    """Prints the times of our programs' steps."""
    found = CLOCK.read(run)
    print(f" {sum(spent for _, spent, _ in found):.0f} us in {sum(calls for *_, calls in found)} steps")
    for step, spent, calls in found[:most]:
        moved, flops = step.contents.bytes * calls, step.contents.flops * calls
        speed = f"{moved / 1e6:7.1f} MB {moved / (spent * 1e-6) / bandwidth:5.2f} of copy"
        if isinstance(step, CallLibrary):
            speed += f", {flops / spent / 1e6:.1f} TFLOP/s"
        print(f"  {spent:8.1f} us {calls:3} x  {step.name[:60]} -> {step.outputs[0][:30]}  {speed}", flush=True)


def measure(block: str, shape: tuple[int, ...], name: str, options: argparse.Namespace, bandwidth: float) -> None:
    """Prints the times of all peers, then our steps."""
    precision, (make, _) = PRECISIONS[name], BLOCKS[block]
    make = make if options.attention == "eager" else partial(bert_layer, options.attention)
    torch.manual_seed(0)
    device, batch = torch.device("cuda"), Batch((torch.randn(shape, requires_grad=True),))
    head = f"{block.partition(' (')[0]} {shape} {name}"
    with precision.switched():
        runs, modules, first = {}, {}, {}
        for each in dict.fromkeys(["ours", *options.peers, *(["launched"] if options.steps else [])]):
            started = time.perf_counter()
            runs[each], modules[each] = peer(each, make, batch, precision, device)
            torch.cuda.synchronize()
            first[each] = time.perf_counter() - started
        settle(runs)
        for clock, ahead, steps in (("gpu", True, 1), ("wall", False, 1), ("loop", False, LOOP)):
            spent = by_turns({each: in_a_row(run, steps) for each, run in runs.items()}, options.rounds, ahead)
            spent = {each: value / steps for each, value in spent.items()}
            ratios = [f"ours/{each} {spent['ours'] / spent[each]:.2f}" for each in options.peers]
            times = [f"{each} {value:.3f} ms" for each, value in spent.items()]
            print(f"{head} {clock}: {', '.join(ratios)}; {', '.join(times)}", flush=True)
        print(f"{head} first step: {', '.join(f'{each} {value:.1f} s' for each, value in first.items())}", flush=True)
        if options.steps:
            show_steps(runs["launched"], options.steps, bandwidth)
        for each, run in runs.items() if options.kernels else ():
            show_kernels(f"{head} {each}", run, options.kernels)
        print(f"{head} {stats(modules['ours']).graphs}", flush=True)
    assert not stats(modules["ours"]).misses, stats(modules["ours"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block", default="BertLayer", help="the first block of train_blocks whose name contains this")
    parser.add_argument("--shape", nargs="+", default=SHAPES, help="its leading extents, as in 32,328")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=("fp32", "tf32", "amp"))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=("eager",))
    parser.add_argument("--attention", choices=("eager", "sdpa"), default="eager", help="transformers', of a BertLayer")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, metavar="N", help="also the N longest steps of our programs")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="also the N longest kernels of each peer")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    block = next(name for name in BLOCKS if options.block in name)
    tail = BLOCKS[block][1]
    bandwidth = copy_bandwidth(torch.device("cuda"))
    if options.steps:
        CLOCK.install()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    for text in options.shape:
        leading = tuple(int(extent) for extent in text.split(","))
        for name in options.precision:
            measure(block, (*leading, *tail[len(leading) :]), name, options, bandwidth)


if __name__ == "__main__":
    main()
