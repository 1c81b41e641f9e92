"""GPU time of a block's forward and backward: peers by turns; steps of our programs with the bandwidth they reach.

    python -m benchmarks gpu_step                                   # BertLayer, the shapes and precisions of the table
    python -m benchmarks gpu_step --shape 8,128 --precision amp tf32 --peers eager default graph
    python -m benchmarks gpu_step --block "GPT-2" --steps 30

All peers are in one process, each on a copy of one module, and take turns; medians over the rounds. ``gpu``: between
two CUDA events, with the host so far ahead that no launch is waited for. ``wall``: the host's clock from an idle GPU to
an idle GPU. Peers: ``graph`` is eager's whole step in a CUDA graph, ``recorded`` ours with ``cuda_graphs=True``; the
others are modes of ``torch.compile``.

``--steps``: what each step of our programs takes, by CUDA events around it. Of generated kernels the bytes that they
have to move are known, inputs and results once each; ``of copy`` compares what they reach with a ``copy_``.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.train_blocks import BLOCKS
from bridge import add_tvm_dispatch, stats
from bridge.compile import CallLibrary, Instruction, View
from bridge.compile.runtime import executor

WARM_UP = 5
AHEAD_CYCLES = 16_000_000
"""Of the GPU's clock, during which the host launches a step: some 8 ms."""
SHAPES = ("32,328", "8,128")
COMPILED = {"default": None, "reduce-overhead": "reduce-overhead", "max-autotune": "max-autotune"}
"""``torch.compile`` by mode."""

Step = Callable[[], None]


@dataclass(frozen=True)
class Precision:
    """What all numbers of a run are, and what is switched on around its steps."""

    dtype: torch.dtype = torch.float32
    tf32: bool = False
    autocast: torch.dtype | None = None

    @contextlib.contextmanager
    def switched(self) -> Iterator[None]:
        """The settings but autocast, restored afterwards."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)

    def casting(self) -> torch.autocast:
        """Autocast, if there is any."""
        return torch.autocast("cuda", self.autocast, enabled=self.autocast is not None)


PRECISIONS = {
    "fp32": Precision(),
    "tf32": Precision(tf32=True),
    "amp": Precision(autocast=torch.bfloat16),
    "amp16": Precision(autocast=torch.float16),
    "bf16": Precision(torch.bfloat16),
    "fp16": Precision(torch.float16),
}


class Peer:
    """One peer: a module that trains on its own leaf with one cotangent."""

    def __init__(self, module: nn.Module, x: Tensor, precision: Precision):
        self.module, self.precision = module, precision
        self.x = x.detach().clone().requires_grad_()
        self.leaves = [self.x, *module.parameters()]
        self.grad = torch.randn_like(self._forward())

    def _forward(self) -> Tensor:
        with self.precision.casting():  # for one forward: autocast casts weights once per step
            y = self.module(self.x)
        return y[0] if isinstance(y, tuple) else y

    def step(self) -> None:
        """Forward and backward; gradients are new at each step, as after ``optimizer.zero_grad()``."""
        for leaf in self.leaves:
            leaf.grad = None
        self._forward().backward(self.grad)

    def graphed(self) -> Step:
        """The step's replay as one CUDA graph: its gradients lie where they lay."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        for leaf in self.leaves:
            leaf.grad = None
        with torch.cuda.graph(graph):
            self._forward().backward(self.grad)

        def replay(_read: Peer = self) -> None:  # what the graph reads is not to be given to others
            graph.replay()

        return replay


def peer(name: str, make: Callable[[], nn.Module], x: Tensor, precision: Precision) -> tuple[Step, nn.Module]:
    """A peer's step, which has run once, and its module."""
    torch.manual_seed(0)
    module = make().to(x.device, precision.dtype).train()
    if name in ("ours", "recorded"):
        with precision.casting():
            add_tvm_dispatch(module, x.detach().clone().requires_grad_(), cuda_graphs=name == "recorded")
    elif name in COMPILED:
        module = torch.compile(module, mode=COMPILED[name])
    made = Peer(module, x, precision)
    run = made.graphed() if name == "graph" else made.step
    run()
    return run, module


def by_turns(runs: dict[str, Step], rounds: int, ahead: bool) -> dict[str, float]:
    """Milliseconds of a step, medians: the GPU's with the host ahead of it, or the host's."""
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + WARM_UP):
        for name, run in runs.items():
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            if ahead:
                torch.cuda._sleep(AHEAD_CYCLES)
            started = time.perf_counter()
            first.record()
            run()
            last.record()
            torch.cuda.synchronize()
            if turn >= WARM_UP:
                spent[name].append(first.elapsed_time(last) if ahead else (time.perf_counter() - started) * 1e3)
    return {name: statistics.median(values) for name, values in spent.items()}


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a large ``copy_`` reads and writes."""
    source = torch.empty(2**27, device=device)
    target = torch.empty_like(source)
    spent = by_turns({"copy": lambda: target.copy_(source)}, 20, ahead=True)["copy"]
    return 2 * source.nbytes / (spent * 1e-3)


class StepClock:
    """What the GPU spends on each step of our programs, by CUDA events around them.

    Programs that are bound once the clock is installed are timed while it runs.
    """

    def __init__(self) -> None:
        self.running = False
        self.found: list[tuple[Instruction, torch.cuda.Event, torch.cuda.Event]] = []

    def install(self) -> None:
        """Has executors bind steps that can be timed, from now on."""
        bind = executor.bind

        def bind_timed(step: Instruction, *rest: Any) -> Callable[[list], None]:
            action = bind(step, *rest)
            return action if isinstance(step, View) else partial(self._act, step, action)

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
        """Each step, its microseconds and how many of its name there are, the longest first; medians."""
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
    """Steps of one kind are told together: launches of a kernel, products of as much work."""
    return f"{step.name} {step.contents.flops}" if isinstance(step, CallLibrary) else step.name


def show_steps(run: Step, most: int, bandwidth: float) -> None:
    """Prints what the steps of our programs take."""
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
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda", dtype=precision.dtype)
    head = f"{block.partition(' (')[0]} {shape} {name}"
    with precision.switched():
        runs, modules, first = {}, {}, {}
        for each in ["ours", *options.peers]:
            started = time.perf_counter()
            runs[each], modules[each] = peer(each, make, x, precision)
            torch.cuda.synchronize()
            first[each] = time.perf_counter() - started
        for clock, ahead in (("gpu", True), ("wall", False)):
            spent = by_turns(runs, options.rounds, ahead)
            ratios = [f"ours/{each} {spent['ours'] / spent[each]:.2f}" for each in options.peers]
            times = [f"{each} {value:.3f} ms" for each, value in spent.items()]
            print(f"{head} {clock}: {', '.join(ratios)}; {', '.join(times)}", flush=True)
        print(f"{head} first step: {', '.join(f'{each} {value:.1f} s' for each, value in first.items())}", flush=True)
        if options.steps:
            show_steps(runs["ours"], options.steps, bandwidth)
    assert not stats(modules["ours"]).misses, stats(modules["ours"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block", default="BertLayer", help="the first block of train_blocks whose name contains this")
    parser.add_argument("--shape", nargs="+", default=SHAPES, help="its leading extents, as in 32,328")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=("fp32", "tf32", "amp"))
    parser.add_argument("--peers", nargs="+", choices=("eager", "graph", "recorded", *COMPILED), default=("eager",))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, metavar="N", help="also the N longest steps of our programs")
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
