"""GPU time of a block's forward and backward: step times by turns, and the kernels of a step with their bandwidth.

    python -m benchmarks gpu_step                                   # BertLayer, the shapes and precisions of the table
    python -m benchmarks gpu_step --shape 8,128 --precision amp tf32 --peers eager default graph
    python -m benchmarks gpu_step --block "GPT-2" --steps 30

All peers are in one process, each on a copy of one module, and take turns; medians over the rounds. ``gpu``: between
two CUDA events, with the host so far ahead that no launch is waited for. ``wall``: the host's clock from an idle GPU to
an idle GPU.
Kernels: of one step by torch's profiler, summed by name. Of our generated ones the bytes that they have to move are
known: inputs and results, once each; ``of copy`` compares what they reach with a ``copy_`` of the same machine.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.train_blocks import BLOCKS
from bridge import add_tvm_dispatch, explain, stats

WARM_UP = 5
AHEAD_CYCLES = 16_000_000
"""Of the GPU's clock, during which the host launches a step: some 8 ms."""
SHAPES = ("32,328", "8,128")
PEERS = {"default": None, "reduce-overhead": "reduce-overhead", "max-autotune": "max-autotune"}
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
        """The settings, restored afterwards."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
        try:
            with torch.autocast("cuda", self.autocast, enabled=self.autocast is not None):
                yield
        finally:
            torch.set_float32_matmul_precision(before)


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
        return graph.replay


def peers(name: str, make: Callable[[], nn.Module], x: Tensor, precision: Precision) -> tuple[Step, nn.Module]:
    """A peer's step, which has run once, and its module."""
    torch.manual_seed(0)
    module = make().to(x.device, precision.dtype).train()
    if name == "ours":
        add_tvm_dispatch(module, x.detach().clone().requires_grad_())
    elif name in PEERS:
        module = torch.compile(module, mode=PEERS[name])
    peer = Peer(module, x, precision)
    run = peer.graphed() if name == "graph" else peer.step
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
    """What the GPU spends on each step of our programs and on each operator of eager's, by CUDA events around them.

    Programs that are bound while the clock is installed are timed while it runs; what else runs is untouched.
    """

    def __init__(self) -> None:
        self.running = False
        self.found: list[tuple[Hashable, torch.cuda.Event, torch.cuda.Event]] = []

    def install(self) -> None:
        """Has executors bind steps that can be timed, from now on."""
        bind = executor.bind

        def bind_timed(step: Instruction, *rest: Any) -> Callable[[list], None]:
            action = bind(step, *rest)
            return action if isinstance(step, View) else partial(self.timed, step, action)

        executor.bind = bind_timed

    def timed(self, key: Hashable, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs something, between two events while the clock runs."""
        if not self.running:
            return run(*args, **kwargs)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        result = run(*args, **kwargs)
        last.record()
        self.found.append((key, first, last))
        return result

    def read(self, run: Step, repeats: int = 5) -> list[tuple[Hashable, float, float]]:
        """Key, microseconds and number of what a step ran, the longest first; medians over the repeats."""
        spent: defaultdict[Hashable, list[float]] = defaultdict(list)
        calls: Counter[Hashable] = Counter()
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
            once: Counter[Hashable] = Counter()
            calls.clear()
            for key, first, last in self.found:
                once[key] += first.elapsed_time(last) * 1e3
                calls[key] += 1
            for key, microseconds in once.items():
                spent[key].append(microseconds)
        times = {key: statistics.median(each) for key, each in spent.items()}
        return [(key, times[key], calls[key]) for key in sorted(times, key=times.__getitem__, reverse=True)]


CLOCK = StepClock()


class _Operators(TorchDispatchMode):
    """Times each operator that runs under it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        shapes = [tuple(arg.shape) for arg in args if isinstance(arg, Tensor)]
        return CLOCK.timed(f"{func} {shapes}", func, *args, **(kwargs or {}))


def show_steps(peer: str, run: Step, most: int, bandwidth: float) -> None:
    """Prints what the steps of our programs, or eager's operators, take."""
    if peer == "ours":
        found = CLOCK.read(run)
    else:
        with _Operators():  # backwards run in a thread of their own, where no mode is
            found = CLOCK.read(run)
    print(f" {peer}: {sum(spent for _, spent, _ in found):.0f} us in {sum(calls for *_, calls in found)} steps")
    for key, spent, calls in found[:most]:
        print(f"  {spent:8.1f} us {calls:3} x  {_told(key, spent * 1e-6, calls, bandwidth)}")
    sys.stdout.flush()


def _told(key: Hashable, seconds: float, calls: int, bandwidth: float) -> str:
    """What a step is, and how fast."""
    if isinstance(key, str):
        return key[:110]
    moved, flops = key.contents.bytes * calls, key.contents.flops * calls
    name = f"{key.name[:70]} -> {key.outputs[0][:30]}"
    if isinstance(key, CallLibrary):
        return f"{name}  {flops / seconds / 1e12:6.1f} TFLOP/s, {moved / 1e6:.1f} MB"
    return f"{name}  {moved / 1e6:7.1f} MB {moved / seconds / bandwidth:5.2f} of copy"


def measure(block: str, shape: tuple[int, ...], name: str, options: argparse.Namespace, bandwidth: float) -> None:
    """Prints the times of all peers, then their kernels."""
    precision, (make, _) = PRECISIONS[name], BLOCKS[block]
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda", dtype=precision.dtype)
    with precision.switched():
        runs, modules, first = {}, {}, {}
        for peer in ["ours", *options.peers]:
            started = time.perf_counter()
            runs[peer], modules[peer] = peers(peer, make, x, precision)
            torch.cuda.synchronize()
            first[peer] = time.perf_counter() - started
        head = f"{block.partition(' (')[0]} {shape} {name}"
        for clock, ahead in (("gpu", True), ("wall", False)):
            spent = by_turns(runs, options.rounds, ahead)
            ratios = [f"ours/{peer} {spent['ours'] / spent[peer]:.2f}" for peer in options.peers]
            times = [f"{peer} {value:.3f} ms" for peer, value in spent.items()]
            print(f"{head} {clock}: {', '.join(ratios)}; {', '.join(times)}", flush=True)
        print(f"{head} first step: {', '.join(f'{peer} {value:.1f} s' for peer, value in first.items())}", flush=True)
        for peer, run in runs.items() if options.steps else ():
            most = options.steps if peer == "ours" else options.steps // 2
            if peer in ("ours", "eager"):
                show_steps(peer, run, most, bandwidth)
    assert not stats(modules["ours"]).misses, stats(modules["ours"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block", default="BertLayer", help="the first block of train_blocks whose name contains this")
    parser.add_argument("--shape", nargs="+", default=SHAPES, help="its leading extents, as in 32,328")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=("fp32", "tf32", "amp"))
    parser.add_argument("--peers", nargs="+", choices=("eager", "graph", *PEERS), default=("eager",))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--kernels", type=int, default=0, metavar="N", help="also ours' N longest kernels, half as many of others"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    block = next(name for name in BLOCKS if options.block in name)
    tail = BLOCKS[block][1]
    bandwidth = copy_bandwidth(torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    for text in options.shape:
        leading = tuple(int(extent) for extent in text.split(","))
        for name in options.precision:
            measure(block, (*leading, *tail[len(leading) :]), name, options, bandwidth)


if __name__ == "__main__":
    main()
